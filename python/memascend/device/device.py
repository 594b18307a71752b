"""Copies to and from an accelerator, ordered by streams and events without waiting for the whole device.

Nothing here waits for a whole device. Work on a device runs in streams: what computes has one (torch's current one),
and copies in either direction have their own. A `Copy` is how one is ordered after the other.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend import dlpack
from memascend.errors import ConfigError, DeviceError, MemascendError, UsageError
from memascend.memory import ignore_captures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CAPTURED = (
    "an offloaded model cannot be captured into a CUDA graph: its weights are at other addresses each time, and a "
    "replay would compute with what lies there then; capture what does not touch its parameters, or run it without"
)


class Copy(Protocol):
    """Work on a device that was begun; when it is over, what it read may be written and what it wrote be read."""

    def done(self) -> bool:
        """Whether it is over. Never waits."""

    def wait(self) -> None:
        """Wait for it, on the host. Raises what went wrong."""

    def order(self) -> None:
        """Let what the caller computes from now on, on its current stream, come after it. The host does not wait."""


class Device(Protocol):
    """What the staging path needs of a device."""

    torch_device: torch.device

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory there, as uint8, which begins on a page; what torch raises where there is none."""

    def free(self) -> int:
        """Bytes of it that could be had now."""

    def lent(self, memory: torch.Tensor, start: int, nbytes: int, owner: Any) -> torch.Tensor:
        """A tensor with a storage of its own on a part of `memory`; the last view of it lets go of `owner`."""

    def keep_for(self, memory: torch.Tensor, stream: Any) -> None:
        """A stream uses `memory`: once it is let go, it is nobody else's before what the stream does then is over."""

    def enter_thread(self) -> None:
        """Called by a thread of ours before anything else here; again is fine."""

    def require_no_capture(self) -> None:
        """Refuse to go on where the caller's stream is being captured into a CUDA graph.

        Raises:
            UsageError: it is.
        """

    def stream(self) -> Any:
        """The stream that the caller computes on."""

    def mark(self, stream: Any) -> Copy:
        """All that was begun on a stream until now."""

    def bring(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Begin to copy from pinned host memory to the device, after other work."""

    def take(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Begin to copy from the device to pinned host memory, after other work."""

    def returned(self, memory: torch.Tensor) -> None:
        """A part of it is nobody's any more."""

    def allocated(self) -> tuple[int, int]:
        """Bytes of its memory that torch holds, ours among them: now, and the most so far."""


def open_device(device: torch.device) -> Device | None:
    """The device to compute on; None for the host, which needs no copies.

    Raises:
        ConfigError: there is no such device.
    """
    if device.type == "cpu":
        return None
    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is no CUDA device for device={str(device)!r}: `memascend doctor` and torch.cuda.is_available() say "
            "more; pass device='cpu' to compute on the CPU"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ConfigError(f"there is no device {str(device)!r}: torch sees {count}, from cuda:0 to cuda:{count - 1}")
    return Cuda(torch.device("cuda", index))


@contextmanager
def failures_named(device: Device) -> Iterator[None]:
    """Let what a device fails with be a `DeviceError`, which says what stands; but for memory that it has not."""
    try:
        yield
    except (MemascendError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise DeviceError(
            f"{device.torch_device} failed: {error}; what the last step() committed stands: open the storage in a new "
            'process with existing="resume"'
        ) from error


class _Event:
    """A `Copy` on CUDA. Who waits for it sleeps: a wait that spins takes a processor from whoever computes."""

    __slots__ = ("_device", "event")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class Cuda:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Make its two streams for copies, and with them the context, which pinning asks for."""
        self.torch_device = device
        # One for each direction: a device copies both ways at once.
        self._inward = torch.cuda.Stream(device)
        self._outward = torch.cuda.Stream(device)
        self._thread = threading.local()

    def memory(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        self.keep_for(memory, self._inward)
        return memory

    def free(self) -> int:
        """See `Device`."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def lent(self, memory: torch.Tensor, start: int, nbytes: int, owner: Any) -> torch.Tensor:
        """See `Device`."""
        return dlpack.lent(memory.data_ptr() + start, nbytes, self.torch_device, owner)

    def keep_for(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See `Device`. What torch's allocator hands out anew waits for the stream that it was made on alone."""
        memory.record_stream(stream)

    def enter_thread(self) -> None:
        """See `Device`."""
        if getattr(self._thread, "entered", False):
            return
        # A new thread is on the first device, and what asks for the current one would make a context there.
        torch.cuda.set_device(self.torch_device)
        # What it asks of events would end a capture that goes on anywhere in the process.
        ignore_captures()
        self._thread.entered = True

    def require_no_capture(self) -> None:
        """See `Device`."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(CAPTURED)

    def stream(self) -> torch.cuda.Stream:
        """See `Device`."""
        return torch.cuda.current_stream(self.torch_device)

    def mark(self, stream: torch.cuda.Stream) -> Copy:
        """See `Device`."""
        return _Event(self.torch_device, stream)

    def bring(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """See `Device`."""
        return self._copied(self._inward, source, target, after)

    def take(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """See `Device`."""
        return self._copied(self._outward, source, target, after)

    def returned(self, memory: torch.Tensor) -> None:
        """See `Device`. What is there stays until somebody else writes to it."""

    def allocated(self) -> tuple[int, int]:
        """See `Device`."""
        return torch.cuda.memory_allocated(self.torch_device), torch.cuda.max_memory_allocated(self.torch_device)

    def _copied(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]
    ) -> Copy:
        # The device first: a stream's context ends by going back to the device that was current, which may have no
        # context yet and would get one.
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream), torch.no_grad():
            for copy in after:
                # On this stream, which is the current one here.
                copy.order()
            target.copy_(source, non_blocking=True)
            return _Event(self.torch_device, stream)
