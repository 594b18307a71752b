"""The C library's heap: what it keeps that nobody uses."""

from __future__ import annotations

import contextlib
import ctypes
import os

__all__ = ["steady_heap", "trim"]

# From malloc.h, and the value that glibc begins with.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 128 << 10


def steady_heap() -> None:
    """Let gradients and activations be mappings of their own.

    glibc raises its threshold for that with each one that is freed, up to 32 MiB. From then on they come from the heap,
    where what little stays between them keeps it from shrinking: it would grow with the depth of the model.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def trim() -> None:
    """Give back to the system what the model held."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloctrim(0)
