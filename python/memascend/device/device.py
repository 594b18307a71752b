"""Copies to and from an accelerator by streams and events; refuses CUDA graphs."""

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
    "an offloaded model cannot be captured into a CUDA graph: its weights are at other addresses each time, and a "
    "replay would compute with other values; capture only code that does not touch its parameters, or run it without"
)


def open_device(device: torch.device) -> Device | None:
    """The device to compute on; None for the host, which needs no copies."""
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
        raise ConfigError(
            f"there is no device {str(device)!r}: torch sees {count}, from cuda:0 to cuda:{count - 1}. Pass one of them"
        )
    return Device(torch.device("cuda", index))


@contextmanager
def failures_named(device: Device) -> Iterator[None]:
    """Turn errors of a device into `DeviceError`, which names the committed step; except a lack of its memory."""
    try:
        yield
    except (MemascendError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise DeviceError(
            f"{device.torch_device} failed: {error}; what the last step() committed stands: open the storage in a new "
            'process with existing="resume"'
        ) from error


class Copy:
    """Work on a device that was begun; when it is over, its source may be written and its target be read.

    A wait for it sleeps: one that spins takes a processor from other threads, which compute.
    """

    __slots__ = ("_device", "event")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def done(self) -> bool:
        """Whether it is over. Never waits."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Wait for it, on the host. Raises the error with which it failed."""
        self.event.synchronize()

    def order(self) -> None:
        """Let later work of the caller, on its current stream, come after it. The host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self.event)


class Device:
    """A CUDA device, as far as the staging path needs it."""

    def __init__(self, device: torch.device) -> None:
        """Make its two streams for copies, and with them the context, which pinning asks for."""
        self.torch_device = device
        # One for each direction: a device copies both ways at once.
        self._inward = torch.cuda.Stream(device)
        self._outward = torch.cuda.Stream(device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory there, as uint8, which begins on a page. Raises torch's own error where there is none."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free(self) -> int:
        """Bytes of its memory that are free now."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def lent(self, memory: torch.Tensor, start: int, nbytes: int, owner: Any) -> torch.Tensor:
        """A tensor with a storage of its own on a part of `memory`; its last view releases `owner`."""
        return tensors.lent(memory.data_ptr() + start, nbytes, self.torch_device, owner)

    def keep_for(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """A stream uses `memory`: once it is released, it is reused only after the work of that stream until then.

        torch's allocator by itself waits for the stream alone on which the memory was allocated.
        """
        memory.record_stream(stream)

    def enter_thread(self) -> None:
        """Called by a thread of ours before anything else here; again is fine."""
        # A new thread is on the first device, and a query of the current device would make a context there.
        torch.cuda.set_device(self.torch_device)
        # Its queries of events would end a capture that runs anywhere in the process.
        ignore_captures()

    def require_no_capture(self) -> None:
        """Reject a call while the caller's stream is captured into a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(CAPTURED)

    def stream(self) -> torch.cuda.Stream:
        """The stream that the caller computes on."""
        return torch.cuda.current_stream(self.torch_device)

    def mark(self, stream: torch.cuda.Stream) -> Copy:
        """All work that was begun on a stream until now."""
        return Copy(self.torch_device, stream)

    def bring(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Begin to copy from pinned host memory to the device, after other work."""
        return self._copied(self._inward, source, target, after)

    def take(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Begin to copy from the device to pinned host memory, after other work."""
        return self._copied(self._outward, source, target, after)

    def allocated(self) -> tuple[int, int]:
        """Bytes of its memory that torch holds, ours among them: now, and the most so far."""
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
            return Copy(self.torch_device, stream)


# Dynamo's function that runs compiled code; its context is called `self` there.
_DYNAMO = "torch/_dynamo/eval_frame.py"


def refuse_graphs() -> None:
    """Reject a forward that runs in code which torch.compile makes CUDA graphs of."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename.endswith(_DYNAMO) and _captures(frame.f_locals.get("self")):
            raise UsageError(
                "CUDA graphs do not work with an offloaded model, whose weights are at other addresses each time: "
                'compile with mode="default" or "max-autotune-no-cudagraphs" (not "reduce-overhead" or '
                '"max-autotune"), or with options={"triton.cudagraphs": False}'
            )
        frame = frame.f_back


def _captures(context: Any) -> bool:
    """Whether a context of Dynamo's makes graphs: by the option that its modes set, or by its backend."""
    config = getattr(context, "compiler_config", None)
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend  # noqa: SLF001
    return (isinstance(config, dict) and bool(config.get("triton.cudagraphs"))) or (
        getattr(backend, "compiler_name", None) == "cudagraphs"
    )
