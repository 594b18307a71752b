"""Measures how much host memory and time each of four parts of the MemAscend paper saves.

Each part is compared with the method that it replaces, at the size of a workload. memascend has no options for the
replaced methods, so the benchmark measures each part alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.bench_io import WEIGHT_CASES, weight_cases
from benchmarks.reservation import reserve
from memascend import kernels, memory
from memascend.cli import process
from memascend.text import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.reservation import Unit
    from benchmarks.train.cell.workload import Workload

__all__ = ["Cost", "ablation", "ablation_table", "units"]

# The number of units in memory at the same time: a step computes with one unit, reads the next unit, and writes the
# previous unit back.
_WINDOW = 3
_ROUNDS = 3
_VALUE_BYTES = 2
# How often a step moves the values: it reads them for the forward and for the backward, and writes them in the update.
_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The bytes and seconds of one part (`part`), and of the method that it replaces (`instead`)."""

    part: str
    instead: str
    nbytes: int
    instead_nbytes: int
    seconds: float
    instead_seconds: float
    of: str
    """The event that takes these seconds, either "set-up" or "each step"."""


def units(work: Workload) -> list[Unit]:
    """Returns the bytes of each tensor of each unit of the workload's model, in the order of a step."""
    hidden, inner, heads = work.hidden, work.intermediate, work.kv_heads * (work.hidden // work.heads)
    attention = (hidden * hidden, hidden, heads * hidden, heads, heads * hidden, heads, hidden * hidden)
    block = (hidden, *attention, hidden, *(hidden * inner,) * 3)
    table_ = work.vocabulary * hidden
    found = [(table_,), *(block for _ in range(work.layers)), (hidden, table_)]
    return [tuple(numel * _VALUE_BYTES for numel in unit) for unit in found]


def ablation(work: Workload, storage: Path) -> list[Cost]:
    """Measures all four parts at the size of the workload."""
    pools = reserve(units(work), _WINDOW).reserved
    arena, one_size = pools["arena"], pools["one size"]
    rounded = 1 << (arena - 1).bit_length()
    return [
        _pinning("slots of the largest tensor's size", arena, one_size),
        _pinning("pinned bytes rounded up to a power of two", arena, rounded),
        _check(work),
        _storage(work, storage),
    ]


def _pinning(instead: str, nbytes: int, other: int) -> Cost:
    """Measures how long it takes to make and close a region of `nbytes` bytes, and a region of `other` bytes."""

    def made(size: int) -> Callable[[], object]:
        return lambda: memory.Region(size, owner="ablation").close()

    return Cost(
        part="arena of exact leases",
        instead=instead,
        nbytes=nbytes,
        instead_nbytes=other,
        seconds=_seconds(made(nbytes)),
        instead_seconds=_seconds(made(other)),
        of="set-up",
    )


def _check(work: Workload) -> Cost:
    """Measures memascend's overflow check and torch's operations on a gradient that is as large as the whole model.

    The bytes are the growth of this process's resident memory during one check.
    """
    import torch

    gradient = torch.zeros(work.parameters, dtype=getattr(torch, work.dtype))

    def chain() -> bool:
        return bool(gradient.isinf().any() or gradient.isnan().any())

    def fused() -> bool:
        return bool(kernels.check_and_unscale(gradient)[0])

    return Cost(
        part="overflow check in one pass",
        instead="isinf().any() or isnan().any()",
        nbytes=_added(fused),
        instead_nbytes=_added(chain),
        seconds=_seconds(fused),
        instead_seconds=_seconds(chain),
        of="each step",
    )


def _storage(work: Workload, storage: Path) -> Cost:
    """Compares the I/O of a step's 16-bit values in one volume with the same I/O in files.

    Measures the speed of both with the weights of `weight_cases`, and computes the seconds for the workload's values.
    The bytes are the memory that the page cache needs for the files.
    """
    with tempfile.TemporaryDirectory(dir=storage, prefix=".memascend-ablation-") as folder, ExitStack() as stack:
        cases = weight_cases(Path(folder), stack)
        speeds = {name: statistics.median(case().gb_per_second for _ in range(_ROUNDS)) for name, case in cases.items()}
    files, ours = (speeds[name] for name in WEIGHT_CASES)
    moved = work.parameters * _VALUE_BYTES * _PASSES
    return Cost(
        part="one volume, direct I/O",
        instead="a file per tensor, through the page cache",
        nbytes=0,
        instead_nbytes=work.parameters * _VALUE_BYTES,
        seconds=moved / ours / 1e9,
        instead_seconds=moved / files / 1e9,
        of="each step",
    )


def _added(call: Callable[[], object]) -> int:
    process.restart_peak()
    before = process.resident()
    call()
    return max(0, process.resident_peak() - before)


def _seconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def ablation_table(work: Workload, costs: list[Cost]) -> str:
    """Returns a table with a row for each replaced method: its costs, and the costs of the part that replaces it."""
    rows = [
        (
            cost.instead,
            bytes_shown(cost.instead_nbytes),
            bytes_shown(cost.nbytes),
            seconds_shown(cost.instead_seconds),
            seconds_shown(cost.seconds),
            cost.of,
        )
        for cost in costs
    ]
    columns = ("instead", "host memory", "ours", "time", "ours", "time of")
    return f"{work.name}: the parts one by one\n\n{table(columns, rows)}"
