"""Trains one workload with one system in a process of its own, and reports its time, memory and bytes.

The process runs `python -m benchmarks.train.cell ORDER`, for a peer in the peer's environment. So no module here,
except for memascend's own systems, imports more of memascend than `cli.process`, `errors` and `text`.
"""

from __future__ import annotations

__all__ = ["ANSWER"]

# The beginning of the answer's line. Peers may print other lines before it.
ANSWER = "cell: "
