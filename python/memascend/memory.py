"""Allocates host memory that is planned once: regions, arenas, chunk rings, leases; maps files as memory.

Sizes are in bytes and exact; times are in seconds. Errors: `ConfigError` for a wrong argument, `BudgetError` for a
region too small for its plan, `MemoryLimitError` where the machine or its cgroup does not have the memory,
`TimeoutExpired` for a wait that ran out, `UsageError` for an object that was closed, returned or belongs to another
process.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from memascend._core import (
    Arena,
    ChunkRing,
    FileMemory,
    HostArena,
    Layout,
    Lease,
    Region,
    begin_heap_backward,
    end_heap_step,
    ignore_captures,
    is_file_memory,
    layout,
    limits,
    regions,
    settle_heap,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


__all__ = [
    "UNREGISTERED",
    "Arena",
    "ChunkRing",
    "HostArena",
    "Layout",
    "Lease",
    "Region",
    "begin_heap_backward",
    "end_heap_step",
    "file_memory",
    "free_scratch",
    "ignore_captures",
    "is_file_memory",
    "layout",
    "limits",
    "regions",
    "settle_heap",
]


# The cost of memory for copies to a device and back that is not registered with CUDA.
UNREGISTERED = (
    "copies to the device and back go through a buffer of the driver's which is slower, and the thread that begins one "
    "waits until it ends, so that few reads overlap"
)


def file_memory(descriptor: int, nbytes: int) -> torch.Tensor:
    """The first bytes of a file that is open for reading and writing, as memory; the descriptor may be closed then.

    The kernel writes changes to the file and frees the memory as it needs. A forked child has a private copy of each
    page that it writes to; on other pages it may read what the parent writes later.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.frombuffer(FileMemory(descriptor, nbytes), dtype=torch.uint8)


def free_scratch() -> None:
    """Free what MKL keeps in each thread that computed a product, for the next one; what is in use stays.

    A thread's team has such memory of its own: some 8 MB for each of its processors. Without MKL nothing happens.
    """
    if (free := _mkl_free_buffers()) is not None:
        free()


@functools.cache
def _mkl_free_buffers() -> Callable[[], None] | None:
    """MKL's own function, which torch's library has under this name."""
    import torch

    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers
    except (OSError, AttributeError):
        return None


PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
