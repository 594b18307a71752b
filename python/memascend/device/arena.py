"""Leases slots of device memory. A slot is reused once its last view is deleted and all work on the slot has ended.

[Note: reuse of slots] When the last view of a lease is deleted, kernels that use the slot may still be queued. So
`used` records each stream that computes with a lease. When the slot returns, `_came_back` marks the end of the queued
work on these streams, and the next copy into the slot waits for these marks (`after`). The host does not wait for
these kernels.
"""

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
    """A slot: a range of bytes in the arena's memory."""

    memory: torch.Tensor
    start: int
    nbytes: int
    after: list[Copy]  # the work that must end before the slot is written
    streams: set[Any] = field(default_factory=set)  # the streams that compute with the present lease


@dataclass(eq=False, slots=True)
class _Hold:
    """Puts the slot of a lease into `_released` when the last view of the lease is deleted, in any thread.

    The storage of the lease owns this object, and deletes it with the last view.
    """

    _released: queue.SimpleQueue[_Slot]
    slot: _Slot

    def __del__(self) -> None:
        # SimpleQueue.put() is safe in finalizers: it never waits for a lock that this thread may have.
        self._released.put(self.slot)


class DeviceArena:
    """Slots of device memory; `classes` has the number of slots of each size, {bytes: count}.

    One allocation contains these slots. Each slot that `add` adds has its own allocation. A lease takes a slot of the
    smallest size that is large enough. If all slots of this size are leased, the lease waits, and takes no larger slot.
    """

    def __init__(self, device: Device, classes: Mapping[int, int]) -> None:
        self._device = device
        self._bounds = sorted(classes)
        self._free: dict[int, list[_Slot]] = {bound: [] for bound in self._bounds}
        # When the memory is released, torch's allocator waits for the work on these streams before it reuses the
        # memory.
        self._kept_for: set[Any] = set()
        self._pieces: list[torch.Tensor] = []  # the allocations of device memory that contain the slots
        self.reserved_bytes = 0
        # The slots that `add` has added to the planned slots, {bytes: count}.
        self.added: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}  # all slots, by address
        self._lock = threading.Lock()
        # Slots whose last view was deleted. `_take_back` makes these slots free.
        self._released: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._take(classes)

    def _take(self, classes: Mapping[int, int]) -> int:
        """Allocates memory for the slots of `classes`; returns the number of allocated bytes."""
        device = self._device
        nbytes = sum(whole_pages(bound) * count for bound, count in classes.items())
        memory = self._allocated(max(nbytes, 1))
        # Work on this memory may be queued on the caller's stream: torch may have reused a block that was released a
        # moment ago, or may fill it with NaN. The mark makes the streams for copies wait for that work.
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
                f"torch could not allocate {size_option(nbytes)} for units on {device.torch_device}, which has "
                f"{size_option(free, up=False)} of free memory: pass a smaller "
                "device_memory=, or release other memory on the device",
                needed=nbytes,
                available=free,
            ) from error

    def add(self, nbytes: int) -> int:
        """Adds a slot for a lease of `nbytes`; returns the number of bytes that the slot takes."""
        bound = self._bound_for(nbytes)
        taken = self._take({bound: 1})
        self.added[bound] = self.added.get(bound, 0) + 1
        return taken

    @property
    def added_bytes(self) -> int:
        """The number of bytes in the slots that `add` has added."""
        return sum(whole_pages(bound) * count for bound, count in self.added.items())

    def lease(self, nbytes: int, timeout: float) -> torch.Tensor:
        """Leases a slot, and waits up to `timeout` seconds for it; returns a tensor of `nbytes`.

        The slot is released when the last view of the tensor is deleted.

        Raises:
            ConfigError: no slot is large enough.
            TimeoutExpired: no slot became free in time.
        """
        bound = self._bound_for(nbytes)
        deadline = time.monotonic() + timeout
        self._take_back()
        while True:
            with self._lock:
                hold = _Hold(self._released, self._free[bound].pop()) if self._free[bound] else None
            if hold is not None:
                with torch.inference_mode(mode=False), torch.no_grad():
                    return self._device.lent(hold.slot.memory, hold.slot.start, nbytes, hold)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutExpired(
                    f"no slot of {bound} bytes for units on {self._device.torch_device} became free, because "
                    "tensors in all of these slots still exist: delete tensors that your code keeps, or pass a larger "
                    "device_memory="
                )
            self._take_back(wait=left)

    def used(self, tensor: torch.Tensor) -> bool:
        """Records that the caller's current stream computes with a lease.

        Returns True only at the stream's first call for this lease; returns False if `tensor` is not a lease of this
        arena. See [Note: reuse of slots].
        """
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
        """Returns the work that must end before a lease is first written; a second call returns an empty list.

        See [Note: reuse of slots].
        """
        slot = self._slots[torch.Tensor.untyped_storage(tensor).data_ptr()]
        after = list(slot.after)
        slot.after.clear()
        return after

    def _take_back(self, wait: float = 0.0) -> None:
        """Frees the slots whose last view was deleted; if there are none, waits up to `wait` seconds for one slot."""
        try:
            slot = self._released.get(timeout=wait) if wait > 0 else self._released.get_nowait()
            while True:
                self._came_back(slot)
                slot = self._released.get_nowait()
        except queue.Empty:
            pass

    def _came_back(self, slot: _Slot) -> None:
        # All work on the slot was queued on these streams before this point; see [Note: reuse of slots].
        with failures_named(self._device):
            slot.after.extend([self._device.mark(stream) for stream in slot.streams])
        slot.streams.clear()
        with self._lock:
            self._free[slot.nbytes].append(slot)

    def free_slots(self, nbytes: int) -> int:
        """Returns the number of free slots that a lease of `nbytes` could take now."""
        self._take_back()
        return len(self._free[self._bound_for(nbytes)])

    def _bound_for(self, nbytes: int) -> int:
        """Returns the size of the slots that a lease of `nbytes` uses."""
        at = bisect_left(self._bounds, nbytes)
        if at == len(self._bounds):
            raise ConfigError(
                f"a lease of {nbytes} bytes is larger than the largest slot of the device's arena: plan a slot of at "
                "least this size"
            )
        return self._bounds[at]
