"""Runs the training benchmark: `python -m benchmarks.train`. Each cell runs in a separate process."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import described
from benchmarks.peers import environment
from benchmarks.train.ablation import ablation, ablation_table
from benchmarks.train.cell.systems import SYSTEMS
from benchmarks.train.cell.workload import WORKLOADS, adapted
from benchmarks.train.code import commit
from benchmarks.train.curves import CURVES, draw, points
from benchmarks.train.judge import LOSS_TOLERANCE, judged
from benchmarks.train.launch import Launcher
from benchmarks.train.limits import limits_table, reach, reach_table, smallest_cgroup
from benchmarks.train.measure import Bench
from benchmarks.train.results import Results
from benchmarks.train.selection import FULL, HEADLINE, LIMITS, Cells
from benchmarks.train.tables import notes, pictures, workload_table
from memascend.errors import ConfigError, MemascendError
from memascend.plan.hardware import SLOW, product_flops, slowdown
from memascend.text import table

if TYPE_CHECKING:
    from collections.abc import Sequence

_SUMMARY = "Compares the time, memory and SSD bytes of training steps with in-memory torch and DeepSpeed."

_PARTS = ("cells", "ablation", "curves", "limits", "reach")
# The part that takes curves from stored results, and measures nothing.
_KEPT = "kept-curves"
_MIB = 1 << 20
_REACH_MIB = 3 << 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 0; 1 after a `MemascendError` or an `OSError`; 130 after Ctrl-C.

    If argparse rejects the arguments, it exits with 2.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=_SUMMARY)
    _add_arguments(parser)
    try:
        return _run(parser.parse_args(arguments))
    except (MemascendError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", help="draw the result into this file")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help="workloads, instead of those of the headline"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="the device that computes (cpu)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="the dtype of all models but those in fp16 (bfloat16)",
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help="systems, instead of all")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=(*_PARTS, _KEPT),
        help="cells (default); ablation: the paper's parts one by one; curves: curves of memory and time; "
        "kept-curves: the same curves from stored results; "
        "limits: the smallest memory cgroup in which three steps fit; "
        "reach: the longest context and the largest batch that fit in a memory cgroup",
    )
    parser.add_argument(
        "--curves", nargs="+", choices=CURVES, metavar="NAME", help="curves, instead of all; only these get pictures"
    )
    parser.add_argument("--full", action="store_true", help="every workload and part; takes hours, and can be resumed")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a cell (8; if steps are long, half)")
    parser.add_argument("--storage", default=".", metavar="FOLDER", help="a folder on the disk (default: here)")
    parser.add_argument(
        "--results",
        default="bench-train",
        metavar="FOLDER",
        help="the folder for a file of each cell; a cell that has a file is not repeated",
    )
    parser.add_argument("--again", action="store_true", help="repeat cells that have a file")
    parser.add_argument(
        "--limit", type=int, default=_REACH_MIB, metavar="MIB", help="limit of the cgroup of reach (3072)"
    )
    parser.add_argument("--deepspeed", metavar="PYTHON", help=environment.OPTION_HELP)


def _run(options: argparse.Namespace) -> int:
    parts = options.parts or (_PARTS if options.full else _PARTS[:1])
    _require_possible(options, parts)
    launcher = Launcher(Path(options.storage), environment.found(options.deepspeed))
    bench = Bench(launcher, Results(Path(options.results), again=options.again), options.steps, _print_line)
    kept = Bench(launcher, Results(Path(options.results), measures=False), options.steps, _ignored)
    printed = _ignored if options.json else _print
    machine = described() | {"code": bench.code, "commit": commit()}
    values: dict[str, Any] = {"machine": machine, "loss_tolerance": LOSS_TOLERANCE}
    for part in parts:
        if part == "cells":
            values["workloads"] = _cells(bench, options, printed)
        elif part == "ablation":
            values["ablation"] = _ablation(options, printed)
        elif part == "limits":
            values["limits"] = _limits(bench, options, printed)
        elif part == "reach":
            values["reach"] = _reach(bench, options, printed)
        else:
            values["curves"] = _curves(kept if part == _KEPT else bench, options, printed)
    printed(", ".join(f"{name} {value}" for name, value in machine.items()))
    if options.json:
        print(json.dumps(values, indent=1))
    return 0


def _require_possible(options: argparse.Namespace, parts: Sequence[str]) -> None:
    """Raises ConfigError if the options contradict each other, or if a cell would take hours."""
    if options.steps < 1:
        raise ConfigError("--steps must be at least 1")
    if not Path(options.storage).is_dir():
        raise ConfigError(f"--storage {options.storage} is not a folder: pass a folder that exists")
    usual = (options.device, options.dtype) == ("cpu", "bfloat16")
    if not usual and set(parts) != {"cells"}:
        raise ConfigError("--device cuda and --dtype float32 work only for the part cells: omit the others and --full")
    if usual and set(parts) != {_KEPT}:
        times = slowdown(options.dtype, product_flops(options.dtype))
        if times >= SLOW:
            raise ConfigError(
                f"this processor computes {options.dtype} {times:,.0f} times slower than float32, so a cell would take "
                "hours: pass --dtype float32, or DTYPE=float32 to make bench-readme"
            )


def _cells(bench: Bench, options: argparse.Namespace, printed: Any) -> dict[str, Any]:
    chosen: Cells = FULL if options.full else HEADLINE
    if options.workloads:
        chosen = {name: FULL.get(name, tuple(SYSTEMS)) for name in options.workloads}
    if options.systems:
        chosen = {name: tuple(options.systems) for name in chosen}
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for name, systems in chosen.items():
        work = adapted(WORKLOADS[name], options.device, options.dtype)
        measured[work.name] = judged({system: bench.cell(work, system) for system in systems})
        printed(workload_table(work, measured[work.name]))
    printed(f"losses, where compared, are within {LOSS_TOLERANCE:.0%} of in-memory torch's at every step\n{notes()}")
    printed(_measured_on(measured))
    if options.picture and not options.curves:
        pictures(Path(options.picture), measured)
    return measured


def _measured_on(measured: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns the days and commits at which the cells were measured. Stored cells may be older than this run."""
    machines = [cell["machine"] for cells in measured.values() for cell in cells.values() if "machine" in cell]
    days = sorted({f"{machine['date']} at {machine.get('commit', 'none')}" for machine in machines})
    return f"measured on {', '.join(days) or 'no day'}"


def _ablation(options: argparse.Namespace, printed: Any) -> list[dict[str, Any]]:
    work = WORKLOADS[next(iter(options.workloads or HEADLINE))]
    costs = ablation(work, Path(options.storage))
    printed(ablation_table(work, costs))
    return [asdict(cost) for cost in costs]


def _limits(bench: Bench, options: argparse.Namespace, printed: Any) -> dict[str, Any]:
    found = {}
    for name in options.workloads or LIMITS:
        systems = tuple(options.systems or LIMITS.get(name, SYSTEMS))
        found[name] = smallest_cgroup(bench, WORKLOADS[name], systems)
        printed(limits_table(WORKLOADS[name], found[name]))
    return found


def _reach(bench: Bench, options: argparse.Namespace, printed: Any) -> dict[str, Any]:
    found = {}
    systems = tuple(options.systems or ("memascend", "zero-infinity"))
    for name in options.workloads or ["125M-1x128"]:
        found[name] = reach(bench, WORKLOADS[name], systems, options.limit * _MIB)
        printed(reach_table(WORKLOADS[name], options.limit * _MIB, found[name]))
    return found


def _curves(bench: Bench, options: argparse.Namespace, printed: Any) -> dict[str, Any]:
    """Writes a CSV file of each chosen curve to the folder of the results, and passes its table to `printed`.

    With --picture FILE.png, also draws each curve to FILE-NAME.png. Returns the rows of each curve. Skips a curve that
    has no rows.
    """
    found = {}
    for name in options.curves or CURVES:
        curve = CURVES[name]
        rows = points(bench, curve)
        if not rows:
            continue
        found[name] = rows
        head = (curve.along, "system", curve.unit, "least", "most")
        printed(f"{curve.title}\n\n{table(head, [tuple(map(str, row)) for row in rows])}")
        picture = Path(options.picture) if options.picture else None
        draw(bench.results.folder, picture and picture.with_stem(f"{picture.stem}-{name}"), name, curve, rows)
    return found


def _print(text: str) -> None:
    print(f"\n{text}", flush=True)


def _ignored(text: str) -> None:
    """Prints nothing.

    Takes the place of `_print` with --json, when standard output must have only the JSON. Takes the place of `_say` for
    stored results, because they are not measured.
    """


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
