"""`memascend bench train`: whole training steps beside what people use today, each cell in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.cli.bench import deepspeed
from memascend.cli.bench.machine import described
from memascend.cli.bench.train.judge import LOSS_TOLERANCE, judged
from memascend.cli.bench.train.launch import Launcher
from memascend.cli.bench.train.plan import FULL, HEADLINE, Cells
from memascend.cli.bench.train.results import Results
from memascend.cli.bench.train.shown import notes, pictures, workload_table
from memascend.cli.bench.train.speeds import disk_speeds
from memascend.cli.bench.train.systems import SYSTEMS
from memascend.cli.bench.train.tuning import tuned
from memascend.cli.bench.train.workload import WORKLOADS, Workload
from memascend.errors import ConfigError

if TYPE_CHECKING:
    import argparse

SUMMARY = "training steps: time, memory and SSD bytes beside in-memory torch and DeepSpeed"

# Fewer where a step takes seconds.
_LONG_TOKENS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help="instead of the headline's")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help="instead of all")
    parser.add_argument("--full", action="store_true", help="every workload; takes hours, and goes on where it was")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a cell (default 8; long ones half)")
    parser.add_argument("--storage", default=".", metavar="FOLDER", help="on the disk to measure (default: here)")
    parser.add_argument(
        "--results", default="bench-train", metavar="FOLDER", help="a file for each cell; what is there is not repeated"
    )
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--deepspeed", metavar="PYTHON", help=deepspeed.OPTION_HELP)
    parser.add_argument("--trace", metavar="FILE", help="only trace a few steps of the first workload, for Perfetto")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    if options.steps < 1:
        raise ConfigError("--steps is at least 1")
    launcher = Launcher(Path(options.storage), deepspeed.found(options.deepspeed))
    cells = _cells(options)
    if options.trace:
        return _trace(launcher, WORKLOADS[next(iter(cells))], Path(options.trace))
    results = Results(Path(options.results), again=options.again)
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for name, systems in cells.items():
        work = WORKLOADS[name]
        answers = {}
        for system in systems:
            _say(f"{name}: {system} ...")
            answers[system] = _cell(launcher, results, work, system, options.steps)
        measured[name] = judged(answers)
        if not options.json:
            print(f"\n{workload_table(work, measured[name])}", flush=True)
    if options.json:
        print(json.dumps({"machine": described(), "loss_tolerance": LOSS_TOLERANCE, "workloads": measured}, indent=1))
    else:
        print(f"\nlosses are at most {LOSS_TOLERANCE:.0%} from in-memory torch's, at every step\n{notes()}")
    if options.picture:
        pictures(Path(options.picture), measured)
    return 0


def _cells(options: argparse.Namespace) -> Cells:
    chosen: Cells = FULL if options.full else HEADLINE
    if options.workloads:
        chosen = {name: FULL.get(name) or tuple(SYSTEMS) for name in options.workloads}
    if options.systems:
        chosen = {name: tuple(options.systems) for name in chosen}
    return chosen


def _cell(launcher: Launcher, results: Results, work: Workload, system: str, steps: int) -> dict[str, Any]:
    """One cell, measured or read."""
    settings = tuned(launcher, results, work, system)
    if "error" in settings:
        return settings
    if work.batch * work.length > _LONG_TOKENS:
        steps = max(1, steps // 2)

    def measure() -> dict[str, Any]:
        speeds = disk_speeds(launcher.storage) if SYSTEMS[system].module == "ours" else None
        answer = launcher.run(work, system, steps=steps, settings=settings)
        if speeds is not None and "error" not in answer:
            answer["speeds"] = speeds
        return {**answer, "machine": described()}

    asked = {"workload": work.to_dict(), "system": system, "settings": settings, "steps": steps, "on": _here()}
    return results.get(f"{work.name}--{system}", asked, measure)


def _here() -> dict[str, Any]:
    """Where a result is valid: elsewhere it is measured anew."""
    machine = described()
    return {name: machine[name] for name in ("processor", "cores", "memory_bytes", "kernel")}


def _trace(launcher: Launcher, work: Workload, path: Path) -> int:
    answer = launcher.run(work, "memascend", steps=3, warm=2, settings={"trace": str(path.absolute())})
    if "error" in answer:
        raise ConfigError(answer["error"])
    print(f"{path}: five steps of {work.name}; open it in ui.perfetto.dev")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
