"""Times every case in every round, so that a change of the machine's speed affects all cases."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# A single call may be too short for the clock, so it is repeated until the calls together take this number of seconds.
_SAMPLE_SECONDS = 0.01
# The seconds of the pause before each sample. After a case, torch's threads wait actively for some 8 ms, and would take
# a core from the next case.
_SETTLING_SECONDS = 0.02


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Returns for each case the median seconds of one call. Each round measures every case once.

    All cases are called before the first round, to warm up. Before each sample, the function sleeps for
    `_SETTLING_SECONDS`, in which the threads of the previous case stop.
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
    """Warms up a case. Returns the number of calls that together take at least `_SAMPLE_SECONDS`."""
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
