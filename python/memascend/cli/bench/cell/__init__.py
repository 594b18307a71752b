"""One cell of `bench train`: one system trains one workload in a process of its own, and says what it took.

`python -m memascend.cli.bench.cell ORDER` is that process. It runs also in a peer's environment, so but for the systems
nothing in here imports the rest of memascend.
"""

from __future__ import annotations

__all__ = ["ANSWER"]

# Begins the line of the answer: peers print what they like before it.
ANSWER = "cell: "
