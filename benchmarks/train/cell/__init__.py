"""Trains one workload with one system in a process of its own and reports what it took.

`python -m benchmarks.train.cell ORDER` is that process. It runs also in a peer's environment, so but for the systems
nothing in here imports more of memascend than counters of a process and DeepSpeed's start.
"""

from __future__ import annotations

__all__ = ["ANSWER"]

# Begins the line of the answer: peers print what they like before it.
ANSWER = "cell: "
