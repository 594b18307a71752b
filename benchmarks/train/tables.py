"""Formats the results of each workload as a table, and draws pictures of memory and time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.show import bars
from benchmarks.train.cell.systems import SYSTEMS
from memascend.text import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.train.cell.workload import Workload

__all__ = ["notes", "pictures", "workload_table"]

# The systems that the pictures may show; see `pictures`.
_DRAWN = ("torch", "memascend", "memascend-smallest", "zero-infinity", "zero-offload")

_COLUMNS = (
    "system",
    "s/step",
    "spread",
    "MB added",
    "MB process",
    "MB cgroup",
    "MB machine",
    "MB device",
    "computes",
    "waits",
    "disk busy",
    "SSD B/param",
    "(counted)",
    "x bound",
    "x RAM",
    "ours is x as fast",
    "ours has x of its memory",
    "loss off by",
)
_NOTES = """MB added: the process's peak after set-up, less the memory of its imports; process: its peak, with set-up;
cgroup: its peak after set-up (in cgroup version 2: with set-up), with the page cache; machine: the peak of memory used
beside caches, with the memory that a driver pins (only with a GPU); device: torch's peak there. computes: seconds of a
step in which the training thread ran; waits: seconds in which it did not run; disk busy: seconds in which the disk had
requests. SSD B/param: bytes moved, counted by the kernel; (counted): by memascend. x bound: the seconds of a step over
its lower bound, in which computation and transfers overlap without loss. x RAM: the seconds of a step over those of
in-memory torch. ours: memascend at its default against the row's system; in memascend's own rows: the row's system
against zero-infinity. loss off by: the largest relative difference from the losses of in-memory torch."""


def workload_table(work: Workload, cells: dict[str, dict[str, Any]]) -> str:
    """Returns a table of the judged cells of one workload. The errors of cells follow the table."""
    rows = [_row(system, cell) for system, cell in cells.items() if "error" not in cell]
    lines = [_title(work), ""]
    if rows:
        lines.append(table(_COLUMNS, rows))
    lines += [f"{system}: {cell['error']}" for system, cell in cells.items() if "error" in cell]
    return "\n".join(lines)


def notes() -> str:
    """Returns explanations of the columns and of the systems."""
    systems = "\n".join(f"{name}: {way.about}" for name, way in SYSTEMS.items())
    return f"{_NOTES}\n\n{systems}"


def _title(work: Workload) -> str:
    shape = [*([work.micro_batches] if work.micro_batches > 1 else []), work.batch, work.length]
    more = [
        f"{work.parameters / 1e6:.1f} M parameters in {work.dtype}",
        f"{' x '.join(map(str, shape))} tokens a step",
        *(["activation checkpointing"] if work.checkpoint else []),
        *([f"clipped at {work.clip:g}"] if work.clip is not None else []),
        *(["one step overflows"] if work.overflow else []),
    ]
    return f"{work.name}: {', '.join(more)}"


def _row(system: str, cell: dict[str, Any]) -> tuple[str, ...]:
    mean = cell["mean"]

    def shown(name: str, form: str, scale: float = 1.0) -> str:
        return format(cell[name] * scale, form) if cell.get(name) is not None else ""

    return (
        system,
        f"{cell['seconds']['step']:.3f}",
        f"{cell['spread'][0]:.3f}..{cell['spread'][1]:.3f}",
        shown("added_bytes", ".0f", 1e-6),
        shown("peak_bytes", ".0f", 1e-6),
        shown("cgroup_peak_bytes", ".0f", 1e-6),
        shown("machine_added_bytes", ".0f", 1e-6),
        shown("device_peak_bytes", ".0f", 1e-6),
        f"{mean['main_thread']:.3f}",
        f"{mean['wall'] - mean['main_thread']:.3f}",
        f"{mean['disk_busy']:.3f}",
        shown("moved_per_parameter", ".2f"),
        shown("counted_per_parameter", ".2f"),
        shown("of_bound", ".2f"),
        shown("of_memory_seconds", ".2f"),
        shown("ours_faster", ".2f"),
        shown("ours_of_memory", ".3f"),
        shown("loss_difference", ".1e") or cell.get("losses", ""),
    )


def pictures(path: Path, judged: dict[str, dict[str, dict[str, Any]]]) -> list[Path]:
    """Draws memory as FILE.png and time as FILE-seconds.png; returns the paths.

    If some workloads have results of all systems in `_DRAWN`, the pictures show these workloads and systems. Otherwise,
    the pictures show all workloads, and the systems of `_DRAWN` that have a result for each of them. If there are no
    such systems, draws nothing and returns [].
    """
    measured = {
        name: [system for system in _DRAWN if system in cells and "error" not in cells[system]]
        for name, cells in judged.items()
    }
    whole = [name for name, own in measured.items() if len(own) == len(_DRAWN)]
    # The smallest model comes first. The name of a workload, such as "125M-1x128", begins with the model's size.
    judged = {name: judged[name] for name in sorted(whole or judged, key=lambda name: float(name.split("M-")[0]))}
    systems = [system for system in _DRAWN if all(system in measured[name] for name in judged)]
    drawn: list[Path] = []
    if not systems:
        return drawn
    pick: Callable[[dict[str, Any]], float]
    for target, title, unit, pick in (
        (path, "Host memory that training adds", "GB", _added_gigabytes),
        (path.with_stem(f"{path.stem}-seconds"), "A training step", "seconds", _step_seconds),
    ):
        series = {system: {_worded(name): pick(cells[system]) for name, cells in judged.items()} for system in systems}
        bars(target, title, unit, series)
        drawn.append(target)
    return drawn


def _worded(workload: str) -> str:
    """Returns a workload's name, such as 125M-1x128-clip, in words."""
    size, batch, *more = workload.split("-")
    shape = batch.split("x")
    answer = {"clip": "clipped", "checkpointed": "activation checkpointing"}
    tokens = f"{' x '.join(shape)} tokens" if len(shape) > 1 else batch
    return ",\n".join([f"{size.removesuffix('M')} M", tokens, *(answer.get(word, word) for word in more)])


def _added_gigabytes(cell: dict[str, Any]) -> float:
    return float(cell["added_bytes"] / 1e9)


def _step_seconds(cell: dict[str, Any]) -> float:
    return float(cell["seconds"]["step"])
