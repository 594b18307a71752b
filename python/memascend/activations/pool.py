"""Pools host memory for activations: chunks, and what each of them holds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from memascend import memory
from memascend.errors import MemoryLimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend import nvme
    from memascend.activations.scratch_files import ScratchPlace
    from memascend.device.device import Copy

_log = logging.getLogger("memascend")


class Piece:
    """A chunk's worth of a tensor: in which chunk it is, or where on storage; or both."""

    __slots__ = ("checksum", "chunk", "dead", "nbytes", "number", "place")

    def __init__(self, nbytes: int, number: int) -> None:
        self.nbytes = nbytes
        # Of its tensor: later ones are used earlier.
        self.number = number
        self.chunk: ActivationChunk | None = None
        self.place: ScratchPlace | None = None
        self.checksum = ""
        self.dead = False


class ActivationChunk:
    """A chunk of host memory, and what is in it."""

    __slots__ = ("copy", "memory", "piece", "reading", "source", "ticket")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.piece: Piece | None = None
        # From storage or to it.
        self.ticket: nvme.Ticket | None = None
        self.reading = False
        # From a device or to it, the last that was begun.
        self.copy: Copy | None = None
        # What is being copied from a device, and its version.
        self.source: tuple[torch.Tensor, int] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return (self.copy is None or self.copy.done()) and (self.ticket is None or self.ticket.done())


class ChunkPool:
    """The memory of the chunks: a few at the start, and more of it when it is needed, as far as the plan goes."""

    def __init__(self, chunk_bytes: int, count: int, more: Sequence[int], *, pinned: bool) -> None:
        """Take the first `count` chunks; `more` are the counts of those that may follow."""
        self._chunk_bytes = chunk_bytes
        self._pin = "auto" if pinned else False
        self._rings: list[memory.ChunkRing] = []
        self._more = list(more)
        self.first = self._taken(count)

    @property
    def left(self) -> int:
        """Chunks that may be taken yet."""
        return sum(self._more)

    def more(self) -> list[ActivationChunk]:
        """Further ones; none where there are no more."""
        if not self._more:
            return []
        try:
            return self._taken(self._more.pop())
        except MemoryLimitError as error:
            self._more.clear()
            _log.warning("checkpointed activations go to storage from here on: %s", error)
            return []

    def _taken(self, count: int) -> list[ActivationChunk]:
        ring = memory.ChunkRing(self._chunk_bytes, count, pin=self._pin)  # type: ignore[arg-type]
        self._rings.append(ring)
        return [
            ActivationChunk(ring.lease(0, "activations").tensor(self._chunk_bytes, torch.uint8)) for _ in range(count)
        ]

    @property
    def host_bytes(self) -> int:
        """Host memory that is held."""
        return sum(int(ring.region.mapped_bytes + ring.stats()["tables"]) for ring in self._rings)

    def close(self) -> None:
        """Let it go."""
        self.first.clear()
        rings, self._rings = self._rings, []
        for ring in rings:
            ring.close()
