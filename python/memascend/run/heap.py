"""Tunes the C library's heap so that free memory goes back to the system."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import resource
import time
from typing import TYPE_CHECKING

from memascend.run.holes import SMALLEST, Holes, c_library

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Heap", "trim"]

_log = logging.getLogger("memascend")
# From malloc.h. What a block computes with is mapped from here on (glibc begins with 128 KiB): in the heap it would
# leave holes between the small things that stay until the step's end, and other holes in each block.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STEADY_BYTES = SMALLEST
# The highest threshold that glibc goes to by itself.
_KEPT_BYTES = 32 << 20
# The top of the heap is what the next step needs again; beside a model in memory, something would lie above it.
_NEVER = -1
# How much of the time may go into giving back: less than what a step's time varies by on a machine of one's own. A trim
# looks at every page that is free, whether it was given back or not: in a heap of many such it waits for its turn.
_TRIM_SHARE = 0.01
# Steps after which holes are taken: what the caller of offload() freed once it had returned is free after the first.
_TAKING_STEPS = 2
# A step that maps so many times the model's own bytes is one of activations: the heap's holes are small beside them.
_ACTIVATIONS = 8
# Gradients of so much of a model may come from the heap, where they leave holes.
_HEAP_SHARE = 0.1


class Heap:
    """How the heap of this process treats tensors, while a model is trained.

    glibc raises its threshold for mappings of their own with each one that is freed, up to 32 MiB. From then on
    gradients come from the heap, where what little stays between them keeps it from shrinking: it would grow with the
    depth of the model. But a mapping is zeroed page by page each time, which can take longer than computing. So the
    threshold is fixed: below all gradients at first, until what the model left is taken, then below nearly all of them
    by bytes. What is smaller, activations above all, comes from the heap, which keeps it for the next step. Where
    batches are large, activations are larger than gradients: then the heap keeps what is freed as it would by itself.
    """

    def __init__(self, model_bytes: int, gradients: Iterable[int]) -> None:
        """Of a model of so many bytes, and of those that each gradient has."""
        self._model_bytes = model_bytes
        self._threshold = _threshold(sorted(gradients), int(model_bytes * _HEAP_SHARE))
        self._steps = 0
        self._faults = 0
        # When the last trim ended, what it took of the processor, and how far the heap went at most.
        self._trimmed = self._took = 0.0
        self._top = 0
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

    def step_ended(self) -> None:
        """Look at what the step mapped; the first one also warmed everything up."""
        if not self.steady:
            return
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        mapped = (faults - self._faults) * mmap.PAGESIZE
        self._faults = faults
        self._steps += 1
        if self._steps > 1 and mapped > _ACTIVATIONS * self._model_bytes:
            self.steady = False
            _set(_M_MMAP_THRESHOLD, _KEPT_BYTES)
            _set(_M_TRIM_THRESHOLD, _NEVER)
            _log.info("activations of %d MB a step: the heap keeps freed memory from now on", mapped // 1_000_000)
            return
        top = c_library().sbrk(0)
        if self._steps <= _TAKING_STEPS or top > self._top:
            self._trim()
        if self._steps <= _TAKING_STEPS:
            self._holes.take()
        if self._steps == _TAKING_STEPS:
            _set(_M_MMAP_THRESHOLD, self._threshold)
            _set(_M_TRIM_THRESHOLD, _NEVER)
        elif self._steps > _TAKING_STEPS:
            # The next step needs as much again; only what goes beyond is a hole more.
            self._top = max(self._top, top)

    def _trim(self) -> None:
        if self._took <= (time.perf_counter() - self._trimmed) * _TRIM_SHARE:
            began = time.thread_time()
            trim()
            self._took = time.thread_time() - began
            self._trimmed = time.perf_counter()


def _threshold(gradients: Iterable[int], from_heap: int) -> int:
    """The bytes from which on gradients are mapped, of these in rising order: so many may come from the heap."""
    for size in gradients:
        from_heap -= size
        if from_heap < 0:
            return min(max(size, _STEADY_BYTES), _KEPT_BYTES)
    return _KEPT_BYTES


def _set(option: int, value: int) -> bool:
    with contextlib.suppress(OSError, AttributeError):
        return bool(c_library().mallopt(option, value))
    return False


def trim() -> None:
    """Give back to the system what is free in the heap."""
    with contextlib.suppress(OSError, AttributeError):
        c_library().malloc_trim(0)
