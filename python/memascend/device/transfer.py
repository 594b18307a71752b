"""Copies units to a device and gradients from it through a few chunks of pinned host memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.device.device import failures_named
from memascend.errors import DeviceError, UsageError
from memascend.storage.records import Lent
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from memascend.device.device import Copy, Device
    from memascend.storage import Chunk, Engine, UnitParts


# Threads that verify checksums, beside the one that begins copies: each is faster than several drives.
CHECKERS = 2


class _UnitUpload:
    """A unit that is being uploaded. Guarded by the staging's lock."""

    __slots__ = ("address", "base", "copied", "error", "last", "next", "parts", "places", "working")

    def __init__(self, parts: UnitParts, base: torch.Tensor) -> None:
        self.parts: UnitParts | None = parts
        self.places = parts.places()
        # The lease; None once nothing is copied to it any more.
        self.base: torch.Tensor | None = base
        self.address = base.data_ptr()
        self.next = 0
        self.copied = 0
        # The copies of a device in one direction are in order: after the last one they all are.
        self.last: Copy | None = None
        # Parts that the thread works on.
        self.working = 0
        self.error: BaseException | None = None

    def take_part(self) -> int:
        index, self.next = self.next, self.next + 1
        self.working += 1
        return index

    def end_part(self, error: BaseException | None, copy: Copy | None) -> None:
        """End the work on a part: its copy was begun, it failed, or its unit was dropped."""
        self.working -= 1
        if copy is not None:
            self.last = copy
            self.copied += 1
        self.error = self.error or error
        if self.ended and not self.working:
            self.let_go()

    def cancel(self) -> None:
        """Let parts that are being read go nowhere."""
        self.base = None

    def let_go(self) -> None:
        """Release the lease, and the slots that are read, which may be staged into again."""
        self.base = self.parts = None

    @property
    def ended(self) -> bool:
        return self.copied == len(self.places) or self.error is not None


@dataclass(eq=False, slots=True)
class Staged:
    """The caller's handle of an upload. Dropping it cancels parts that were not begun, and waits for the others."""

    _staging: Staging
    _unit: _UnitUpload

    def wait(self) -> int:
        """Wait until every copy is begun, and let later work of the caller come after them.

        Returns:
            Its bytes.

        Raises:
            StorageError: a drive failed, or its bytes are not the written ones (CorruptionError).
        """
        return self._staging.waited(self._unit)

    def __del__(self) -> None:
        self._staging.dropped(self._unit)


class Staging:
    """Brings units to a device, through chunks that are its own."""

    def __init__(
        self,
        device: Device,
        chunks: Sequence[torch.Tensor],
        parts_of: Callable[..., UnitParts],
        after: Callable[[torch.Tensor], Sequence[Copy]],
    ) -> None:
        """Start its thread.

        `chunks` are pinned uint8 tensors of equal size, which begin on pages. `parts_of` gives the parts of a unit by
        its name, of at most so many bytes each, as `Engine.parts` does. `after` gives the work that has to be over
        before a lease is written to; it is called once for a lease, on the thread.
        """
        self._device = device
        self._chunk_bytes = chunks[0].nbytes
        self._free = deque(chunks)
        # Chunks that are copied to the device, in the order of their copies.
        self._copying: deque[tuple[torch.Tensor, Copy]] = deque()
        self._reading: deque[tuple[_UnitUpload, int, torch.Tensor, Any]] = deque()
        self._parts_of = parts_of
        self._after = after
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[_UnitUpload] = deque()
        self._closing = False
        self._broken: BaseException | None = None
        # By the address of its lease: the last copy of the unit that is there.
        self._arrived: dict[int, Copy] = {}
        self.wait_seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name="memascend-staging", daemon=True)
        self._thread.start()

    # --- callers -------------------------------------------------------------------

    def begin(self, name: str, base: torch.Tensor, *, settle: bool = False) -> Staged:
        """Begin to bring a unit, as the last commit left it, into a lease on the device.

        `settle`: write the updates that it left, which are computed for that.
        """
        unit = _UnitUpload(self._parts_of(name, self._chunk_bytes, settle=settle), base)
        with self._changed:
            self._require_working()
            self._waiting.append(unit)
            self._changed.notify_all()
        return Staged(self, unit)

    def waited(self, unit: _UnitUpload) -> int:
        """See `Staged.wait`."""
        began = time.perf_counter()
        with self._changed:
            while not unit.ended:
                self._require_working()
                # A unit that is waited for goes before units that are fetched ahead.
                if self._waiting and unit in self._waiting and self._waiting[0] is not unit:
                    self._waiting.remove(unit)
                    self._waiting.appendleft(unit)
                self._changed.wait(0.1)
            self.wait_seconds += time.perf_counter() - began
            if unit.error is not None:
                raise unit.error
        if unit.last is not None:
            self._arrived[unit.address] = unit.last
            with failures_named(self._device):
                unit.last.order()
        return sum(nbytes for _, nbytes in unit.places)

    def order(self, base: torch.Tensor) -> None:
        """Let later work of the caller come after the copy of the unit in a lease."""
        last = self._arrived.get(base.data_ptr())
        if last is not None:
            with failures_named(self._device):
                last.order()

    def _require_working(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise UsageError("the staging of units was closed with its run: call offload() again")

    def dropped(self, unit: _UnitUpload) -> None:
        """See `Staged`."""
        with self._changed:
            unit.cancel()
            if unit in self._waiting:
                self._waiting.remove(unit)
            while unit.working and self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._changed.wait(0.1)
            unit.let_go()

    def close(self) -> None:
        """End the thread, once its current work is over. Twice is fine."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for _, copy in self._copying:
            # A device that is lost copies nothing any more.
            with contextlib.suppress(DeviceError), failures_named(self._device):
                copy.wait()

    # --- the thread ----------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with failures_named(self._device):
                self._device.enter_thread()
                self._work()
        except BaseException as error:  # noqa: BLE001
            # A device that is lost, most likely: current and later waiters raise this error.
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            self._recycle(wait=not self._free and not self._reading)
            if self._free:
                self._begin_reads()
            if self._reading:
                self._copy_one()
                continue
            with self._changed:
                if self._closing:
                    return
                if not self._waiting:
                    self._changed.wait()

    def _recycle(self, *, wait: bool) -> None:
        """Take chunks back that the device has copied, in their order."""
        while self._copying:
            chunk, copy = self._copying[0]
            if not copy.done():
                if not wait:
                    return
                copy.wait()
            wait = False
            self._copying.popleft()
            self._free.append(chunk)

    def _begin_reads(self) -> None:
        while self._free:
            with self._changed:
                if self._closing or not self._waiting:
                    return
                unit = self._waiting[0]
                parts = unit.parts
                if parts is None or unit.error is not None or unit.next == len(unit.places):
                    self._waiting.popleft()
                    self._changed.notify_all()
                    continue
                index = unit.take_part()
            chunk = self._free.popleft()
            try:
                part = parts.begin(index, chunk[: unit.places[index][1]])
            except BaseException as error:  # noqa: BLE001
                self._free.append(chunk)
                self._ended(unit, error)
                continue
            self._reading.append((unit, index, chunk, part))

    def _copy_one(self) -> None:
        unit, index, chunk, part = self._reading.popleft()
        start, nbytes = unit.places[index]
        copy = failed = None
        try:
            part.wait()
            base = unit.base
            if base is not None:
                # Only where a copy is begun: the list is returned once, and a unit may be dropped before. Later copies
                # come after the first one anyway.
                after = self._after(base) if unit.last is None else ()
                with failures_named(self._device):
                    copy = self._device.bring(chunk[:nbytes], base[start : start + nbytes], after)
        except BaseException as error:  # noqa: BLE001
            failed = error
        if copy is None:
            self._free.append(chunk)
        else:
            self._copying.append((chunk, copy))
        self._ended(unit, failed, copy)

    def _ended(self, unit: _UnitUpload, error: BaseException | None, copy: Copy | None = None) -> None:
        with self._changed:
            unit.end_part(error, copy)
            self._changed.notify_all()


class _Gradient(NamedTuple):
    """A gradient on the device."""

    data: torch.Tensor  # its bytes, in the order in which its parameter is stored
    after: Copy  # the work that made it


@dataclass(eq=False, slots=True)
class _Window:
    """A window on a gradient: the bytes in it, or being copied to it."""

    memory: torch.Tensor
    gradient: _Gradient | None = None
    start: int = 0
    nbytes: int = 0
    copy: Copy | None = None

    def wait(self) -> None:
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.wait()

    def has(self, gradient: _Gradient, start: int, nbytes: int) -> bool:
        """Whether bytes of a gradient are in it, or on their way."""
        return self.gradient is gradient and self.start <= start and start + nbytes <= self.start + self.nbytes

    def fill(self, device: Device, gradient: _Gradient, start: int, nbytes: int) -> None:
        """Begin to copy a gradient's bytes from `start` on, so many at most."""
        self.wait()
        self.gradient, self.start = gradient, start
        self.nbytes = min(nbytes, gradient.data.nbytes - start)
        part = gradient.data[start : start + self.nbytes]
        self.copy = device.take(part, self.memory[: self.nbytes], [gradient.after])

    def let_go(self) -> None:
        self.wait()
        self.gradient = None


class DeviceEngine:
    """An engine that is lent gradients on a device; all else is the engine's own."""

    def __init__(
        self, engine: Engine, device: Device, windows: Sequence[torch.Tensor], ram_tier: Collection[str] = ()
    ) -> None:
        """Lend gradients through two windows, and copy those of the `ram_tier`, which wait in host memory.

        The windows are pinned uint8 tensors of equal size, a multiple of what a chunk of an update takes.
        """
        self._engine = engine
        self._ram_tier = frozenset(ram_tier)
        self._device = device
        self._windows = [_Window(memory) for memory in windows]
        self._bytes = windows[0].nbytes
        # The engine asks on one thread; a step that failed may be asked about on another.
        self._lock = threading.Lock()
        self.update = self._lending(engine.update)
        self.spill = self._lending(engine.spill)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _lending(self, method: Callable[..., None]) -> Callable[..., None]:
        """A method of the engine whose second argument is a gradient, which is lent."""

        def call(name: str, gradient: torch.Tensor, *numbers: Any, **options: Any) -> None:
            method(name, self._lend(name, gradient), *numbers, **options)

        return call

    def apply(
        self, name: str, function: Callable[[Chunk], object], *, gradient: torch.Tensor | None = None, **options: Any
    ) -> None:
        """See `Engine.apply`."""
        given = None if gradient is None else self._lend(name, gradient)
        self._engine.apply(name, function, gradient=given, **options)

    def end(self) -> None:
        """Wait for copies to windows, so that their memory may be released: the engine is closed."""
        # A device that is lost copies nothing.
        with self._lock, contextlib.suppress(DeviceError), failures_named(self._device):
            for window in self._windows:
                window.let_go()

    def _lend(self, name: str, gradient: torch.Tensor) -> torch.Tensor | Lent:
        """The gradient as the engine takes it: itself where the engine can read it."""
        if gradient.device != self._device.torch_device:
            # Values that are written back: the engine reaches them.
            return gradient
        self._device.require_no_capture()
        with torch.no_grad(), failures_named(self._device):
            if name in self._ram_tier:
                host = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="cpu")
                return host.copy_(gradient.detach())
            data = bytes_of(gradient.detach())
            # The kernels that made it are on the caller's stream.
            made = _Gradient(data, self._device.mark(self._device.stream()))
        return Lent(gradient, partial(self._window, made), partial(self._order, made))

    def _order(self, gradient: _Gradient) -> None:
        """Let later work of the engine's thread come after the kernels that made a gradient."""
        self._device.enter_thread()
        gradient.after.order()

    def _window(self, gradient: _Gradient, start: int, nbytes: int) -> tuple[int, int, int]:
        """Where bytes of a gradient are in host memory: an address, the first byte there, and how many."""
        # Whole chunks of the update, as all but the last one are of one size.
        span = self._bytes // nbytes * nbytes
        if not span:
            raise UsageError(f"a chunk of {nbytes} bytes of a gradient does not fit a window of {self._bytes}")
        with self._lock, failures_named(self._device):
            self._device.enter_thread()
            window = next((window for window in self._windows if window.has(gradient, start, nbytes)), None)
            if window is None:
                window = self._windows[0]
                window.fill(self._device, gradient, start, span)
            window.wait()
            other = self._windows[1] if window is self._windows[0] else self._windows[0]
            after = window.start + window.nbytes
            if after < gradient.data.nbytes:
                if other.gradient is not gradient or other.start != after:
                    other.fill(self._device, gradient, after, window.nbytes)
            else:
                # The last of it.
                for one in self._windows:
                    one.let_go()
            return window.memory.data_ptr(), window.start, window.nbytes
