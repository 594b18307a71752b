"""Copies gradients from a device to the engine through two host windows, whatever the gradients' size."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memascend.device.device import failures_named
from memascend.engine.ffi import Lent
from memascend.errors import UsageError
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from memascend.device.device import Copy, Device
    from memascend.engine import Engine
    from memascend.engine.chunk import Chunk
    from memascend.engine.engine import Adam, Late

# {bytes: count}. One is used, one is filled. Each asks Python once: a step of 7 B parameters has 14 GB of gradients, so
# 3,400 windows of this size, where 1 MiB took 13,600. Larger ones keep the first chunk of each gradient waiting.
WINDOWS = {4 << 20: 2}


class _Gradient:
    """A gradient on the device, and what made it."""

    __slots__ = ("after", "data")

    def __init__(self, data: torch.Tensor, after: Copy) -> None:
        # Its bytes, in the order in which its parameter is stored.
        self.data = data
        self.after = after


class _Window:
    """A window on a gradient: what is in it, or on its way."""

    __slots__ = ("copy", "gradient", "memory", "nbytes", "start")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.gradient: _Gradient | None = None
        self.start = self.nbytes = 0
        self.copy: Copy | None = None

    def wait(self) -> None:
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.wait()


class DeviceEngine:
    """An engine that is lent gradients on a device; all else is the engine's own."""

    def __init__(
        self, engine: Engine, device: Device, windows: Sequence[torch.Tensor], held: Collection[str] = ()
    ) -> None:
        """Lend gradients through `windows`, and copy those of `held` entries, which wait in host memory.

        The windows are two pinned uint8 tensors of equal size, a multiple of what a chunk of an update takes.
        """
        self._engine = engine
        self._held = frozenset(held)
        self._device = device
        self._windows = [_Window(memory) for memory in windows]
        self._bytes = windows[0].nbytes
        # The engine asks on one thread; a step that failed may be asked about on another.
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update(self, name: str, gradient: torch.Tensor, numbers: Adam, *, values: torch.Tensor | None = None) -> None:
        """See `Engine.update`."""
        self._engine.update(name, self._lend(name, gradient), numbers, values=values)

    def spill(self, name: str, gradient: torch.Tensor, *, add: bool = False) -> None:
        """See `Engine.spill`."""
        self._engine.spill(name, self._lend(name, gradient), add=add)

    def apply(
        self,
        name: str,
        function: Callable[[Chunk], object],
        *,
        step: int,
        gradient: torch.Tensor | None = None,
        whole: bool = False,
        late: Late = "never",
    ) -> None:
        """See `Engine.apply`."""
        given = None if gradient is None else self._lend(name, gradient)
        self._engine.apply(name, function, step=step, gradient=given, whole=whole, late=late)

    def read_spilled(self, name: str, into: torch.Tensor) -> None:
        """See `Engine.read_spilled`; by way of host memory of its size, as whoever reads a gradient asks for."""
        if into.device.type == "cpu":
            self._engine.read_spilled(name, into)
            return
        host = torch.empty_strided(into.shape, into.stride(), dtype=into.dtype, device="cpu")
        self._engine.read_spilled(name, host)
        into.copy_(host)

    def _lend(self, name: str, gradient: torch.Tensor) -> torch.Tensor | Lent:
        """What the engine is given for a gradient: itself where the engine can read it."""
        if gradient.device != self._device.torch_device:
            # Values that are written back: the engine reaches them.
            return gradient
        self._device.require_no_capture()
        if name in self._held:
            with torch.no_grad(), failures_named(self._device):
                host = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="cpu")
                return host.copy_(gradient.detach())
        with torch.no_grad(), failures_named(self._device):
            data = bytes_of(gradient.detach())
            # What made it is on the stream of whoever hands it over.
            held = _Gradient(data, self._device.mark(self._device.stream()))
        return Lent(gradient, partial(self._window, held), partial(self._order, held))

    def _order(self, gradient: _Gradient) -> None:
        """Let what the engine's thread computes come after what made a gradient."""
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
            window = next(
                (
                    window
                    for window in self._windows
                    if window.gradient is gradient
                    and window.start <= start
                    and start + nbytes <= window.start + window.nbytes
                ),
                None,
            )
            if window is None:
                window = self._windows[0]
                self._fill(window, gradient, start, span)
            window.wait()
            other = self._windows[1] if window is self._windows[0] else self._windows[0]
            after = window.start + window.nbytes
            if after < gradient.data.nbytes:
                if other.gradient is not gradient or other.start != after:
                    self._fill(other, gradient, after, window.nbytes)
            else:
                # The last of it: nothing here holds it any longer.
                for one in self._windows:
                    one.wait()
                    one.gradient = None
            return window.memory.data_ptr(), window.start, window.nbytes

    def _fill(self, window: _Window, gradient: _Gradient, start: int, nbytes: int) -> None:
        window.wait()
        window.gradient, window.start = gradient, start
        window.nbytes = min(nbytes, gradient.data.nbytes - start)
        part = gradient.data[start : start + window.nbytes]
        window.copy = self._device.take(part, window.memory[: window.nbytes], [gradient.after])
