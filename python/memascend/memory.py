"""Allocates host memory that is planned once: regions, arenas, chunk rings, leases; maps files as memory.

Sizes are in bytes and exact; times are in seconds. Errors: `ConfigError` for a wrong argument, `BudgetError` for a
region too small for its plan, `MemoryLimitError` where the machine or its cgroup does not have the memory,
`TimeoutExpired` where a wait ran out, `UsageError` for what was closed, returned or belongs to another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._core import (
    Arena,
    ChunkRing,
    FileMemory,
    Heap,
    HostArena,
    Layout,
    Lease,
    Region,
    ignore_captures,
    is_file_memory,
    layout,
    limits,
    regions,
)

if TYPE_CHECKING:
    import torch


__all__ = [
    "UNREGISTERED",
    "Arena",
    "ChunkRing",
    "Heap",
    "HostArena",
    "Layout",
    "Lease",
    "Region",
    "file_memory",
    "ignore_captures",
    "is_file_memory",
    "layout",
    "limits",
    "regions",
]


# What it costs that CUDA has not registered memory which copies to a device and back go through.
UNREGISTERED = (
    "copies to the device and back go through a buffer of the driver's which is slower, and the thread that begins one "
    "waits until it ends, so that few reads overlap"
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
