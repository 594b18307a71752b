"""Allocates exact-size slots on a device; frees each after its last view and its last use on a stream."""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.device.device import failures_named
from memascend.errors import ConfigError, MemoryLimitError, TimeoutExpired
from memascend.memory import whole_pages
from memascend.text import size_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.device.device import Copy, Device


@dataclass(eq=False, slots=True)
class _Slot:
    """A place in the arena's memory."""

    memory: torch.Tensor
    start: int
    nbytes: int
    after: list[Copy]  # has to be over before anything is written here
    streams: set[Any] = field(default_factory=set)  # compute with the bytes that are here


@dataclass(eq=False, slots=True)
class _Hold:
    """Owned by the storage of a lease; destroyed with its last view, on any thread."""

    _gone: queue.SimpleQueue[_Slot]
    slot: _Slot

    def __del__(self) -> None:
        # This queue is made for finalizers: putting never waits for a lock that this thread may have.
        self._gone.put(self.slot)


class DeviceArena:
    """Slots of classes, {bytes: count}, in one piece of a device's memory; each that is added has a piece of its own.

    A lease takes a slot of its own class alone.
    """

    def __init__(self, device: Device, classes: Mapping[int, int]) -> None:
        self._device = device
        self._bounds = sorted(classes)
        self._free: dict[int, list[_Slot]] = {bound: [] for bound in self._bounds}
        # Streams whose work ends before the memory is reused, once it is released.
        self._kept_for: set[Any] = set()
        self._pieces: list[torch.Tensor] = []
        self.reserved_bytes = 0
        # The slots beyond the planned ones, {bytes: count}.
        self.added: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}  # by address
        self._lock = threading.Lock()
        # Slots whose last view is gone.
        self._gone: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._take(classes)

    def _take(self, classes: Mapping[int, int]) -> int:
        """Take a piece of memory for so many slots; its bytes."""
        device = self._device
        nbytes = sum(whole_pages(bound) * count for bound, count in classes.items())
        memory = self._allocated(max(nbytes, 1))
        # It may be a block that was released a moment ago, and torch may fill it with NaN. Both are on the caller's
        # stream, for which the streams for copies do not wait.
        with failures_named(device):
            taken_on = device.stream()
            taken = device.mark(taken_on)
            for stream in self._kept_for - {taken_on}:
                device.keep_for(memory, stream)
            for piece in self._pieces if taken_on not in self._kept_for else ():
                device.keep_for(piece, taken_on)
        self._kept_for.add(taken_on)
        self._pieces.append(memory)
        self.reserved_bytes += nbytes
        at = 0
        with self._lock:
            for bound in sorted(classes):
                for _ in range(classes[bound]):
                    slot = self._slots[memory.data_ptr() + at] = _Slot(memory, at, bound, [taken])
                    self._free[bound].append(slot)
                    at += whole_pages(bound)
        return nbytes

    def _allocated(self, nbytes: int) -> torch.Tensor:
        device = self._device
        try:
            with failures_named(device):
                return device.memory(nbytes)
        except torch.OutOfMemoryError as error:
            free = device.free()
            raise MemoryLimitError(
                f"units take {size_option(nbytes)} of {device.torch_device}, which has "
                f"{size_option(free, up=False)} free: pass a smaller "
                "device_memory=, or free other memory there",
                needed=nbytes,
                available=free,
            ) from error

    def add(self, nbytes: int) -> int:
        """Take memory for one more lease of `nbytes`; how many bytes that took."""
        bound = self._bound_for(nbytes)
        taken = self._take({bound: 1})
        self.added[bound] = self.added.get(bound, 0) + 1
        return taken

    @property
    def added_bytes(self) -> int:
        """Bytes beyond the plan."""
        return sum(whole_pages(bound) * count for bound, count in self.added.items())

    def lease(self, nbytes: int, timeout: float) -> torch.Tensor:
        """Take a slot, waiting up to `timeout` seconds: a tensor of so many bytes, whose last view releases it.

        Raises:
            ConfigError: no class is large enough.
            TimeoutExpired: all slots stayed taken.
        """
        bound = self._bound_for(nbytes)
        deadline = time.monotonic() + timeout
        self._take_back()
        while True:
            with self._lock:
                hold = _Hold(self._gone, self._free[bound].pop()) if self._free[bound] else None
            if hold is not None:
                with torch.inference_mode(mode=False), torch.no_grad():
                    return self._device.lent(hold.slot.memory, hold.slot.start, nbytes, hold)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutExpired(
                    f"no slot of {bound} bytes became free for units on {self._device.torch_device}: its tensors are "
                    "still used. Drop them, or pass a larger device_memory="
                )
            self._take_back(wait=left)

    def used(self, tensor: torch.Tensor) -> bool:
        """The caller's current stream is about to compute with a lease's bytes; whether it never did before."""
        slot = self._slots.get(torch.Tensor.untyped_storage(tensor).data_ptr())
        with failures_named(self._device):
            stream = self._device.stream()
        if slot is None or stream in slot.streams:
            return False
        if stream not in self._kept_for:
            with failures_named(self._device):
                for memory in self._pieces:
                    self._device.keep_for(memory, stream)
            self._kept_for.add(stream)
        slot.streams.add(stream)
        return True

    def after(self, tensor: torch.Tensor) -> list[Copy]:
        """The work that has to be over before a lease's bytes are first written; returned once: its caller waits."""
        slot = self._slots[torch.Tensor.untyped_storage(tensor).data_ptr()]
        after = list(slot.after)
        slot.after.clear()
        return after

    def _take_back(self, wait: float = 0.0) -> None:
        """Take back the slots whose last view is gone; `wait` so long for a first one."""
        try:
            slot = self._gone.get(timeout=wait) if wait > 0 else self._gone.get_nowait()
            while True:
                self._came_back(slot)
                slot = self._gone.get_nowait()
        except queue.Empty:
            pass

    def _came_back(self, slot: _Slot) -> None:
        # All work on these bytes was begun on one of these streams, and before this moment.
        with failures_named(self._device):
            slot.after.extend([self._device.mark(stream) for stream in slot.streams])
        slot.streams.clear()
        with self._lock:
            self._free[slot.nbytes].append(slot)

    def free_slots(self, nbytes: int) -> int:
        """Slots that a lease of so many bytes could take now."""
        self._take_back()
        return len(self._free[self._bound_for(nbytes)])

    def _bound_for(self, nbytes: int) -> int:
        """The class that a lease of so many bytes has."""
        at = bisect_left(self._bounds, nbytes)
        if at == len(self._bounds):
            raise ConfigError(
                f"{nbytes} bytes are more than the largest slot of the device's arena, so no lease can have them: "
                "plan a slot of that size"
            )
        return self._bounds[at]
