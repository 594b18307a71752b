"""The device that computes, where it is not the host: copies to and from it, and the order of what runs there.

Nothing here waits for a whole device. Work on a device runs in streams: what computes has one (torch's current one),
and copies in either direction have their own. A `Copy` is how one is ordered after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Copy", "Cuda", "Device", "open_device"]


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
        """Memory there, as uint8, which begins on a page."""

    def lent(self, memory: torch.Tensor, start: int, nbytes: int, owner: Any) -> torch.Tensor:
        """A tensor with a storage of its own on a part of `memory`; the last view of it lets go of `owner`."""

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


def open_device(device: torch.device) -> Device | None:
    """The device to compute on; None for the host, which needs no copies."""
    return None if device.type == "cpu" else Cuda(device)


class _Lent:
    """Device memory as torch takes it in: what is made of this holds it, and it holds the owner."""

    __slots__ = ("__cuda_array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            # The order is ours to keep: importing must not wait for a stream.
            "stream": None,
        }


class _Event:
    """A `Copy` on CUDA."""

    __slots__ = ("_device", "event")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.event = torch.cuda.Event()
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
        """Make its two streams for copies."""
        self.torch_device = device
        # One for each direction: a device copies both ways at once.
        self._inward = torch.cuda.Stream(device)
        self._outward = torch.cuda.Stream(device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def lent(self, memory: torch.Tensor, start: int, nbytes: int, owner: Any) -> torch.Tensor:
        """See `Device`."""
        return torch.as_tensor(_Lent(memory.data_ptr() + start, nbytes, owner), device=self.torch_device)

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

    def _copied(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]
    ) -> Copy:
        with torch.cuda.stream(stream), torch.no_grad():
            for copy in after:
                # On this stream, which is the current one here.
                copy.order()
            target.copy_(source, non_blocking=True)
        return _Event(self.torch_device, stream)
