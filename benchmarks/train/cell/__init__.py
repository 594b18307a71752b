"""Trains one workload with one system in a separate process, and reports its time, memory and bytes.

The process runs `python -m benchmarks.train.cell ORDER`. If the system needs DeepSpeed, the process runs in DeepSpeed's
environment. So the modules of this package import only `cli.process`, `errors` and `text` of memascend. The modules of
memascend's own systems may import more.
"""

from __future__ import annotations

__all__ = ["ANSWER"]

# The line that has the answer begins with this text. Libraries may print other lines before and after it.
ANSWER = "cell: "
