"""Measures how long this processor takes for what a trace counted, by making each kind of call again."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend import engine, kernels
from memascend.cli.plan.trace import made_again
from memascend.progress import Progress

if TYPE_CHECKING:
    from memascend.cli.plan.trace import Call, Trace

__all__ = ["Processor", "measure"]

# A kind of call is made at least twice, and then until so much time is gone.
_CALLS_MIN, _CALL_SECONDS = 2, 0.05
_UPDATED = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What was measured.

    Attributes:
        forward_seconds: of the traced batch.
        backward_seconds: of the traced batch.
        update_seconds: of one thread, for the arithmetic of AdamW on one parameter, while all others do the same.
        check_seconds: of one thread, for the checksum of one byte.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    check_seconds: float


def measure(trace: Trace) -> Processor:
    """Make each kind of call that the trace has, on random values, and count it as often as it was made."""
    calls = {*trace.forward.calls, *trace.backward.calls}
    with torch.no_grad(), Progress("measuring this processor", len(calls), unit="operations") as progress:
        seconds = {}
        for call in calls:
            seconds[call] = _seconds(call)
            progress.add(1)
    return Processor(
        forward_seconds=sum(seconds[call] * count for call, count in trace.forward.calls.items()),
        backward_seconds=sum(seconds[call] * count for call, count in trace.backward.calls.items()),
        update_seconds=_update_seconds(),
        check_seconds=_check_seconds(),
    )


def _tensor(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small values: an index is 0, which every table has."""
    # Elements that are one in memory, as an expanded tensor has them, stay one.
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    flat = torch.zeros(count, dtype=dtype)
    if dtype.is_floating_point:
        flat.uniform_(0.1, 0.2)
    return flat.as_strided(shape, stride)


def _seconds(call: Call) -> float:
    """The shortest of several; 0 for what cannot be made again, which is little."""
    args, kwargs = (made_again(part, _tensor) for part in call.given)
    shortest = float("inf")
    began, made = time.perf_counter(), 0
    try:
        while made < _CALLS_MIN or time.perf_counter() - began < _CALL_SECONDS:
            before = time.perf_counter()
            call.function(*args, **kwargs)
            shortest = min(shortest, time.perf_counter() - before)
            made += 1
    except (RuntimeError, TypeError, NotImplementedError):
        return 0.0
    return shortest


def _update_seconds() -> float:
    # Together they may wait for memory, where one alone would not.
    threads = len(os.sched_getaffinity(0))
    master, first, second = (torch.rand(_UPDATED) for _ in range(3))
    gradient, weight = torch.rand(_UPDATED).bfloat16(), torch.empty(_UPDATED, dtype=torch.bfloat16)
    shortest = float("inf")
    for step in range(1, 4):
        before = time.perf_counter()
        kernels.adamw(
            master, gradient, first, second, weight,
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=step, threads=threads,
        )  # fmt: skip
        shortest = min(shortest, time.perf_counter() - before)
    return threads * shortest / _UPDATED


def _check_seconds() -> float:
    checked = torch.rand(_UPDATED)
    shortest = float("inf")
    for _ in range(3):
        before = time.perf_counter()
        engine.checksum_of(checked)
        shortest = min(shortest, time.perf_counter() - before)
    return shortest / checked.nbytes
