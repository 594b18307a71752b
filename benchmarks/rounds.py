"""Times every case in every round, so that a drift of the machine affects all cases alike."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Calls that are too short for the clock are repeated until a sample takes this long.
_SAMPLE_SECONDS = 0.01
# torch's threads spin for some 8 ms after a case, waiting for more work; they would take a core from the next case.
_SETTLING_SECONDS = 0.02


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Returns the seconds of one call of each case: the median over the rounds, after calls that warm up.

    Sleeps before each sample until the threads of the previous case are at rest.
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
    """Warms up a case; returns the number of calls that take at least `_SAMPLE_SECONDS`."""
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
