"""Offloads checkpointed activations; restores them bit-exactly.

Tensors that `torch.utils.checkpoint` saves are copied into chunks of host memory. With "ssd" there are few chunks, and
their content moves to an unlinked file. With "host", where a device computes, there are as many as the plan allows, and
only the remainder moves to the file. A backward uses saved tensors in the opposite order of the forward: so the last
ones are still in chunks, and the others are read ahead of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.activations.chunks import Chunks, Scratch
from memascend.errors import UsageError
from memascend.plan import decision
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import FrameType

    from memascend.activations.chunks import Piece
    from memascend.device.device import Copy, Device

# Smaller tensors stay where they are: a mask, positions.
BYTES_MIN = 16 << 10
# Pieces that are read ahead at most: more would only look for chunks in vain.
_AHEAD = 64
# Tensors whose copies from a device may be under way when the next is saved. As they live until then, each is memory
# there; with fewer, the device would wait for the host between two blocks.
_COMING = 2

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__


class SavedActivation:
    """Replaces a saved tensor; its destruction frees the chunks and the disk space of the tensor."""

    __slots__ = ("__weakref__", "_owner", "described", "number", "pieces", "storage")

    def __init__(self, owner: Activations, tensor: torch.Tensor, number: int, pieces: list[Piece]) -> None:
        self._owner = owner
        # As long as it is held, no other storage has its address.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.described = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self.number = number
        self.pieces = pieces

    def tensor(self) -> torch.Tensor:
        """The tensor again, in memory of its own."""
        return self._owner.restore(self)

    def __del__(self) -> None:
        # Of any thread, at any time, also while the lock is held: only noted.
        self._owner.dropped.append(self.pieces)


class Activations:
    """Holds what checkpoints save. Any thread may use it; everything runs under one lock."""

    def __init__(self, folders: Sequence[Path], *, device: Device | None = None, groups: int = 0) -> None:
        """Take the first chunks, and begin with nothing in them.

        `device` is where activations lie; None: in host memory. They wait in host memory, and in files in the folders:
        `groups`, of `ACTIVATION_GROUP` chunks each, may be taken beyond the first ones; with none, all goes to files.
        """
        ((self._chunk_bytes, count),) = decision.ACTIVATION_CHUNKS.items()
        scratch = Scratch(folders, self._chunk_bytes)
        self._chunks = Chunks(scratch, self._chunk_bytes, count, [decision.ACTIVATION_GROUP] * groups, device=device)
        # Bytes that went to storage and came back: "written", "read".
        self.counters = self._chunks.counters
        self._device = device
        self._type = "cpu" if device is None else device.torch_device.type
        self._lock = threading.RLock()
        self._number = 0
        # In the order in which they were saved, by number.
        self._living: dict[int, weakref.ref[SavedActivation]] = {}
        # The same tensor, saved by several checkpoints, is saved once.
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], SavedActivation] = weakref.WeakValueDictionary()
        # The last that were saved on a device, as long as copies of them may be under way.
        self._arriving: deque[list[Piece]] = deque()
        # The pieces of tensors that no graph refers to any more.
        self.dropped: deque[list[Piece]] = deque()
        self._closed: str | None = None

    # --- what the saved-tensor hooks ask -------------------------------------------

    def save(self, tensor: torch.Tensor, caller: FrameType) -> Any:
        """The replacement of a tensor that a checkpoint saves; any other tensor as it is.

        `caller` is the Python frame in which autograd saves it.
        """
        if (
            tensor.nbytes < BYTES_MIN
            or tensor.device.type != self._type
            or not _is_checkpoint(caller)
            or not _is_plain(tensor)
        ):
            return tensor
        with self._lock:
            return self._save(tensor)

    def _save(self, tensor: torch.Tensor) -> SavedActivation:
        self._require_open()
        self._reap()
        key = (
            tensor.untyped_storage()._cdata,  # noqa: SLF001
            tensor._version,  # noqa: SLF001
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        known = self._known.get(key)
        if known is not None and not known.storage.expired():
            return known
        if self._device is not None:
            while len(self._arriving) >= _COMING:
                for piece in self._arriving[0]:
                    self._chunks.wait_for(piece)
                self._arriving.popleft()
        number, self._number = self._number, self._number + 1
        pieces: list[Piece] = []
        saved = SavedActivation(self, tensor, number, pieces)
        # With its version counter and without its graph.
        source = tensor.detach()
        data = bytes_of(source)
        after = self._mark()
        for start in range(0, data.numel(), self._chunk_bytes):
            pieces.append(self._chunks.fill(data[start : start + self._chunk_bytes], source, number, after))
            self._chunks.write_ahead()
        if self._device is not None:
            self._arriving.append(pieces)
        self._living[number] = weakref.ref(saved)
        self._known[key] = saved
        return saved

    def restore(self, saved: SavedActivation) -> torch.Tensor:
        """A saved tensor; also begins to read the tensors that were saved before it."""
        with self._lock:
            self._require_open()
            self._reap()
            tensor, copy = self._bring(saved)
            if copy is not None:
                copy.order()
            wanted = [piece for other in self._before(saved.number) for piece in other.pieces]
            self._chunks.read_ahead(wanted[: min(_AHEAD, self._chunks.count)], saved.number, copied=saved.pieces)
            return tensor

    def _bring(self, saved: SavedActivation) -> tuple[torch.Tensor, Copy | None]:
        """A tensor that was saved, in memory of its own; on a device, the copy that is the last one to it."""
        shape, stride, dtype, device = saved.described
        last = None
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            data = bytes_of(tensor)
            # Its memory may have been another tensor's a moment ago, on the caller's stream.
            after = self._mark()
            # Pieces in chunks come first: their chunks are then free for the others.
            order = sorted(range(len(saved.pieces)), key=lambda index: saved.pieces[index].chunk is None)
            pieces = [saved.pieces[index] for index in order]
            try:
                for done, (index, piece) in enumerate(zip(order, pieces, strict=True)):
                    self._chunks.read_ahead(pieces[done : done + _AHEAD], saved.number, copied=pieces[:done])
                    at = index * self._chunk_bytes
                    last = self._chunks.give(piece, data[at : at + piece.nbytes], after)
            except BaseException:
                if last is not None:
                    # Its memory is not reused while something is copied there.
                    last.wait()
                raise
        return tensor, last

    def _mark(self) -> list[Copy]:
        """A mark behind all work that the caller has begun on its stream."""
        return [] if self._device is None else [self._device.mark(self._device.stream())]

    def _before(self, number: int) -> list[SavedActivation]:
        """Tensors that were saved before, the latest first, as far as they would be read ahead."""
        found: list[SavedActivation] = []
        pieces = 0
        for other in range(number - 1, -1, -1):
            weak = self._living.get(other)
            living = None if weak is None else weak()
            if living is None or pieces >= _AHEAD:
                break
            found.append(living)
            pieces += len(living.pieces)
        return found

    # --- the end -------------------------------------------------------------------

    def _reap(self) -> None:
        """Free the chunks and the disk space of tensors that no graph refers to any more."""
        while self.dropped:
            for piece in self.dropped.popleft():
                self._living.pop(piece.number, None)
                self._chunks.drop(piece)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise UsageError(self._closed)

    @property
    def host_bytes(self) -> int:
        """Host memory that is held."""
        return 0 if self._closed else self._chunks.host_bytes

    def close(self, why: str) -> None:
        """Release everything; a later request for a saved tensor raises `UsageError(why)`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = why
            self._arriving.clear()
            self._chunks.close()


def _is_checkpoint(caller: FrameType) -> bool:
    """Whether a tensor that is saved in this frame is an input of a checkpoint, of whichever kind."""
    frame: FrameType | None = caller
    # Before Python 3.12 a comprehension has a frame of its own, which is of the same file.
    if caller.f_code.co_filename == _FUNCTION:
        frame = caller.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )
