"""Measures and draws three curves: memory by model size, memory by context length, and step time by memory budget.

Also writes each curve to a CSV file.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.show import headline, lines
from benchmarks.train.cell.workload import WORKLOADS, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.train.measure import Bench

__all__ = ["CURVES", "Curve", "draw", "points"]

# A point of a curve: its place on the axis, the system, the value, the smallest value and the largest value. For
# seconds, these values are the median, the minimum and the maximum of the measured steps. For memory, they are equal.
Row = tuple[float, str, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve: its axes, its systems, and its places on the horizontal axis.

    Each of `places` has its value on this axis, a workload, and settings for all systems.
    """

    title: str
    along: str
    unit: str
    systems: tuple[str, ...]
    places: tuple[tuple[float, Workload, dict[str, Any]], ...]
    seconds: bool = False  # True: values are seconds of a step; False: MB that training adds
    # If `headline` is not empty, `show.headline` draws the picture, with only these systems and the title `says`.
    # Otherwise `show.lines` draws it, with all systems and the title `title`.
    headline: tuple[str, ...] = ()
    says: str = ""


_SYSTEMS = ("torch", "memascend", "zero-infinity", "zero-offload")


def _contexts() -> tuple[tuple[float, Workload, dict[str, Any]], ...]:
    work = replace(WORKLOADS["25M-1x128"], checkpoint=True)
    lengths = (128, 256, 512, 1024, 2048, 4096)
    return tuple((length, replace(work, name=f"25M-1x{length}-curve", length=length), {}) for length in lengths)


CURVES = {
    "size": Curve(
        title="Host memory that training adds, by model size (bf16, 1 x 128 tokens)",
        along="M parameters",
        unit="MB",
        systems=_SYSTEMS,
        places=tuple(
            (round(WORKLOADS[name].parameters / 1e6, 1), WORKLOADS[name], {})
            for name in ("4M-1x128", "25M-1x128", "125M-1x128", "500M-1x128")
        ),
        headline=("torch", "zero-infinity", "memascend"),
        says="Host memory that training adds, in GB",
    ),
    "context": Curve(
        title="Host memory that training adds, by length of a sequence (25 M, bf16, activation checkpointing)",
        along="tokens",
        unit="MB",
        systems=_SYSTEMS,
        places=_contexts(),
    ),
    "budget": Curve(
        title="Seconds of a step, by budget (125 M, bf16, 1 x 128 tokens)",
        along="times the smallest budget",
        unit="s/step",
        systems=("memascend",),
        places=tuple(
            (times, WORKLOADS["125M-1x128"], {"host_memory": f"{times}x"}) for times in (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
        ),
        seconds=True,
    ),
}


def points(bench: Bench, curve: Curve) -> list[Row]:
    """Returns a row for each cell of a curve. If a cell has an error, calls `bench.say` with the error instead."""
    rows: list[Row] = []
    for place, work, settings in curve.places:
        for system in curve.systems:
            cell = bench.cell(work, system, settings)
            if "error" in cell:
                bench.print_line(f"  {system} at {place}: {cell['error']}")
                continue
            taken = sorted(cell["seconds"]["step"])
            value = taken[len(taken) // 2] if curve.seconds else cell["added_bytes"] / 1e6
            ends = (taken[0], taken[-1]) if curve.seconds else (value, value)
            rows.append((place, system, round(value, 4), *(round(end, 4) for end in ends)))
    return rows


def draw(folder: Path, picture: Path | None, name: str, curve: Curve, rows: list[Row]) -> None:
    """Writes a CSV file to `folder`. If `picture` is given and there are rows, also draws the curve to `picture`."""
    with (folder / f"curve-{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        ends = ("least", "most") if curve.seconds else ()
        writer.writerow((curve.along, "system", curve.unit, *ends))
        writer.writerows(row[: 3 + len(ends)] for row in rows)
    if picture is not None and rows:
        # Memory is in megabytes in the CSV file, but in gigabytes in the picture.
        scale, unit = (1, "seconds of a step") if curve.seconds else (1e-3, "GB of host memory")
        series = {system: [(x, y * scale) for x, of, y, *_ in rows if of == system] for system in curve.systems}
        spread = {system: [(low, high) for _, of, _, low, high in rows if of == system] for system in curve.systems}
        along = curve.along.replace("M parameters", "millions of parameters")
        if curve.headline:
            headline(picture, curve.says, (along, "GB"), {of: series[of] for of in curve.headline if series[of]})
            return
        drawn = {name: points for name, points in series.items() if points}
        lines(picture, curve.title, (along, unit), drawn, spread if curve.seconds else {})
