"""Tunes the C library's heap so that free memory goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import time

from memascend.run.holes import SMALLEST, Holes, c_library

_log = logging.getLogger("memascend")
# From malloc.h. What a block computes with is mapped from here on (glibc begins with 128 KiB): in the heap it would
# leave holes between the small things that stay until the step's end, and other holes in each block.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STEADY_BYTES = SMALLEST
# The highest threshold that glibc goes to by itself.
_KEPT_BYTES = 32 << 20
# glibc's own, as long as nobody sets it.
_TRIMMED_BYTES = 128 << 10
# The top of the heap is what the next step needs again; beside a model in memory, something would lie above it.
_NEVER = -1
# How much of the time may go into giving back: less than what a step's time varies by on a machine of one's own. A trim
# looks at every page that is free, whether it was given back or not: in a heap of many such it waits for its turn.
_TRIM_SHARE = 0.01
# Steps after which holes are taken: what the caller of offload() freed once it had returned is free after the first.
_TAKING_STEPS = 2
# A step that maps so many times the model's own bytes is one of activations: the heap's holes are small beside them.
ACTIVATIONS = 8
# Where entries are held, of what the plan holds: what the heap may hold beyond what torch needs at once. It is tried
# where a step maps no more than all of that.
_HOLES_SHARE = 1 / 10


class Heap:
    """How the heap of this process treats tensors, while a model is trained.

    glibc raises its threshold for mappings of their own with each one that is freed, up to 32 MiB. From then on
    gradients come from the heap, where what little stays between them keeps it from shrinking: it would grow with the
    depth of the model. (An aligned allocation needs more than a freed one of its size leaves, so that one small object
    beside a hole is enough.) So the threshold is fixed, and what is free in the heap after a step is given back.

    But a mapping is zeroed page by page each time, which can take longer than computing. So the heap keeps what is
    freed, as it would by itself, where batches are large, and with them the activations; and where entries are held,
    beside which what it grows by is little. That is tried in one step, and taken back if it grew by more.
    """

    def __init__(self, model_bytes: int, held_peak: int = 0) -> None:
        """Of a model of so many bytes; `held_peak` is what the plan holds at most, where entries are held."""
        self._model_bytes = model_bytes
        self._held_peak = held_peak
        self._steps = 0
        self._faults = 0
        # When the last trim ended, and what it took of the processor.
        self._trimmed = self._took = 0.0
        # The most that was mapped at once in the step; of the step before, with where the heap ended, while it is tried
        # what keeping takes.
        self._mapped = 0
        self._before: tuple[int, int] | None = None
        self._holes = Holes()
        chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ
        self.steady = not chosen and _set(_M_MMAP_THRESHOLD, _STEADY_BYTES)

    def model_left(self) -> None:
        """The model's own memory was freed: give it back, and keep what is to come out of its holes."""
        trim()
        if self.steady:
            self._holes.take()

    def close(self) -> None:
        """Make the holes free for anybody."""
        self._holes.close()

    def look(self) -> None:
        """How much is mapped: a backward begins, or it has ended."""
        if self.steady and self._held_peak and self._steps < _TAKING_STEPS + 1:
            self._mapped = max(self._mapped, mapped_bytes() or 0)

    def step_ended(self) -> None:
        """Look at what the step mapped; the first one also warmed everything up."""
        if not self.steady:
            return
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        touched = (faults - self._faults) * mmap.PAGESIZE
        self._faults = faults
        self._steps += 1
        mapped, self._mapped = self._mapped, 0
        if self._before is not None:
            self._judge(mapped, *self._before)
            return
        if self._steps > 1 and touched > ACTIVATIONS * self._model_bytes:
            self.keep()
            self.steady = False
            _log.info("activations of %d MB a step: the heap keeps freed memory from now on", touched // 1_000_000)
            return
        now = time.perf_counter()
        if self._took <= (now - self._trimmed) * _TRIM_SHARE:
            began = time.thread_time()
            trim()
            self._took = time.thread_time() - began
            self._trimmed = now
        if self._steps <= _TAKING_STEPS:
            self._holes.take()
        if self._steps == _TAKING_STEPS and mapped and touched <= self._held_peak:
            self.keep()
            self._before = mapped, c_library().sbrk(0)

    def _judge(self, mapped: int, mapped_before: int, top_before: int) -> None:
        """After a step in which the heap kept what was freed: whether it goes on so."""
        grown = c_library().sbrk(0) - top_before + mapped - mapped_before
        self._before = None
        if grown <= self._held_peak * _HOLES_SHARE:
            self.steady = False
            _log.info("the heap keeps freed memory from now on, and has grown by %d MB for it", grown // 1_000_000)
            return
        _set(_M_MMAP_THRESHOLD, _STEADY_BYTES)
        _set(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)
        trim()

    def keep(self) -> None:
        """From now on what is freed stays in the heap."""
        _set(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        _set(_M_TRIM_THRESHOLD, _NEVER)


class _Mallinfo(ctypes.Structure):
    # glibc's own names and order; from glibc 2.33 on.
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def mapped_bytes() -> int | None:
    """Bytes that the C library has in mappings of their own; None where it does not say."""
    try:
        ask = c_library().mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _Mallinfo
    return int(ask().hblkhd)


def _set(option: int, value: int) -> bool:
    with contextlib.suppress(OSError, AttributeError):
        return bool(c_library().mallopt(option, value))
    return False


def trim() -> None:
    """Give back to the system what is free in the heap."""
    with contextlib.suppress(OSError, AttributeError):
        c_library().malloc_trim(0)
