"""Moves activation chunks between device, host memory and unlinked scratch files."""

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


# The first file; each later one is as large as all before it, so that there are few.
_FIRST_BYTES = 64 << 20


class ScratchPlace(NamedTuple):
    """One place in a scratch file; it is given back as a whole."""

    volume: nvme.Volume
    offset: int


class Scratch:
    """Places in files that grow as they are needed, striped over some folders, and are gone with the process."""

    def __init__(self, folders: Sequence[Path], place_bytes: int) -> None:
        """Begin without a file: one is made in each folder. The size of a place is a multiple of 4,096."""
        self._folders = list(folders)
        self._place_bytes = place_bytes
        self._volumes: list[nvme.Volume] = []
        self._free: list[ScratchPlace] = []

    @property
    def file_bytes(self) -> int:
        """Disk space that is taken."""
        return sum(volume.size for volume in self._volumes)

    def take(self) -> ScratchPlace:
        """A free place.

        Raises:
            StorageError: the file system is full.
        """
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, place: ScratchPlace) -> None:
        """Free a place, of which no transfer is in flight any more."""
        self._free.append(place)

    def _grow(self) -> None:
        granule = self._place_bytes * len(self._folders)
        size = -(-max(_FIRST_BYTES, self.file_bytes) // granule) * granule
        files = [folder / f".memascend-{uuid.uuid4().hex}" for folder in self._folders]
        try:
            volume = nvme.open(files, size=size, stripe=self._place_bytes if len(files) > 1 else None)
        except StorageError as error:
            raise StorageError(
                f"no disk space for checkpointed activations ({size} bytes more than the {self.file_bytes} that it "
                f"has): {error}; give offload(scratch=) a folder with more",
                errno=error.errno,
                path=error.path,
            ) from error
        finally:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()
        self._volumes.append(volume)
        # The first place is taken first.
        self._free += [
            ScratchPlace(volume, offset) for offset in range(size - self._place_bytes, -1, -self._place_bytes)
        ]

    def close(self) -> None:
        """Wait for what is in flight; the files are gone. Twice is fine."""
        volumes, self._volumes = self._volumes, []
        self._free.clear()
        for volume in volumes:
            volume.close()


_log = logging.getLogger("memascend")


@dataclass(eq=False, slots=True)
class Piece:
    """A chunk's worth of a tensor: in which chunk it is, or where on storage; or both.

    Only `ActivationChunk` and this change it.
    """

    nbytes: int
    number: int  # of its tensor: later ones are used earlier
    chunk: ActivationChunk | None = None
    place: ScratchPlace | None = None
    checksum: str = ""
    dead: bool = False  # no graph refers to it any more

    def put(self, place: ScratchPlace, checksum: str) -> None:
        """Note its place on storage, where it lies or is being written."""
        assert self.place is None, "a piece is written once"
        self.place, self.checksum = place, checksum

    def enter(self, chunk: ActivationChunk) -> None:
        """Note its chunk, where it lies or is being read."""
        assert self.chunk is None, "a piece is in one chunk"
        self.chunk = chunk

    def leave(self) -> None:
        """Note that it is in no chunk any more."""
        self.chunk = None

    def die(self) -> None:
        """Note that no graph refers to it any more."""
        self.dead = True


@dataclass(eq=False, slots=True)
class ActivationChunk:
    """A chunk of host memory, and its content."""

    memory: torch.Tensor
    piece: Piece | None = None
    ticket: nvme.Ticket | None = None  # from storage or to it
    reading: bool = False
    copy: Copy | None = None  # from a device or to it, the last that was begun
    source: tuple[torch.Tensor, int] | None = None  # the tensor that is being copied from a device, and its version

    def fill(self, piece: Piece, copy: Copy | None, source: torch.Tensor) -> None:
        """Hold a piece that was copied in, or is being copied from a device; `source` lives until that copy ends."""
        piece.enter(self)
        self.piece, self.reading = piece, False
        if copy is not None:
            self.copy, self.source = copy, (source, source._version)  # noqa: SLF001

    def write(self, place: ScratchPlace) -> None:
        """Begin to write the piece to storage."""
        piece = self.piece
        assert piece is not None, "an empty chunk is not written"
        checksum = checksum_of(self.memory[: piece.nbytes])
        self.ticket = place.volume.write(self.memory[: whole_pages(piece.nbytes)], place.offset)
        piece.put(place, checksum)

    def read(self, piece: Piece) -> None:
        """Begin to read a piece from storage."""
        place = piece.place
        assert place is not None, "it was written"
        self.ticket = place.volume.read(self.memory[: whole_pages(piece.nbytes)], place.offset)
        piece.enter(self)
        self.piece, self.reading = piece, True

    def give(self, device: Device, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Begin to copy the piece to a device, after other work and after earlier copies of the chunk."""
        assert self.piece is not None, "an empty chunk is not copied"
        before = () if self.copy is None else (self.copy,)
        self.copy = device.bring(self.memory[: self.piece.nbytes], target, [*after, *before])
        return self.copy

    def end_copy(self) -> tuple[torch.Tensor, int] | None:
        """Wait for the last copy; returns its source, and the version that was copied."""
        if self.copy is None:
            return None
        self.copy.wait()
        source, self.copy, self.source = self.source, None, None
        return source

    def end_transfer(self) -> None:
        """Note that the transfer from or to storage has ended."""
        self.ticket = None

    def clear(self) -> Piece | None:
        """Become empty; returns the piece that was in it."""
        piece, self.piece, self.ticket = self.piece, None, None
        if piece is not None:
            piece.leave()
        return piece

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return (self.copy is None or self.copy.done()) and (self.ticket is None or self.ticket.done())


_CHANGED = (
    "a checkpointed activation was changed in place before it was copied off the device, which autograd refuses as "
    "well: compute the new value out of place"
)


class Chunks:
    """All chunks, and the transfers from and to them."""

    def __init__(
        self, room: Scratch, chunk_bytes: int, count: int, more: Sequence[int] = (), *, device: Device | None
    ) -> None:
        """Take the memory of the first `count` chunks, with nothing in them.

        As many are kept spare later, by writing others ahead. `more` are the counts of chunks that may be taken later,
        when they are needed. `device` is where activations lie; None: in host memory. `close()` closes the `room`.
        """
        self._room = room
        self._chunk_bytes = chunk_bytes
        self._spare = count
        self._more = list(more)
        self._device = device
        self._rings: list[memory.ChunkRing] = []
        self._free: list[ActivationChunk] = []
        self._take(count)
        # Chunks whose content is not on storage, in the order of saving: the backward uses the first one last.
        self._held: dict[ActivationChunk, None] = {}
        # Chunks whose content is on storage, is being written, or is of no use any more.
        self._loose: dict[ActivationChunk, None] = {}
        self.counters = {"written": 0, "read": 0}

    def _take(self, count: int) -> None:
        ring = memory.ChunkRing(self._chunk_bytes, count, pin=False if self._device is None else "auto")
        self._rings.append(ring)
        taken = [ring.lease(0, "activations").tensor(self._chunk_bytes, torch.uint8) for _ in range(count)]
        # The first one is used first.
        self._free += [ActivationChunk(one) for one in reversed(taken)]

    # --- in --------------------------------------------------------------------------

    def fill(self, part: torch.Tensor, source: torch.Tensor, number: int, after: Sequence[Copy]) -> Piece:
        """Take a part of a tensor in; `source` is the tensor that it is copied from.

        On a device the copy comes after `after`, and the host does not wait for it.
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
        """Wait until a piece is copied, so that its source can be released."""
        if piece.chunk is not None and piece.chunk.source is not None:
            self._copied(piece.chunk)

    def write_ahead(self, least: int = 0) -> None:
        """Begin to write the pieces that are used last, until enough chunks are spare; `least` of them anyway."""
        wanted = self._spare - len(self._free) - len(self._loose) - sum(self._more)
        for chunk in list(itertools.islice(self._held, max(wanted, least))):
            if least == 0 and chunk.copy is not None and not chunk.copy.done():
                # The later ones come after it.
                return
            self._write(chunk)

    def _write(self, chunk: ActivationChunk) -> None:
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
        """A free chunk, or the chunk of the piece that is used last."""
        if not self._free and self._more:
            try:
                self._take(self._more.pop())
            except MemoryLimitError as error:
                self._more.clear()
                _log.warning("checkpointed activations go to storage from here on: %s", error)
        if self._free:
            return self._free.pop()
        self.write_ahead()
        if not self._loose:
            self.write_ahead(least=1)
        best = min([chunk for chunk in self._loose if chunk.idle] or self._loose, key=_number_of)
        self._empty(best)
        return best

    # --- out -------------------------------------------------------------------------

    def give(self, piece: Piece, target: torch.Tensor, after: Sequence[Copy]) -> Copy | None:
        """Copy a piece to where a tensor is put together; on a device after `after`, and the host does not wait."""
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
        # It may still be on its way in.
        return chunk.give(self._device, target, after)

    def read_ahead(self, pieces: Sequence[Piece], number: int, *, copied: Sequence[Piece]) -> None:
        """Begin to read pieces, as far as there are chunks of what a backward at `number` has used already."""
        for piece in pieces:
            if piece.chunk is not None:
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
        source = chunk.end_copy()
        piece = chunk.piece
        if source is None or piece is None or piece.dead or source[0]._version == source[1]:  # noqa: SLF001
            return
        self._failed(chunk)
        raise UsageError(_CHANGED)

    def _transferred(self, chunk: ActivationChunk) -> None:
        """Wait for a chunk's transfer from or to storage, and verify the bytes that were read."""
        if chunk.ticket is None:
            return
        try:
            chunk.ticket.wait()
        except BaseException:
            # An interrupt ends the wait alone; anything else, the transfer.
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
                    f"a checkpointed activation is not what was written: {piece.nbytes} bytes at {place.offset} of "
                    f"{path} have the checksum {found}, not {piece.checksum}. No step was committed from it: check the "
                    "drive, and resume",
                    path=path,
                    offset=place.offset,
                    nbytes=piece.nbytes,
                )

    def _failed(self, chunk: ActivationChunk) -> None:
        chunk.clear()
        self._held.pop(chunk, None)
        self._loose.pop(chunk, None)
        self._free.append(chunk)

    def _empty(self, chunk: ActivationChunk) -> None:
        """Wait for its transfers, then empty a chunk, whose content is on storage or of no use any more."""
        self._copied(chunk)
        self._transferred(chunk)
        self._loose.pop(chunk, None)
        piece = chunk.clear()
        if piece is not None and piece.dead and piece.place is not None:
            self._room.give_back(piece.place)

    # --- the end -----------------------------------------------------------------------

    def drop(self, piece: Piece) -> None:
        """Release a piece, to which no graph refers any more."""
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
        """Chunks that have something in them."""
        return len(self._held) + len(self._loose)

    @property
    def count(self) -> int:
        """Chunks that were taken."""
        return len(self._free) + self.occupied

    @property
    def host_bytes(self) -> int:
        """Host memory that is held."""
        return sum(int(ring.region.mapped_bytes + ring.stats()["tables"]) for ring in self._rings)

    def close(self) -> None:
        """Release everything, once all transfers have ended."""
        copies = [chunk.copy for chunk in (*self._held, *self._loose, *self._free) if chunk.copy is not None]
        try:
            for copy in copies:
                # Of a device that is lost, nothing is on its way.
                with contextlib.suppress(Exception):
                    copy.wait()
        finally:
            # Tickets hold the memory until storage is done.
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
    piece = chunk.piece
    return (False, -1) if piece is None else (not piece.dead, piece.number)
