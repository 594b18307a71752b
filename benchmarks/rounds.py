"""Times every case in every round, so that a machine that drifts drifts for all of them."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Calls that are too short for the clock are repeated until a sample takes this long.
_SAMPLE_SECONDS = 0.01
# torch's threads wait for more work in a loop, some 8 ms long, and would take a core from the case after theirs.
_SETTLING_SECONDS = 0.02


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Seconds of one call of each case: the median over the rounds. Each is called once before, to warm up.

    No case begins before the threads of the one before it are at rest.
    """
    calls = {name: _calls_in_a_sample(case) for name, case in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            time.sleep(_SETTLING_SECONDS)
            began = time.perf_counter()
            for _ in range(calls[name]):
                case()
            samples[name].append((time.perf_counter() - began) / calls[name])
    return {name: statistics.median(times) for name, times in samples.items()}


def _calls_in_a_sample(case: Callable[[], object]) -> int:
    case()
    calls = 1
    while True:
        began = time.perf_counter()
        for _ in range(calls):
            case()
        took = time.perf_counter() - began
        if took >= _SAMPLE_SECONDS:
            return calls
        calls *= 2
