"""Allocates host memory that is planned once: regions, arenas, chunk rings, leases; maps files as memory.

Sizes are in bytes and exact; times are in seconds. Errors: `ConfigError` for a wrong argument, `BudgetError` for a
region too small for its plan, `MemoryLimitError` where the machine or its cgroup does not have the memory,
`TimeoutExpired` where a wait ran out, `UsageError` for what was closed, returned or belongs to another process.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from memascend._core import (
    Arena,
    ChunkRing,
    FileMemory,
    Heap,
    Layout,
    Lease,
    Region,
    ignore_captures,
    layout,
    limits,
    regions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


__all__ = [
    "UNREGISTERED",
    "Arena",
    "ChunkRing",
    "Heap",
    "Layout",
    "Lease",
    "Region",
    "file_memory",
    "ignore_captures",
    "layout",
    "limits",
    "regions",
]


# What it costs that CUDA has not registered memory which copies to a device and back go through.
UNREGISTERED = (
    "copies to the device and back go through a buffer of the driver's and are slower for it, and whoever begins one "
    "waits until it is over, so that little is read meanwhile"
)


def file_memory(descriptor: int, nbytes: int) -> torch.Tensor:
    """The first bytes of a file that is open for reading and writing, as memory; the descriptor may be closed then.

    What is written there goes to the file and leaves memory as the kernel likes. In a child that is forked off, it is
    the child's alone; what the parent writes later the child may read, unless it wrote to the same page before.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.frombuffer(FileMemory(descriptor, nbytes), dtype=torch.uint8)


PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class HostArena:
    """An arena of the planned classes, {bytes: count}; each slot that is added has a region of its own."""

    def __init__(self, classes: Mapping[int, int]) -> None:
        """Take the planned memory.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have it.
        """
        self._bounds = sorted(classes)
        self._parts: list[tuple[Region, Arena]] = []
        self._planned = self._taken(classes)
        self._added: dict[int, list[Arena]] = {}
        # What the plan did not have.
        self.added_bytes = 0

    def _taken(self, classes: Mapping[int, int]) -> Arena:
        region = Region(layout(classes).reserved, pin=False, on_fork="wipe", owner="units")
        arena = Arena(region, classes)
        self._parts.append((region, arena))
        return arena

    def add(self, nbytes: int) -> int:
        """Take memory for one more lease of `nbytes`; how many bytes that took.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have it.
        """
        bound = self._bound(nbytes)
        self._added.setdefault(bound, []).append(self._taken({bound: 1}))
        region, arena = self._parts[-1]
        nbytes = region.mapped_bytes + arena.table_bytes
        self.added_bytes += nbytes
        return nbytes

    @property
    def added(self) -> dict[int, int]:
        """The slots beyond the planned ones, {bytes: count}."""
        return {bound: len(arenas) for bound, arenas in self._added.items()}

    def _bound(self, nbytes: int) -> int:
        return self._bounds[bisect_left(self._bounds, nbytes)]

    def lease(self, nbytes: int, timeout: float | None = None, owner: str = "user") -> Lease:
        """As `memory.Arena.lease`; only for a planned slot is waited."""
        if not self._planned.free_slots(nbytes):
            for arena in self._added.get(self._bound(nbytes), ()):
                if arena.free_slots(nbytes):
                    return arena.lease(nbytes, 0.0, owner)
        return self._planned.lease(nbytes, timeout, owner)

    def free_slots(self, nbytes: int) -> int:
        """How many slots are free that `lease(nbytes)` may take."""
        planned = self._planned.free_slots(nbytes)
        return planned + sum(arena.free_slots(nbytes) for arena in self._added.get(self._bound(nbytes), ()))

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the slots that are taken now."""
        return sum(arena.in_use_bytes for _, arena in self._parts)

    @property
    def table_bytes(self) -> int:
        """Bytes of the arenas' own records."""
        return sum(arena.table_bytes for _, arena in self._parts)

    @property
    def held_bytes(self) -> int:
        """All memory that is held, 0 once it was closed."""
        return sum(region.mapped_bytes + arena.table_bytes for region, arena in self._parts if not region.closed)

    def close(self) -> None:
        """Let the memory go."""
        for region, _ in self._parts:
            region.close()
