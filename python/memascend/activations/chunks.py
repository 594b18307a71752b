"""Moves chunks of activations between device, host memory and unlinked scratch files.

[Note: states of a chunk] An `ActivationChunk` is free (empty), held, or loose. The piece of a held chunk is not on
storage, and a graph needs it, so the chunk must not be emptied. The piece of a loose chunk is on storage, is being
written to storage, is being read from storage, or is dead because no graph needs it. So a loose chunk can be emptied
without loss once its copy has ended and its transfer has succeeded.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from memascend import memory, nvme
from memascend.errors import CorruptionError, MemoryLimitError, StorageError, UsageError
from memascend.memory import whole_pages
from memascend.storage import checksum_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from memascend.device.device import Copy, Device


# The number of bytes of the first volume, before `Scratch` rounds up to whole places in each folder. Each later volume
# is as large as all earlier volumes together, so there are few files.
_FIRST_BYTES = 64 << 20


class ScratchPlace(NamedTuple):
    """A range of `place_bytes` bytes of a scratch volume, from `offset` on."""

    volume: nvme.Volume
    offset: int


class Scratch:
    """Allocates places in volumes, which consist of unlinked files.

    A volume is striped over one file in each folder. `take` creates a volume when no place is free.
    """

    def __init__(self, folders: Sequence[Path], place_bytes: int) -> None:
        """Creates no file yet. `place_bytes` is the size of a place, a multiple of 4,096."""
        self._folders = list(folders)
        self._place_bytes = place_bytes
        self._volumes: list[nvme.Volume] = []
        self._free: list[ScratchPlace] = []

    @property
    def file_bytes(self) -> int:
        """Bytes of disk space that the files take."""
        return sum(volume.size for volume in self._volumes)

    def take(self) -> ScratchPlace:
        """Takes a free place; creates another volume if no place is free.

        Raises:
            StorageError: the volume could not be created, for example because a file system is full.
        """
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, place: ScratchPlace) -> None:
        """Frees a place; its transfers must have ended."""
        self._free.append(place)

    def _grow(self) -> None:
        granule = self._place_bytes * len(self._folders)
        size = -(-max(_FIRST_BYTES, self.file_bytes) // granule) * granule
        files = [folder / f".memascend-{uuid.uuid4().hex}" for folder in self._folders]
        try:
            volume = nvme.open(files, size=size, stripe=self._place_bytes if len(files) > 1 else None)
        except StorageError as error:
            raise StorageError(
                f"could not reserve {size} bytes of disk space for checkpointed activations, in addition to "
                f"{self.file_bytes} bytes reserved before: {error}; give offload(scratch=) a writable folder with "
                "enough free space",
                errno=error.errno,
                path=error.path,
            ) from error
        finally:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()
        self._volumes.append(volume)
        # Places are appended in reverse order, so that `take` begins with the first place of the volume.
        self._free += [
            ScratchPlace(volume, offset) for offset in range(size - self._place_bytes, -1, -self._place_bytes)
        ]

    def close(self) -> None:
        """Waits for transfers, and closes the files, which deletes them. Repeated calls are fine.

        Raises:
            StorageError: a write failed, and its ticket has not raised the error.
        """
        volumes, self._volumes = self._volumes, []
        self._free.clear()
        for volume in volumes:
            volume.close()


_log = logging.getLogger("memascend")


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a tensor, no larger than a chunk.

    The part is in a chunk, on storage, or both; after some errors it is in neither. Only the methods of `Piece` change
    the fields.
    """

    nbytes: int
    number: int  # the number of the tensor; a backward uses tensors with higher numbers first
    chunk: ActivationChunk | None = None
    place: ScratchPlace | None = None
    checksum: str = ""
    dead: bool = False  # True if no graph needs the piece any more

    def put(self, place: ScratchPlace, checksum: str) -> None:
        """Records the place on storage to which the piece is being written, and the checksum of the piece."""
        assert self.place is None, "a piece is written once"
        self.place, self.checksum = place, checksum

    def enter(self, chunk: ActivationChunk) -> None:
        """Records the chunk that has the piece, or into which the piece is being read."""
        assert self.chunk is None, "a piece is in one chunk"
        self.chunk = chunk

    def leave(self) -> None:
        """Records that the piece has left its chunk."""
        self.chunk = None

    def die(self) -> None:
        """Records that no graph needs the piece."""
        self.dead = True


@dataclass(eq=False, slots=True)
class ActivationChunk:
    """A chunk of host memory, and the piece in it; see [Note: states of a chunk]."""

    memory: torch.Tensor
    piece: Piece | None = None
    ticket: nvme.Ticket | None = None  # the transfer from or to storage
    reading: bool = False  # True if the piece was read from storage, or is being read
    copy: Copy | None = None  # the last copy from or to a device
    source: tuple[torch.Tensor, int] | None = None  # the tensor that is being copied from a device, and its version

    def fill(self, piece: Piece, copy: Copy | None, source: torch.Tensor) -> None:
        """Records a piece. With a `copy` from a device, keeps the tensor `source` and its version until `end_copy`."""
        piece.enter(self)
        self.piece, self.reading = piece, False
        if copy is not None:
            self.copy, self.source = copy, (source, source._version)  # noqa: SLF001

    def write(self, place: ScratchPlace) -> None:
        """Begins to write the piece to storage."""
        piece = self.piece
        assert piece is not None, "an empty chunk is not written"
        checksum = checksum_of(self.memory[: piece.nbytes])
        self.ticket = place.volume.write(self.memory[: whole_pages(piece.nbytes)], place.offset)
        piece.put(place, checksum)

    def read(self, piece: Piece) -> None:
        """Begins to read a piece from storage."""
        place = piece.place
        assert place is not None, "only a written piece can be read"
        self.ticket = place.volume.read(self.memory[: whole_pages(piece.nbytes)], place.offset)
        piece.enter(self)
        self.piece, self.reading = piece, True

    def give(self, device: Device, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Begins to copy the piece to a device, after the work `after` and after the chunk's last copy."""
        assert self.piece is not None, "an empty chunk is not copied"
        before = () if self.copy is None else (self.copy,)
        self.copy = device.bring(self.memory[: self.piece.nbytes], target, [*after, *before])
        return self.copy

    def end_copy(self) -> tuple[torch.Tensor, int] | None:
        """Waits for the last copy, which ends after all earlier copies of the chunk.

        If the piece was copied from a device since the previous call, returns the source tensor of that copy, and the
        version of this tensor at the start of the copy. Otherwise returns None.
        """
        if self.copy is None:
            return None
        self.copy.wait()
        source, self.copy, self.source = self.source, None, None
        return source

    def end_transfer(self) -> None:
        """Records that the transfer from or to storage has ended."""
        self.ticket = None

    def clear(self) -> Piece | None:
        """Empties the chunk; returns the piece that was in it, or None if the chunk was empty."""
        piece, self.piece, self.ticket = self.piece, None, None
        if piece is not None:
            piece.leave()
        return piece

    @property
    def idle(self) -> bool:
        """True if no copy and no transfer of the chunk is under way."""
        return (self.copy is None or self.copy.done()) and (self.ticket is None or self.ticket.done())


_CHANGED = (
    "a checkpointed activation was changed in place after its copy from the device began. Autograd rejects such a "
    "change, too: compute the new value in a new tensor"
)


class Chunks:
    """All chunks, and the copies and transfers from and to them; see [Note: states of a chunk]."""

    def __init__(
        self, room: Scratch, chunk_bytes: int, count: int, more: Sequence[int] = (), *, device: Device | None
    ) -> None:
        """Allocates the first `count` chunks.

        `more` has the number of chunks of each additional group. `_for_write` allocates such a group when no chunk is
        free. `write_ahead` aims at `count` chunks that are free, loose or not yet allocated. `device` has the
        activations; None if the activations are in host memory. `close()` also closes `room`.
        """
        self._room = room
        self._chunk_bytes = chunk_bytes
        self._spare = count
        self._more = list(more)
        self._device = device
        self._rings: list[memory.ChunkRing] = []
        self._free: list[ActivationChunk] = []
        self._take(count)
        # The held chunks, in the order of saving: the backward uses the first chunk last.
        self._held: dict[ActivationChunk, None] = {}
        self._loose: dict[ActivationChunk, None] = {}
        self.counters = {"written": 0, "read": 0}

    def _take(self, count: int) -> None:
        """Allocates `count` more chunks."""
        ring = memory.ChunkRing(self._chunk_bytes, count, pin=False if self._device is None else "auto")
        self._rings.append(ring)
        taken = [ring.lease(0, "activations").tensor(self._chunk_bytes, torch.uint8) for _ in range(count)]
        # Chunks are appended in reverse order, because `_for_write` pops the last chunk.
        self._free += [ActivationChunk(one) for one in reversed(taken)]

    # --- into chunks -----------------------------------------------------------------

    def fill(self, part: torch.Tensor, source: torch.Tensor, number: int, after: Sequence[Copy]) -> Piece:
        """Copies `part`, a part of the tensor `source`, into a chunk; returns the new piece.

        If `part` is on a device, the method queues the copy, which starts once the work `after` has ended.
        """
        chunk = self._for_write()
        piece = Piece(part.numel(), number)
        memory = chunk.memory[: piece.nbytes]
        try:
            copy = None if self._device is None else self._device.take(part, memory, after)
            if copy is None:
                memory.copy_(part)
        except BaseException:
            self._free.append(chunk)
            raise
        chunk.fill(piece, copy, source)
        self._held[chunk] = None
        return piece

    def wait_for(self, piece: Piece) -> None:
        """Waits until a piece has been copied from the device, and releases the tensor on the device."""
        if piece.chunk is not None and piece.chunk.source is not None:
            self._copied(piece.chunk)

    def write_ahead(self, least: int = 0) -> None:
        """Begins to write held pieces, in the order of saving.

        If `least` is 0, stops once enough chunks are free, loose or not yet allocated, or at the first piece whose copy
        has not ended. Otherwise waits for copies, and writes at least `least` pieces if so many are held.
        """
        wanted = self._spare - len(self._free) - len(self._loose) - sum(self._more)
        for chunk in list(itertools.islice(self._held, max(wanted, least))):
            if least == 0 and chunk.copy is not None and not chunk.copy.done():
                # Copies from the device end in the order of saving: the copies to later chunks have not ended, either.
                return
            self._write(chunk)

    def _write(self, chunk: ActivationChunk) -> None:
        """Waits for a held chunk's copy, begins to write its piece, and makes the chunk loose."""
        self._copied(chunk)
        piece = chunk.piece
        assert piece is not None
        place = self._room.take()
        try:
            chunk.write(place)
        except BaseException:
            self._room.give_back(place)
            raise
        del self._held[chunk]
        self._loose[chunk] = None
        self.counters["written"] += piece.nbytes

    def _for_write(self) -> ActivationChunk:
        """Returns an empty chunk: a free chunk, a new chunk, or a loose chunk, which the method empties.

        Of the loose chunks, prefers idle chunks, then dead pieces, then the piece that the backward needs last.
        """
        if not self._free and self._more:
            try:
                self._take(self._more.pop())
            except MemoryLimitError as error:
                self._more.clear()
                _log.warning("checkpointed activations that do not fit in host memory go to storage: %s", error)
        if self._free:
            return self._free.pop()
        self.write_ahead()
        if not self._loose:
            self.write_ahead(least=1)
        best = min([chunk for chunk in self._loose if chunk.idle] or self._loose, key=_number_of)
        self._empty(best)
        return best

    # --- out of chunks ---------------------------------------------------------------

    def give(self, piece: Piece, target: torch.Tensor, after: Sequence[Copy]) -> Copy | None:
        """Copies a piece to `target`, a part of a tensor that is being restored.

        If `target` is on a device, the method queues the copy, which starts once the work `after` has ended, and
        returns this copy. If `target` is in host memory, the method copies at once, and returns None.
        """
        if piece.chunk is None:
            if piece.place is None:
                raise UsageError(_CHANGED)
            self._read(piece, self._for_write())
        chunk = piece.chunk
        assert chunk is not None
        if chunk.reading:
            self._transferred(chunk)
        if chunk.source is not None and chunk.copy is not None and chunk.copy.done():
            self._copied(chunk)
        if self._device is None:
            target.copy_(chunk.memory[: piece.nbytes])
            return None
        # The piece may still be on its way from the device: `ActivationChunk.give` makes the new copy wait for that
        # copy.
        return chunk.give(self._device, target, after)

    def read_ahead(self, pieces: Sequence[Piece], number: int, *, copied: Sequence[Piece]) -> None:
        """Begins to read pieces into free chunks, and into idle loose chunks whose pieces are dead or used already.

        `number` is the number of the tensor that the backward needs now. Pieces with higher numbers, and pieces in
        `copied`, count as used. The method returns at the first piece for which no chunk is left.
        """
        for piece in pieces:
            # A piece that is in no chunk and on no storage was lost; `give` raises the error.
            if piece.chunk is not None or piece.place is None:
                continue
            if self._free:
                chunk = self._free.pop()
            else:
                used = (
                    chunk
                    for chunk in self._loose
                    if chunk.piece is not None
                    and (chunk.piece.dead or chunk.piece.number > number or chunk.piece in copied)
                    and chunk.idle
                )
                found = next(used, None)
                if found is None:
                    return
                chunk = found
                self._empty(chunk)
            self._read(piece, chunk)

    def _read(self, piece: Piece, chunk: ActivationChunk) -> None:
        try:
            chunk.read(piece)
        except BaseException:
            self._free.append(chunk)
            raise
        self._loose[chunk] = None
        self.counters["read"] += piece.nbytes

    # --- transfers ---------------------------------------------------------------------

    def _copied(self, chunk: ActivationChunk) -> None:
        """Waits for a chunk's copies.

        Raises:
            UsageError: a graph needs the piece, and the source of its copy from the device was changed in place after
                that copy began. The chunk is then free.
        """
        source = chunk.end_copy()
        piece = chunk.piece
        if source is None or piece is None or piece.dead or source[0]._version == source[1]:  # noqa: SLF001
            return
        self._failed(chunk)
        raise UsageError(_CHANGED)

    def _transferred(self, chunk: ActivationChunk) -> None:
        """Waits for a chunk's transfer from or to storage, and verifies bytes that were read."""
        if chunk.ticket is None:
            return
        try:
            chunk.ticket.wait()
        except BaseException:
            # After an interrupt the transfer may still be under way; after any other error it has ended.
            if chunk.ticket.done():
                self._failed(chunk)
            raise
        chunk.end_transfer()
        piece = chunk.piece
        if chunk.reading and piece is not None and not piece.dead:
            found = checksum_of(chunk.memory[: piece.nbytes])
            if found != piece.checksum:
                self._failed(chunk)
                place = piece.place
                assert place is not None
                path = ", ".join(place.volume.paths)
                raise CorruptionError(
                    "a checkpointed activation that was read from storage has a wrong checksum: "
                    f"{piece.nbytes} bytes at {place.offset} of {path} have {found}, not {piece.checksum}. No step was "
                    "committed with these bytes: check the drive, start a new process, and call offload() with "
                    "existing='resume'",
                    path=path,
                    offset=place.offset,
                    nbytes=piece.nbytes,
                )

    def _failed(self, chunk: ActivationChunk) -> None:
        """Frees a chunk whose content must not be used."""
        chunk.clear()
        self._held.pop(chunk, None)
        self._loose.pop(chunk, None)
        self._free.append(chunk)

    def _empty(self, chunk: ActivationChunk) -> None:
        """Waits for a loose chunk's copy and transfer, then empties the chunk; frees the place of a dead piece."""
        self._copied(chunk)
        self._transferred(chunk)
        self._loose.pop(chunk, None)
        piece = chunk.clear()
        if piece is not None and piece.dead and piece.place is not None:
            self._room.give_back(piece.place)

    # --- the end -----------------------------------------------------------------------

    def drop(self, piece: Piece) -> None:
        """Marks a piece that no graph needs as dead, and frees its chunk and its place on storage.

        If a copy or transfer of the chunk is under way, the chunk becomes loose, and `_empty` frees the place later.
        """
        piece.die()
        chunk = piece.chunk
        if chunk is None:
            if piece.place is not None:
                self._room.give_back(piece.place)
            return
        self._held.pop(chunk, None)
        self._loose[chunk] = None
        if chunk.idle:
            self._empty(chunk)
            self._free.append(chunk)

    @property
    def occupied(self) -> int:
        """The number of held and loose chunks."""
        return len(self._held) + len(self._loose)

    @property
    def count(self) -> int:
        """The number of allocated chunks."""
        return len(self._free) + self.occupied

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the chunks take."""
        return sum(int(ring.region.mapped_bytes + ring.stats()["tables"]) for ring in self._rings)

    def close(self) -> None:
        """Waits for all copies and transfers, and releases all memory and files.

        Raises:
            StorageError: a write failed, and its ticket has not raised the error.
        """
        copies = [chunk.copy for chunk in (*self._held, *self._loose, *self._free) if chunk.copy is not None]
        try:
            for copy in copies:
                # A lost device raises an error here, but its copies have ended.
                with contextlib.suppress(Exception):
                    copy.wait()
        finally:
            # Chunks and tickets may be dropped before their transfers end: a transfer keeps its memory alive.
            self._free.clear()
            self._held.clear()
            self._loose.clear()
            try:
                self._room.close()
            finally:
                for ring in self._rings:
                    ring.close()
                self._rings.clear()


def _number_of(chunk: ActivationChunk) -> tuple[bool, int]:
    """Returns the key that sorts loose chunks: dead pieces come first, then pieces of the oldest tensors."""
    piece = chunk.piece
    return (False, -1) if piece is None else (not piece.dead, piece.number)
