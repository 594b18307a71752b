"""Offloads checkpointed activations; restores them bit-exactly.

`Activations` copies tensors that `torch.utils.checkpoint` saves into chunks of host memory. With `activations="ssd"`
there are few chunks, and their content moves to an unlinked file. With `activations="host"` on a device there may be
more chunks, and only activations that do not fit into the chunks move to the file. A backward uses saved tensors in the
opposite order of the forward: the tensors that were saved last are still in chunks, and the other tensors are read
before the backward needs them.
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

# Smaller tensors, such as masks and positions, are not offloaded.
BYTES_MIN = 16 << 10
# The maximum number of pieces that are read ahead.
_AHEAD = 64
# How many saved tensors may still be on their way from the device when the next tensor is saved. Each of these tensors
# occupies device memory until its copy ends. If fewer tensors were allowed, the device would wait for the host between
# two blocks.
_COMING = 2

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__


class SavedActivation:
    """Replaces a saved tensor in autograd's graph; its deletion frees the chunks and the disk space of the tensor."""

    __slots__ = ("__weakref__", "_owner", "described", "number", "pieces", "storage")

    def __init__(self, owner: Activations, tensor: torch.Tensor, number: int, pieces: list[Piece]) -> None:
        self._owner = owner
        # While this reference exists, no other storage gets the address of this storage.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.described = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self.number = number
        self.pieces = pieces

    def tensor(self) -> torch.Tensor:
        """Returns the tensor, in new memory."""
        return self._owner.restore(self)

    def __del__(self) -> None:
        # Any thread may run this method at any time, even while the thread holds the lock, so the pieces are only
        # queued.
        self._owner.dropped.append(self.pieces)


class Activations:
    """Saves and restores checkpointed activations. Any thread may call it; one lock guards all calls."""

    def __init__(self, folders: Sequence[Path], *, device: Device | None = None, groups: int = 0) -> None:
        """Allocates the first chunks.

        `device` has the activations; None if the host computes. In addition to the first chunks, at most `groups`
        groups of `ACTIVATION_GROUP` chunks are allocated later. Activations that do not fit into the chunks go to
        unlinked files in `folders`.
        """
        ((self._chunk_bytes, count),) = decision.ACTIVATION_CHUNKS.items()
        scratch = Scratch(folders, self._chunk_bytes)
        self._chunks = Chunks(scratch, self._chunk_bytes, count, [decision.ACTIVATION_GROUP] * groups, device=device)
        # The number of bytes "written" to storage, and the number of bytes "read" from storage.
        self.counters = self._chunks.counters
        self._device = device
        self._type = "cpu" if device is None else device.torch_device.type
        self._lock = threading.RLock()
        self._number = 0
        # The `SavedActivation` objects in graphs, by number, in the order in which their tensors were saved.
        self._living: dict[int, weakref.ref[SavedActivation]] = {}
        # The `SavedActivation` objects by the identity of their tensors, so that a tensor that several checkpoints save
        # is copied only once.
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], SavedActivation] = weakref.WeakValueDictionary()
        # The pieces of the tensors that were saved last. The copies of these pieces from the device may be under way.
        self._arriving: deque[list[Piece]] = deque()
        # The pieces of deleted `SavedActivation` objects. `_reap` frees these pieces.
        self.dropped: deque[list[Piece]] = deque()
        self._closed: str | None = None

    # --- calls of the saved-tensor hooks -------------------------------------------

    def save(self, tensor: torch.Tensor, caller: FrameType) -> Any:
        """Returns a `SavedActivation` for a tensor that a checkpoint saves; returns any other tensor unchanged.

        `caller` is the Python frame in which autograd saves the tensor.
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
        # The result of `detach()` shares the tensor's version counter, and has no graph.
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
        """Returns a saved tensor; also begins to read the tensors that were saved before this tensor."""
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
        """Returns a saved tensor in new memory, and the last copy to that memory (None if the host computes)."""
        shape, stride, dtype, device = saved.described
        last = None
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            data = bytes_of(tensor)
            # torch may have reused memory that work on the caller's stream still uses: the copies wait for that work.
            after = self._mark()
            # Pieces that are in chunks are copied first, which frees their chunks for the other pieces.
            order = sorted(range(len(saved.pieces)), key=lambda index: saved.pieces[index].chunk is None)
            pieces = [saved.pieces[index] for index in order]
            try:
                for done, (index, piece) in enumerate(zip(order, pieces, strict=True)):
                    self._chunks.read_ahead(pieces[done : done + _AHEAD], saved.number, copied=pieces[:done])
                    at = index * self._chunk_bytes
                    last = self._chunks.give(piece, data[at : at + piece.nbytes], after)
            except BaseException:
                if last is not None:
                    # The error releases the tensor's memory. Wait for the last copy to this memory, before other code
                    # reuses the memory.
                    last.wait()
                raise
        return tensor, last

    def _mark(self) -> list[Copy]:
        """Returns a list of one event, which marks the end of the caller's queued work; an empty list on the host."""
        return [] if self._device is None else [self._device.mark(self._device.stream())]

    def _before(self, number: int) -> list[SavedActivation]:
        """Returns the tensors that were saved before tensor `number`, the latest first.

        The list ends once its tensors have `_AHEAD` pieces, or before a tensor whose `SavedActivation` was deleted.
        """
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
        """Frees the chunks and the disk space of deleted `SavedActivation` objects."""
        while self.dropped:
            for piece in self.dropped.popleft():
                self._living.pop(piece.number, None)
                self._chunks.drop(piece)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise UsageError(self._closed)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the chunks take."""
        return 0 if self._closed else self._chunks.host_bytes

    def close(self, why: str) -> None:
        """Releases all chunks and files; a later call for a saved tensor raises `UsageError(why)`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = why
            self._arriving.clear()
            self._chunks.close()


def _is_checkpoint(caller: FrameType) -> bool:
    """True if the tensor that autograd saves in frame `caller` is an input of a checkpoint, reentrant or not."""
    frame: FrameType | None = caller
    # Frames are compared by their file, because before Python 3.12 a comprehension has its own frame in the same file.
    # For a reentrant checkpoint, autograd saves in a frame of torch.autograd.Function, which the checkpoint called.
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
