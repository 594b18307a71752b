"""Checkpointed activations on storage: what a checkpoint keeps for the backward waits there, in the bits that it had.

What `torch.utils.checkpoint` saves is copied into a few chunks of host memory, and from there to an unlinked file. The
chunks are given to others once they are written, those first whose use is farthest: a backward uses them in the order
opposite to the forward's, so the last ones are still there, and the others are read ahead of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from memascend import memory
from memascend.checksum import Checksum
from memascend.errors import CorruptionError, UsageError
from memascend.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import FrameType

    from memascend.scratch import Place

__all__ = ["CHUNKS", "Activations", "Kept", "open_activations"]

# {bytes: count}. One request of a device each, and as many as keep it busy (docs/measurements.md).
CHUNKS = {1 << 20: 8}
# What is smaller stays where it is: a mask, positions.
BYTES_MIN = 16 << 10
_PAGE_BYTES = 4096

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__


class _Ticket(Protocol):
    """A transfer that was begun."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it; raises what went wrong."""

    def done(self) -> bool:
        """Whether it has ended."""


class _Room(Protocol):
    """Where chunks go; see `scratch.Scratch`."""

    def take(self) -> Place:
        """A place for one chunk."""

    def give_back(self, place: Place) -> None:
        """It is not needed any more; nothing is on its way there."""

    def close(self) -> None:
        """Wait for what is in flight; the room is gone."""


class _Chunk:
    """A chunk of host memory, and what is in it."""

    __slots__ = ("memory", "piece", "reading", "ticket")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.piece: _Piece | None = None
        self.ticket: _Ticket | None = None
        self.reading = False


class _Piece:
    """A chunk's worth of a tensor: where it is on storage and, for as long as it is, in which chunk."""

    __slots__ = ("checksum", "chunk", "dead", "nbytes", "number", "place")

    def __init__(self, place: Place, nbytes: int, number: int) -> None:
        self.place = place
        self.nbytes = nbytes
        # Of its tensor: later ones are used earlier.
        self.number = number
        self.checksum = ""
        self.chunk: _Chunk | None = None
        self.dead = False


class Kept:
    """What stands for a tensor that was kept; when it is gone, so is the room that it takes."""

    __slots__ = ("__weakref__", "_owner", "_storage", "described", "number", "pieces")

    def __init__(self, owner: Activations, tensor: torch.Tensor, number: int, pieces: list[_Piece]) -> None:
        self._owner = owner
        # As long as it is held, no other storage has its address.
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.described = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self.number = number
        self.pieces = pieces

    def tensor(self) -> torch.Tensor:
        """The tensor again, in memory of its own."""
        return self._owner.restored(self)

    @property
    def storage_lives(self) -> bool:
        """Whether the memory that it was copied from is still there."""
        return not self._storage.expired()

    def __del__(self) -> None:
        # Of any thread, at any time, also while the lock is held: only noted.
        self._owner.dropped.append(self.pieces)


class Activations:
    """Keeps what checkpoints save. Any thread may use it; everything runs under one lock."""

    def __init__(self, room: _Room, ring: memory.ChunkRing, chunk_bytes: int, count: int) -> None:
        """Begin with nothing.

        Args:
            room: on storage, in places of `chunk_bytes`.
            ring: chunks of host memory, all of which are taken. Both are closed by `close()`.
            chunk_bytes: the size of a chunk.
            count: how many there are.
        """
        self._room = room
        self._ring = ring
        self._chunk_bytes = chunk_bytes
        self._chunks = [_Chunk(ring.lease(0, "activations").tensor(chunk_bytes, torch.uint8)) for _ in range(count)]
        self._lock = threading.RLock()
        self._number = 0
        # In the order in which they were kept, by number.
        self._living: dict[int, weakref.ref[Kept]] = {}
        # The same tensor, saved by several checkpoints, is kept once.
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], Kept] = weakref.WeakValueDictionary()
        self.dropped: deque[list[_Piece]] = deque()
        self.counters = {"written": 0, "read": 0}
        self._closed: str | None = None

    # --- what the saved-tensor hooks ask -------------------------------------------

    def kept(self, tensor: torch.Tensor, caller: FrameType) -> Any:
        """What stands for a tensor that a checkpoint saves; any other tensor as it is.

        `caller` is the Python frame in which autograd saves it.
        """
        if tensor.nbytes < BYTES_MIN or not _is_checkpoint(caller) or not _is_plain(tensor):
            return tensor
        with self._lock:
            return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> Kept:
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
        if known is not None and known.storage_lives:
            return known
        number = self._number
        self._number += 1
        pieces: list[_Piece] = []
        kept = Kept(self, tensor, number, pieces)
        data = _bytes_of(tensor)
        for start in range(0, data.numel(), self._chunk_bytes):
            part = data[start : start + self._chunk_bytes]
            chunk = self._chunk_for_write()
            piece = _Piece(self._room.take(), part.numel(), number)
            pieces.append(piece)
            memory = chunk.memory[: piece.nbytes]
            memory.copy_(part)
            piece.checksum = _checksum(memory)
            chunk.piece, piece.chunk = piece, chunk
            chunk.reading = False
            chunk.ticket = piece.place.write(chunk.memory[: _whole_pages(piece.nbytes)])
            self.counters["written"] += piece.nbytes
        self._living[number] = weakref.ref(kept)
        self._known[key] = kept
        return kept

    def restored(self, kept: Kept) -> torch.Tensor:
        """A tensor that was kept, and begin to read those that were kept before it."""
        with self._lock:
            self._require_open()
            self._reap()
            shape, stride, dtype, device = kept.described
            with torch.inference_mode(mode=False), torch.no_grad():
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                data = _bytes_of(tensor)
                # Those that are in chunks come first: their chunks are then there for the others.
                order = sorted(range(len(kept.pieces)), key=lambda index: kept.pieces[index].chunk is None)
                pieces = [kept.pieces[index] for index in order]
                for done, (index, piece) in enumerate(zip(order, pieces, strict=True)):
                    self._read_ahead(pieces[done:], kept.number, copied=pieces[:done])
                    chunk = self._brought(piece)
                    at = index * self._chunk_bytes
                    data[at : at + piece.nbytes].copy_(chunk.memory[: piece.nbytes])
            self._read_ahead(self._before(kept.number), kept.number, copied=kept.pieces)
            return tensor

    # --- chunks --------------------------------------------------------------------

    def _chunk_for_write(self) -> _Chunk:
        """A chunk that is free, or that of what is used farthest from now."""
        best = self._free()
        if best is None:
            ended = [chunk for chunk in self._chunks if chunk.ticket is None or chunk.ticket.done()]
            best = min(ended or self._chunks, key=_number_of)
            self._let_go(best)
        return best

    def _free(self) -> _Chunk | None:
        return next((chunk for chunk in self._chunks if chunk.piece is None), None)

    def _let_go(self, chunk: _Chunk) -> None:
        """Wait for what is on its way, then have nothing in the chunk."""
        self._settle(chunk)
        piece, chunk.piece = chunk.piece, None
        if piece is not None:
            piece.chunk = None
            if piece.dead:
                self._room.give_back(piece.place)

    def _settle(self, chunk: _Chunk) -> None:
        """Wait for a chunk's transfer, and check what it read."""
        if chunk.ticket is None:
            return
        try:
            chunk.ticket.wait()
        except BaseException:
            # An interrupt ends the wait alone; anything else, the transfer.
            if chunk.ticket.done():
                self._failed(chunk)
            raise
        chunk.ticket = None
        piece = chunk.piece
        if chunk.reading and piece is not None and not piece.dead:
            found = _checksum(chunk.memory[: piece.nbytes])
            if found != piece.checksum:
                self._failed(chunk)
                raise CorruptionError(
                    f"a checkpointed activation is not what was written: {piece.nbytes} bytes at {piece.place.offset} "
                    f"of {piece.place.path} have the checksum {found}, not {piece.checksum}; no step was committed "
                    "from it",
                    path=piece.place.path,
                    offset=piece.place.offset,
                    nbytes=piece.nbytes,
                )

    @staticmethod
    def _failed(chunk: _Chunk) -> None:
        """What a transfer that failed leaves is nothing."""
        piece, chunk.piece, chunk.ticket = chunk.piece, None, None
        if piece is not None:
            piece.chunk = None

    def _brought(self, piece: _Piece) -> _Chunk:
        """The chunk with a piece in it, waited for."""
        if piece.chunk is None:
            self._read(piece, self._chunk_for_write())
        chunk = piece.chunk
        assert chunk is not None
        if chunk.reading:
            self._settle(chunk)
        return chunk

    def _read(self, piece: _Piece, chunk: _Chunk) -> None:
        chunk.piece, piece.chunk = piece, chunk
        chunk.reading = True
        chunk.ticket = piece.place.read(chunk.memory[: _whole_pages(piece.nbytes)])
        self.counters["read"] += piece.nbytes

    def _read_ahead(self, pieces: Sequence[_Piece], number: int, *, copied: Sequence[_Piece]) -> None:
        """Begin to read pieces, as far as there are chunks of what a backward at `number` has used already."""
        for piece in pieces:
            if piece.chunk is not None:
                continue
            chunk = self._free() or next(
                (
                    chunk
                    for chunk in self._chunks
                    if chunk.piece is not None
                    and (chunk.piece.number > number or chunk.piece in copied)
                    and (chunk.ticket is None or chunk.ticket.done())
                ),
                None,
            )
            if chunk is None:
                return
            self._let_go(chunk)
            self._read(piece, chunk)

    def _before(self, number: int) -> list[_Piece]:
        """The pieces of what was kept before, the latest first, as many as there are chunks."""
        found: list[_Piece] = []
        for other in range(number - 1, -1, -1):
            if len(found) >= len(self._chunks):
                break
            kept = self._living.get(other)
            living = None if kept is None else kept()
            if living is None:
                break
            found += living.pieces
        return found[: len(self._chunks)]

    # --- the end -------------------------------------------------------------------

    def _reap(self) -> None:
        """Take back the room of what nobody can ask for any more."""
        while self.dropped:
            for piece in self.dropped.popleft():
                self._living.pop(piece.number, None)
                piece.dead = True
                if piece.chunk is None:
                    self._room.give_back(piece.place)
                elif piece.chunk.ticket is None or piece.chunk.ticket.done():
                    self._let_go(piece.chunk)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise UsageError(self._closed)

    @property
    def host_bytes(self) -> int:
        """Host memory that is held."""
        return 0 if self._closed else int(self._ring.region.mapped_bytes + self._ring.stats()["tables"])

    def close(self, why: str) -> None:
        """Let everything go; what was kept cannot be had again, and asking for it is `UsageError(why)`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = why
            # Their tickets hold the memory until the devices are done.
            self._chunks.clear()
            try:
                self._room.close()
            finally:
                self._ring.close()


def open_activations(folders: Sequence[Path]) -> Activations:
    """Activations that are kept in files in some folders, through `CHUNKS` of host memory."""
    ((chunk_bytes, count),) = CHUNKS.items()
    room = Scratch(folders, chunk_bytes, what="checkpointed activations")
    return Activations(room, memory.ChunkRing(chunk_bytes, count, pin=False), chunk_bytes, count)


def _number_of(chunk: _Chunk) -> tuple[bool, int]:
    piece = chunk.piece
    return (False, -1) if piece is None else (not piece.dead, piece.number)


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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, in the order in which they lie."""
    with torch.no_grad():
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _checksum(memory: torch.Tensor) -> str:
    checksum = Checksum()
    checksum.update(memory)
    return str(checksum)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
