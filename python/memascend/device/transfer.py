"""Copies units to a device, and gradients from a device, through a few chunks of pinned host memory."""

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


# The number of threads that verify checksums. These threads leave the staging thread time to begin copies. Each of them
# verifies more bytes per second than several drives together read.
CHECKERS = 2


class _UnitUpload:
    """The upload of one unit; `Staging._changed` guards all writes to the fields."""

    __slots__ = ("address", "base", "copied", "error", "last", "next", "parts", "places", "working")

    def __init__(self, parts: UnitParts, base: torch.Tensor) -> None:
        self.parts: UnitParts | None = parts
        self.places = parts.places()  # for each part: its offset in the unit, and its number of bytes
        # The lease on the device; None once no more copies to the lease are begun.
        self.base: torch.Tensor | None = base
        self.address = base.data_ptr()
        self.next = 0  # the index of the next part to read
        self.copied = 0  # the number of copies that were begun
        # The copy that was begun last. Copies in one direction run in order, so all earlier copies end before it.
        self.last: Copy | None = None
        # How many parts the staging thread is working on.
        self.working = 0
        self.error: BaseException | None = None

    def take_part(self) -> int:
        """Returns the index of the next part, on which the staging thread begins to work."""
        index, self.next = self.next, self.next + 1
        self.working += 1
        return index

    def end_part(self, error: BaseException | None, copy: Copy | None) -> None:
        """Ends the work on a part. `copy`: the copy that was begun; None if the part failed or the unit was dropped."""
        self.working -= 1
        if copy is not None:
            self.last = copy
            self.copied += 1
        self.error = self.error or error
        if self.ended and not self.working:
            self.release()

    def cancel(self) -> None:
        """Makes the staging thread begin no more copies of this unit."""
        self.base = None

    def release(self) -> None:
        """Releases the lease and the parts.

        While the parts exist, the store does not write to the slots from which the parts are read.
        """
        self.base = self.parts = None

    @property
    def ended(self) -> bool:
        """True once the copies of all parts were begun, or a part failed."""
        return self.copied == len(self.places) or self.error is not None


@dataclass(eq=False, slots=True)
class Staged:
    """The caller's handle of an upload.

    Its deletion cancels parts that were not begun, and waits until the staging thread has ended its work on the others.
    """

    _staging: Staging
    _unit: _UnitUpload

    def wait(self) -> int:
        """Waits until all copies were begun; later work on the caller's stream waits for the copies.

        Returns:
            The number of bytes in the unit.

        Raises:
            StorageError: a drive failed, or the bytes differ from the written bytes (CorruptionError).
            DeviceError: the device failed.
            UsageError: the run was closed.
        """
        return self._staging.waited(self._unit)

    def __del__(self) -> None:
        self._staging.dropped(self._unit)


class Staging:
    """Uploads units to a device: a thread reads parts of units into chunks of host memory, and copies the chunks."""

    def __init__(
        self,
        device: Device,
        chunks: Sequence[torch.Tensor],
        parts_of: Callable[..., UnitParts],
        after: Callable[[torch.Tensor], Sequence[Copy]],
    ) -> None:
        """Starts the thread.

        `chunks` are pinned uint8 tensors of equal size, which begin on pages. `parts_of(name, bytes_max, settle=)`
        returns the parts of a unit, as `Engine.parts` does. `after(lease)` returns the work that must end before the
        lease is written; the thread calls it before the first copy to a lease.
        """
        self._device = device
        self._chunk_bytes = chunks[0].nbytes
        self._free = deque(chunks)
        # Chunks that are being copied to the device, in the order of their copies.
        self._copying: deque[tuple[torch.Tensor, Copy]] = deque()
        # Parts that are being read: the unit, the index of the part, its chunk, and the read.
        self._reading: deque[tuple[_UnitUpload, int, torch.Tensor, Any]] = deque()
        self._parts_of = parts_of
        self._after = after
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[_UnitUpload] = deque()
        self._closing = False
        self._broken: BaseException | None = None
        # The last copy of each uploaded unit, by the address of the unit's lease.
        self._arrived: dict[int, Copy] = {}
        self.wait_seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name="memascend-staging", daemon=True)
        self._thread.start()

    # --- callers -------------------------------------------------------------------

    def begin(self, name: str, base: torch.Tensor, *, settle: bool = False) -> Staged:
        """Begins to upload a unit, as the last commit left it, to a lease on the device.

        If the unit has deferred updates, also computes them. With `settle`, also writes these updates to the store.
        """
        unit = _UnitUpload(self._parts_of(name, self._chunk_bytes, settle=settle), base)
        with self._changed:
            self._require_working()
            self._waiting.append(unit)
            self._changed.notify_all()
        return Staged(self, unit)

    def waited(self, unit: _UnitUpload) -> int:
        """Implements `Staged.wait`."""
        began = time.perf_counter()
        with self._changed:
            while not unit.ended:
                self._require_working()
                # The caller waits for this unit, so it goes before units that are only fetched ahead.
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
        """Makes later work on the caller's stream wait for the copies that fill the lease `base`."""
        last = self._arrived.get(base.data_ptr())
        if last is not None:
            with failures_named(self._device):
                last.order()

    def _require_working(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise UsageError("this run was closed, so no more units can be read: call offload() again")

    def dropped(self, unit: _UnitUpload) -> None:
        """Implements the deletion of a `Staged`."""
        with self._changed:
            unit.cancel()
            if unit in self._waiting:
                self._waiting.remove(unit)
            while unit.working and self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._changed.wait(0.1)
            unit.release()

    def close(self) -> None:
        """Ends the thread after its current work, and waits for its copies. Repeated calls are fine."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for _, copy in self._copying:
            # A lost device raises an error here, but no longer reads from the chunk.
            with contextlib.suppress(DeviceError), failures_named(self._device):
                copy.wait()

    # --- the thread ----------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with failures_named(self._device):
                self._device.enter_thread()
                self._work()
        except BaseException as error:  # noqa: BLE001
            # The device is probably lost. Present and later callers raise this error.
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
        """Frees the chunks whose copies have ended, in their order. With `wait`, waits for the first copy."""
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
        """Begins to read parts of the first waiting units, as long as chunks are free."""
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
        """Waits for the read that was begun first, and begins to copy its part to the device."""
        unit, index, chunk, part = self._reading.popleft()
        start, nbytes = unit.places[index]
        copy = failed = None
        try:
            part.wait()
            base = unit.base
            if base is not None:
                # `_after` returns its list only once for each lease, so it is called only if a copy follows. Later
                # copies of the unit run after its first copy anyway.
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

    data: torch.Tensor  # the bytes, in the order in which the parameter is stored
    after: Copy  # marks the end of the work that computes the gradient


@dataclass(eq=False, slots=True)
class _Window:
    """A buffer in host memory with a range of a gradient's bytes, which may still be on their way from the device."""

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
        """True if the window has these bytes of a gradient, or if these bytes are on their way."""
        return self.gradient is gradient and self.start <= start and start + nbytes <= self.start + self.nbytes

    def fill(self, device: Device, gradient: _Gradient, start: int, nbytes: int) -> None:
        """Begins to copy at most `nbytes` of a gradient's bytes, from `start` on, into the window."""
        self.wait()
        self.gradient, self.start = gradient, start
        self.nbytes = min(nbytes, gradient.data.nbytes - start)
        part = gradient.data[start : start + self.nbytes]
        self.copy = device.take(part, self.memory[: self.nbytes], [gradient.after])

    def release(self) -> None:
        """Waits for the copy, and releases the gradient."""
        self.wait()
        self.gradient = None


class DeviceEngine:
    """Wraps an engine, so that `update`, `spill` and `apply` accept gradients on a device.

    All other calls go to the engine unchanged.
    """

    def __init__(
        self, engine: Engine, device: Device, windows: Sequence[torch.Tensor], ram_tier: Collection[str] = ()
    ) -> None:
        """Makes the engine read gradients through two windows, except gradients of records in the `ram_tier`.

        Gradients of the RAM tier wait in host memory until step(), so they are copied whole. `windows` must be two
        pinned uint8 tensors of equal size, at least as large as the gradient bytes that a chunk of an update reads.
        """
        self._engine = engine
        self._ram_tier = frozenset(ram_tier)
        self._device = device
        self._windows = [_Window(memory) for memory in windows]
        self._bytes = windows[0].nbytes
        # Guards the windows. `_window` runs on the engine's thread. `end` runs on the thread that closes the run.
        self._lock = threading.Lock()
        self.update = self._lending(engine.update)
        self.spill = self._lending(engine.spill)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _lending(self, method: Callable[..., None]) -> Callable[..., None]:
        """Returns a function that calls `method` of the engine, and also accepts a gradient on the device.

        The gradient is the second argument of `method`.
        """

        def call(name: str, gradient: torch.Tensor, *numbers: Any, **options: Any) -> None:
            method(name, self._lend(name, gradient), *numbers, **options)

        return call

    def apply(
        self, name: str, function: Callable[[Chunk], object], *, gradient: torch.Tensor | None = None, **options: Any
    ) -> None:
        """Calls `Engine.apply`; `gradient` may be on the device."""
        given = None if gradient is None else self._lend(name, gradient)
        self._engine.apply(name, function, gradient=given, **options)

    def end(self) -> None:
        """Waits for copies to windows, so that their memory may be released; call it once the engine is closed."""
        # A lost device raises an error here, but no longer writes to the windows.
        with self._lock, contextlib.suppress(DeviceError), failures_named(self._device):
            for window in self._windows:
                window.release()

    def _lend(self, name: str, gradient: torch.Tensor) -> torch.Tensor | Lent:
        """Returns the gradient in a form that the engine accepts.

        A gradient in host memory is returned as it is. A gradient on the device is copied to host memory if its record
        is in the RAM tier; else the result is a `Lent`, from which the engine reads the gradient in windows.
        """
        if gradient.device != self._device.torch_device:
            # The tensor is already in host memory, like the values that materialized() or edit() writes back.
            return gradient
        self._device.require_no_capture()
        with torch.no_grad(), failures_named(self._device):
            if name in self._ram_tier:
                host = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="cpu")
                return host.copy_(gradient.detach())
            data = bytes_of(gradient.detach())
            # The kernels that compute the gradient are queued on the caller's stream.
            made = _Gradient(data, self._device.mark(self._device.stream()))
        return Lent(gradient, partial(self._window, made), partial(self._order, made))

    def _order(self, gradient: _Gradient) -> None:
        """Makes later work of the engine's thread on the device wait for the kernels that compute a gradient."""
        self._device.enter_thread()
        gradient.after.order()

    def _window(self, gradient: _Gradient, start: int, nbytes: int) -> tuple[int, int, int]:
        """Finds a window with `nbytes` of a gradient, from byte `start` on; if there is none, fills a window.

        Also begins to copy the bytes after this window, if there are any, to the other window.

        Returns:
            The address of a window, the index of its first byte in the gradient, and its number of bytes.
        """
        # A window contains only whole chunks of the update. Each chunk has `nbytes`; only the last chunk may be
        # smaller.
        span = self._bytes // nbytes * nbytes
        if not span:
            raise UsageError(
                f"a chunk of {nbytes} bytes of a gradient does not fit a window of {self._bytes} bytes: give "
                "DeviceEngine larger windows"
            )
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
                # This window has the end of the gradient.
                for one in self._windows:
                    one.release()
            return window.memory.data_ptr(), window.start, window.nbytes
