"""Copies to and from a CUDA device with streams and events; rejects CUDA graphs."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memascend import tensors
from memascend.errors import ConfigError, DeviceError, MemascendError, UsageError
from memascend.memory import ignore_captures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType


CAPTURED = (
    "an offloaded model cannot be captured into a CUDA graph: its weights are at other addresses in each forward, "
    "so a replay would compute with wrong values. Capture only code that does not use the model's parameters, or run "
    "the model without a CUDA graph"
)


def open_device(device: torch.device) -> Device | None:
    """Returns the device to compute on; None for the host, which needs no copies.

    Raises:
        ConfigError: torch finds no such device.
    """
    if device.type == "cpu":
        return None
    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is no CUDA device for device={str(device)!r}: torch.cuda.is_available() is False. Run `memascend "
            "doctor` to find the reason, or pass device='cpu' to compute on the CPU"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ConfigError(
            f"there is no device {str(device)!r}: torch sees {count} in total, from cuda:0 to cuda:{count - 1}. Pass "
            "one of these as device="
        )
    return Device(torch.device("cuda", index))


@contextmanager
def failures_named(device: Device) -> Iterator[None]:
    """Context manager that turns errors into `DeviceError`, except `MemascendError` and torch's `OutOfMemoryError`."""
    try:
        yield
    except (MemascendError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise DeviceError(
            f"{device.torch_device} failed: {error}. Start a new process. If you passed storage=, the store still has "
            'the last committed step(): call offload() with existing="resume". Otherwise, load what save() last wrote'
        ) from error


class Copy:
    """An event on a stream. It marks the end of a copy, or of all work that was queued before the event.

    After the event, the source of a copy may be written, and its target may be read. `wait` puts the thread to sleep. A
    spinning wait would take a processor from threads that compute.
    """

    __slots__ = ("_device", "event")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def done(self) -> bool:
        """True if the work has ended. Never waits."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks the calling thread until the work has ended; raises the error with which the work failed."""
        self.event.synchronize()

    def order(self) -> None:
        """Makes later work on the caller's current stream wait for this work; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self.event)


class Device:
    """A CUDA device with one stream for copies in each direction."""

    def __init__(self, device: torch.device) -> None:
        """Makes the streams. This also makes the CUDA context, without which CUDA cannot pin host memory."""
        self.torch_device = device
        # A device can copy in both directions at once.
        self._inward = torch.cuda.Stream(device)
        self._outward = torch.cuda.Stream(device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Returns an uninitialised uint8 tensor of `nbytes` on the device. May raise OutOfMemoryError."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free(self) -> int:
        """Returns the number of bytes of device memory that are free now."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def lent(self, memory: torch.Tensor, start: int, nbytes: int, owner: Any) -> torch.Tensor:
        """Returns a tensor on `nbytes` of `memory`, from byte `start` on. The tensor has a storage of its own.

        When the last view of the tensor is deleted, its storage releases `owner`.
        """
        return tensors.lent(memory.data_ptr() + start, nbytes, self.torch_device, owner)

    def keep_for(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Makes torch's allocator wait for `stream`, too, before it reuses the released `memory`.

        By default the allocator waits only for the stream on which the memory was allocated.
        """
        memory.record_stream(stream)

    def enter_thread(self) -> None:
        """Prepares a thread of memascend; call it in the thread before other methods. Repeated calls are fine."""
        # In a new thread the first device is current. A query of the current device would create a CUDA context on the
        # first device.
        torch.cuda.set_device(self.torch_device)
        # Without this call, a query of an event in this thread would abort a graph capture of any thread of the
        # process.
        ignore_captures()

    def require_no_capture(self) -> None:
        """Raises UsageError while the caller's stream is captured into a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(CAPTURED)

    def stream(self) -> torch.cuda.Stream:
        """Returns the stream on which the caller computes."""
        return torch.cuda.current_stream(self.torch_device)

    def mark(self, stream: torch.cuda.Stream) -> Copy:
        """Returns an event that marks the end of all work queued on a stream so far."""
        return Copy(self.torch_device, stream)

    def bring(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Queues a copy from pinned host memory to the device. The copy starts once the work `after` has ended."""
        return self._copied(self._inward, source, target, after)

    def take(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Queues a copy from the device to pinned host memory. The copy starts once the work `after` has ended."""
        return self._copied(self._outward, source, target, after)

    def allocated(self) -> tuple[int, int]:
        """Returns how many bytes of device memory torch has allocated now, and the maximum so far.

        Both numbers include the memory of memascend.
        """
        return torch.cuda.memory_allocated(self.torch_device), torch.cuda.max_memory_allocated(self.torch_device)

    def _copied(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]
    ) -> Copy:
        # `torch.cuda.device` is entered first. Without this, the end of `torch.cuda.stream` would switch back to the
        # device that was current before, and would create a CUDA context on that device.
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream), torch.no_grad():
            for copy in after:
                # `stream` is current here, so `order` makes `stream` wait.
                copy.order()
            target.copy_(source, non_blocking=True)
            return Copy(self.torch_device, stream)


# The file of Dynamo's function that runs compiled code; the local `self` of that function is Dynamo's context.
_DYNAMO = "torch/_dynamo/eval_frame.py"


def refuse_graphs() -> None:
    """Rejects a forward that runs inside code that torch.compile turns into CUDA graphs."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename.endswith(_DYNAMO) and _captures(frame.f_locals.get("self")):
            raise UsageError(
                "CUDA graphs do not work with an offloaded model: its weights are at other addresses in each forward; "
                'compile with mode="default" or "max-autotune-no-cudagraphs" (not "reduce-overhead" or '
                '"max-autotune"), or with options={"triton.cudagraphs": False}'
            )
        frame = frame.f_back


def _captures(context: Any) -> bool:
    """True if a context of Dynamo makes CUDA graphs: its options or its backend show this."""
    config = getattr(context, "compiler_config", None)
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend  # noqa: SLF001
    return (isinstance(config, dict) and bool(config.get("triton.cudagraphs"))) or (
        getattr(backend, "compiler_name", None) == "cudagraphs"
    )
