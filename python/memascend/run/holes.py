"""Fills holes that a freed model leaves in the C library's heap, and frees their pages.

glibc serves a request from a hole that fits before it thinks of a mapping, whatever the threshold. Where a model was
made in the heap, each tensor of a step then lies in another of its holes, and the pages that were touched stay: the
model's memory comes back, step by step. A hole that is allocated is used by nobody, and without its pages costs none.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref

# Sizes that are asked for, halved from the one to the other. Larger holes are taken in several pieces; smaller ones are
# for what is always in the heap.
_LARGEST, SMALLEST = 256 << 20, 32 << 10
# Between two allocations: the size of the second.
_HEADER = ctypes.sizeof(ctypes.c_size_t)
_DONTNEED = 4


class Holes:
    """Those that are taken now; all are free again once this has gone."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._end = weakref.finalize(self, _free, self._taken)
        # There is nothing to gain once the process ends.
        self._end.atexit = False

    def take(self) -> int:
        """Take all that there are in this thread's heap; how many bytes. The threshold for mappings is `SMALLEST`."""
        library = c_library()
        pieces: list[int] = []
        size = _LARGEST
        top = library.sbrk(0)
        # What lies above the heap says that it has no hole of this size: mappings do. A heap that grows means the same,
        # where a process has as many mappings as it may.
        while size >= SMALLEST and library.sbrk(0) == top:
            piece = library.malloc(size)
            if piece and piece < top:
                pieces.append(piece)
                continue
            library.free(piece)
            size //= 2
        taken = 0
        for run in _runs(sorted(pieces)):
            first, end = run[0], run[-1] + library.malloc_usable_size(run[-1])
            if len(run) > 1:
                # As one: between two pieces there is a page that stays.
                _free(run)
                first = library.malloc(end - first) or 0
                if not 0 < first < library.sbrk(0):
                    library.free(first)
                    continue
                end = first + library.malloc_usable_size(first)
            self._taken.append(first)
            begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                library.madvise(begin, end - begin, _DONTNEED)
            taken += max(0, end - begin)
        return taken

    def close(self) -> None:
        """Make them free for anybody."""
        self._end()


def _runs(pieces: list[int]) -> list[list[int]]:
    """Pieces that lie one right after another, together."""
    library = c_library()
    runs: list[list[int]] = []
    following = 0
    for piece in pieces:
        if runs and piece == following:
            runs[-1].append(piece)
        else:
            runs.append([piece])
        following = piece + library.malloc_usable_size(piece) + _HEADER
    return runs


def _free(pieces: list[int]) -> None:
    library = c_library()
    while pieces:
        library.free(pieces.pop())


@functools.cache
def c_library() -> ctypes.CDLL:
    """Functions of the process's C library, with the types of those that are told addresses."""
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.malloc_usable_size.argtypes, library.malloc_usable_size.restype = [ctypes.c_void_p], ctypes.c_size_t
    library.sbrk.argtypes, library.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
