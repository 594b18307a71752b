"""Allocates host memory that is planned once: regions, arenas, chunk rings, leases; maps files as memory.

Sizes are in bytes and exact; times are in seconds. Errors: `ConfigError` for a wrong argument, `BudgetError` for a
region too small for its plan, `MemoryLimitError` if the machine or its cgroup does not have the memory or a system call
for memory fails, `TimeoutExpired` for a wait that exceeds its timeout, `UsageError` for an object that was closed, was
returned, or belongs to another object or process.
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


# Describes, for messages, the cost of copying between a device and host memory that is not registered with CUDA.
UNREGISTERED = (
    "copies to and from the device go through a buffer of the CUDA driver, which is slower, and each copy blocks the "
    "thread that starts it, so that few reads overlap"
)


def file_memory(descriptor: int, nbytes: int) -> torch.Tensor:
    """Maps the first `nbytes` of a file and returns them as a uint8 tensor.

    The file must be open for reading and writing; the caller may close `descriptor` afterwards. The kernel writes
    changed pages to the file, and reclaims their memory as needed. A forked child gets a private copy of each page
    that the child writes to; on other pages the child may read later writes of the parent.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.frombuffer(FileMemory(descriptor, nbytes), dtype=torch.uint8)


def free_scratch() -> None:
    """Frees the buffers that MKL caches after matrix products; buffers in use stay.

    Each thread that computed a matrix product has a team of OpenMP threads. The buffers of a team take some 8 MB for
    each processor. Without MKL, this function does nothing.
    """
    if (free := _mkl_free_buffers()) is not None:
        free()


@functools.cache
def _mkl_free_buffers() -> Callable[[], None] | None:
    """Returns MKL's `mkl_serv_free_buffers`, which torch's library exports; None without MKL."""
    import torch

    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers
    except (OSError, AttributeError):
        return None


PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """Rounds `nbytes` up to a multiple of `PAGE_BYTES`."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
