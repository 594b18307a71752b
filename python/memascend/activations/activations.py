"""Offloads checkpointed activations; restores them bit-exactly.

`torch.utils.checkpoint` saves tensors, and `Activations` copies them into chunks of host memory. With
`activations="ssd"` there are few chunks, and their content moves to unlinked files. With `activations="host"` on a
device there may be more chunks, and only activations that do not fit into the chunks move to the files. A backward uses
saved tensors in the opposite order of the forward: the tensors that were saved last are still in chunks, and
`Activations` begins to read other tensors before the backward needs them.
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
# The maximum number of saved tensors that are being copied from the device at the same time. Each of these tensors
# occupies device memory until its copy ends. With a smaller maximum, the device would wait for the host between two
# blocks.
_COMING = 2

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__


class SavedActivation:
    """Replaces a saved tensor in autograd's graph.

    After its deletion, a later `Activations.save` or `restore` drops its pieces, which frees chunks and disk space.
    """

    __slots__ = ("__weakref__", "_owner", "described", "number", "pieces", "storage")

    def __init__(self, owner: Activations, tensor: torch.Tensor, number: int, pieces: list[Piece]) -> None:
        self._owner = owner
        # While this weak reference exists, no other storage gets this storage's `_cdata`, a part of the key in
        # `_known`.
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
    """Saves and restores checkpointed activations. Any thread may call the methods; one lock guards the state."""

    def __init__(self, folders: Sequence[Path], *, device: Device | None = None, groups: int = 0) -> None:
        """Allocates the first chunks.

        `device` has the activations; None if the host computes. In addition to the first chunks, at most `groups`
        groups of `ACTIVATION_GROUP` chunks are allocated later. Once all groups are allocated, or the machine has no
        memory for another group, the oldest activations move to unlinked files in `folders`.
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
        """Returns a `SavedActivation` for a plain tensor of at least `BYTES_MIN` bytes that a checkpoint saves.

        Returns any other tensor, and a tensor on another type of device, unchanged. `caller` is the Python frame in
        which autograd saves the tensor.
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
        """Returns a saved tensor; also begins to read tensors that were saved before this tensor."""
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
        """Returns the `SavedActivation` objects of tensors that were saved before tensor `number`, the latest first.

        The list ends once its objects have at least `_AHEAD` pieces, or before a deleted `SavedActivation`.
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
        """Drops the pieces of deleted `SavedActivation` objects.

        `Chunks` frees the chunk and the disk space of a dropped piece once no copy or transfer uses them.
        """
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
        """Releases all chunks and files. Later calls that save or restore an activation raise `UsageError(why)`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = why
            self._arriving.clear()
            self._chunks.close()


def _is_checkpoint(caller: FrameType) -> bool:
    """True if frame `caller` is code of torch.utils.checkpoint, or of a torch.autograd.Function that it calls."""
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
