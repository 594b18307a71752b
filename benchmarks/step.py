"""Measures the seconds, the memory and the SSD bytes of a training step with memascend.

The case "in RAM" makes the same step without memascend. If it is measured, the other cases are compared with it and
with a lower bound. Each case trains in a separate process. The processes take turns, so that a change of the machine's
speed affects all cases.

The bound is the time of a step whose disk transfers overlap its computation wherever their order allows. It uses the
computation time that was measured in RAM, the bytes of the plan, and the bandwidth that memascend reaches on the same
disk in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.turns import Process, serve

_MIB = 1 << 20
_SHAPES = ("4M", "25M", "125M", "500M")
_CASES = {
    "in RAM": None,
    "fused": {"gradients": "fused"},
    "auto": {},
    "clipped": {"max_grad_norm": 1.0},
    "smallest": {"gradients": "fused", "host_memory": "smallest"},
}
# Cases with budgets from the default budget to a budget that keeps all records in RAM. The number in `host_memory` is
# the `percent` of `held_budget`.
_HELD = {
    **{f"held {part}%": {"gradients": "fused", "host_memory": part} for part in (0, 20, 40, 50, 60, 80, 100)},
    "held 100%, none": {"gradients": "fused", "host_memory": 100, "durability": "none"},
}
# Cases with moments in fewer bits. They are compared with the case "fused".
_STATES = {f"state {form}": {"gradients": "fused", "state": form} for form in ("bf16", "8bit")}
_ALL = _CASES | _HELD | _STATES
# The three cases with which other cases are compared. `_RAM` trains in memory with torch's fused AdamW on fp32 master
# weights. `_NONE_HELD` is memascend without records kept in RAM. `_FP32` is memascend with fp32 moments.
_RAM, _NONE_HELD, _FP32 = "in RAM", "held 0%", "fused"
_WARM_STEPS = 2
# The bytes of a store for each bf16 parameter whose moments are fp32.
_SLOTS_BYTES = 26


def main() -> None:
    """Measures every workload; prints a table for each, or JSON. With --work, runs as the process of one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=_SHAPES, default="125M")
    parser.add_argument("--tokens", nargs="+", default=["1x128", "4x512"], metavar="BATCHxLENGTH")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=_ALL,
        help='default: all but "held" and "state"; above 1000 tokens: "in RAM", "fused"',
    )
    parser.add_argument("--held", action="store_true", help='all "held" cases, and the case "in RAM"')
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each process")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn; the first of several is not counted")
    parser.add_argument("--checkpoint", action="store_true", help="recompute blocks in the backward")
    parser.add_argument("--storage", default=".", help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print values instead of tables")
    parser.add_argument("--write", metavar="FOLDER", help="also write step.txt and step.json there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        serve(_Worker(json.loads(options.work)).answer)
        return
    from benchmarks.machine import described

    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-step-") as folder:
        results = [_Workload(options, Path(folder), tokens).run() for tokens in options.tokens]
    values = {"machine": described(), "parameters": options.parameters, "workloads": results}
    text = "\n\n".join(_shown(result) for result in results)
    print(json.dumps(values, indent=1) if options.json else text)
    if options.write:
        Path(options.write).mkdir(parents=True, exist_ok=True)
        Path(options.write, "step.json").write_text(json.dumps(values, indent=1) + "\n")
        about = "\n".join(f"{name}: {value}" for name, value in values["machine"].items())
        Path(options.write, "step.txt").write_text(f"{about}\n\n{text}\n")


# --- one workload --------------------------------------------------------------------------


@dataclass
class _Case:
    """The process of a case, its answer at the start, and its answer after each turn."""

    process: Process
    started: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)


class _Workload:
    """Measures the chosen cases. A step of each case has the same batch, of the shape `tokens` (BATCHxLENGTH)."""

    def __init__(self, options: argparse.Namespace, folder: Path, tokens: str) -> None:
        self.options, self.folder, self.tokens = options, folder, tokens
        batch, length = (int(part) for part in tokens.split("x"))
        self.batch, self.length = batch, length
        long = batch * length > 1000
        usual = list(_CASES)[:2] if long else list(_CASES)
        self.cases = options.cases or ([_RAM, *_HELD] if options.held else usual)
        self.steps = min(options.steps, 2) if long else options.steps

    def run(self) -> dict[str, Any]:
        working: dict[str, _Case] = {}
        speeds: dict[str, list[float]] = {"read": [], "mixed": []}
        try:
            for name in self.cases:
                working[name] = self._start(name)
                self.store_bytes = max(512, working[name].started["parameters"] * _SLOTS_BYTES // _MIB) * _MIB
            for _ in range(self.options.rounds):
                for pattern, found in speeds.items():
                    found.append(self._bandwidth(pattern))
                for case in working.values():
                    case.turns.append(case.process.ask(steps=self.steps))
            ended = {name: case.process.ask(end=True) for name, case in working.items()}
        finally:
            for case in working.values():
                case.process.end()
        bandwidth = {pattern: statistics.median(found) for pattern, found in speeds.items()}
        cases = {name: _summary(case, ended[name]) for name, case in working.items()}
        for name, case in cases.items():
            _compare(name, case, cases.get(_RAM), bandwidth)
            like = _FP32 if name in _STATES else _NONE_HELD if name in _HELD else ""
            if like in cases:
                case["of_like"] = case["seconds"]["step"] / cases[like]["seconds"]["step"]
        return {
            "tokens": self.tokens,
            "checkpoint": self.options.checkpoint,
            "gb_per_second": bandwidth,
            "gb_per_second_all": speeds,
            "cases": cases,
        }

    def _start(self, name: str) -> _Case:
        work = {
            "case": name,
            "parameters": self.options.parameters,
            "batch": self.batch,
            "length": self.length,
            "checkpoint": self.options.checkpoint,
            "storage": str(self.folder / f"{name} {self.tokens}.store"),
        }
        process = Process("step", work)
        return _Case(process, process.ask(begin=True))

    def _bandwidth(self, pattern: Any) -> float:
        """Returns the GB/s at which memascend's I/O transfers `store_bytes` bytes. `pattern` is "read" or "mixed".

        The file has `store_bytes` bytes. The number of buffers is the same as for updates with the default budget.
        """
        from memascend import nvme
        from memascend.cli.storage import blocks, transfer

        path, nbytes = self.folder / "bandwidth", self.store_bytes
        with nvme.open(path, size=nbytes, queue_depth=8) as volume, blocks(_MIB, 12) as tensors:
            if not getattr(self, "_written", False):
                transfer(volume, tensors, "write", nbytes)
                volume.flush()
                self._written = True
            return transfer(volume, tensors, pattern, nbytes).gb_per_second


def _summary(case: _Case, ended: dict[str, Any]) -> dict[str, Any]:
    """Returns the median seconds of a case over all turns, together with its answers at the start and at the end.

    If turns have several steps, the first step of each turn is not counted, because the disk had time to finish its
    writes before this step.
    """
    parts: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "update": []}
    for turn in case.turns:
        for part, taken in parts.items():
            seconds = turn["seconds"][part]
            taken.extend(seconds[1:] if len(seconds) > 1 else seconds)
    return {
        "seconds": {part: statistics.median(taken) for part, taken in parts.items()},
        "spread": [min(parts["step"]), max(parts["step"])],
        "steps": len(parts["step"]),
        **case.started,
        **ended,
    }


def _compare(name: str, case: dict[str, Any], ram: dict[str, Any] | None, bandwidth: dict[str, float]) -> None:
    """Adds to `case` its bound, its ratio to the bound, and its ratios to `ram`, the case in RAM.

    Adds nothing if `ram` is None, or if `case` is the case in RAM.
    """
    if ram is None or name == _RAM:
        return
    from benchmarks.train.judge import bound

    plan = case["plan"]
    case["bound"] = bound(ram["seconds"], plan["read"], plan["written"], bandwidth)
    case["of_bound"] = case["seconds"]["step"] / case["bound"]["step"]
    case["of_ram"] = case["seconds"]["step"] / ram["seconds"]["step"]
    case["memory_of_ram"] = case["added_bytes"] / ram["added_bytes"]


def _shown(result: dict[str, Any]) -> str:
    from memascend.text import table

    rows = []
    for name, case in result["cases"].items():
        seconds, bound = case["seconds"], case.get("bound")
        rows.append(
            (
                name,
                f"{seconds['step']:.3f}",
                f"{case['spread'][0]:.3f}..{case['spread'][1]:.3f}",
                f"{seconds['forward']:.3f} + {seconds['backward']:.3f} + {seconds['update']:.3f}",
                f"{bound['step']:.3f}" if bound else "",
                f"{case['of_bound']:.2f}" if bound else "",
                f"{case['of_ram']:.2f}" if bound else "",
                f"{case['of_like']:.2f}" if "of_like" in case else "",
                f"{case['added_bytes'] / 1e6:.0f}",
                f"{case['peak_bytes'] / 1e6:.0f}",
                f"{case['moved_per_parameter']:.2f}",
                _planned(case),
            )
        )
    parameters = next(iter(result["cases"].values()))["parameters"]
    head = (
        f"{parameters:,} parameters in bf16, {result['tokens']} tokens a step"
        f"{', blocks recomputed' if result['checkpoint'] else ''}; "
        + ", ".join(f"{pattern} {speed:.2f} GB/s" for pattern, speed in result["gb_per_second"].items())
    )
    columns: tuple[str, ...] = ("case", "s/step", "spread", "forward + backward + step()", "bound", "x bound")
    columns += ("x torch's AdamW in RAM", "x none held, or fp32")
    return f"{head}\n\n{table((*columns, 'MB added', 'MB peak', 'SSD B/param', 'planned'), rows)}"


def _planned(case: dict[str, Any]) -> str:
    """Returns the bytes that a step moves for each parameter according to the plan; "" if the case has no plan."""
    plan = case.get("plan")
    if plan is None:
        return ""
    moved = sum(plan["read"].values()) + sum(plan["written"].values())
    return f"{moved / case['parameters']:.2f}"


# --- a case, in its own process --------------------------------------------------------------


class _Worker:
    """Trains one case. `serve` calls `answer` for each question of the main process."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.work = work
        self.case = work["case"]
        self.steps = 0

    def answer(self, steps: int = 0, *, begin: bool = False, end: bool = False) -> dict[str, Any]:
        """Begins the case, makes `steps` steps, or ends the case; returns measurements."""
        if begin:
            return self._begin()
        return self._end() if end else self._turn(steps)

    def _begin(self) -> dict[str, Any]:
        import torch
        import transformers

        import memascend
        from benchmarks import counters
        from benchmarks.train.cell.systems.in_ram import InRam
        from benchmarks.train.cell.workload import WORKLOADS, made
        from memascend.cli import process

        transformers.Qwen2ForCausalLM  # noqa: B018 - loads the modules that a user needs, before the baseline is read
        memascend.offload  # noqa: B018
        baseline = process.resident()
        plain = WORKLOADS[f"{self.work['parameters']}-1x128"]
        work = replace(plain, batch=self.work["batch"], length=self.work["length"], checkpoint=self.work["checkpoint"])
        model = made(work)
        self.parameters = work.parameters
        self.tokens = torch.randint(0, work.vocabulary, (work.batch, work.length))
        answer: dict[str, Any] = {"parameters": self.parameters, "baseline_bytes": baseline}
        options = _ALL[self.case]
        if options is None:
            self.optimizer: Any = InRam(model)
        else:
            began = time.perf_counter()
            self.optimizer = self._offloaded(model, dict(options))
            answer["offload_seconds"] = time.perf_counter() - began
            plan = self.optimizer.plan
            answer["plan"] = {
                "host_peak": plan.host_peak,
                "host": plan.host,
                "budget": plan.budget,
                "comfortable": plan.comfortable,
                "read": plan.read_bytes,
                "written": plan.written_bytes,
            }
        self.model = model
        # The peak of training must not include the peak of making and offloading the model.
        process.restart_peak()
        self.baseline = baseline
        self._turn(_WARM_STEPS)
        self.before, self.steps = counters.counts(), 0
        return answer

    def _offloaded(self, model: Any, options: dict[str, Any]) -> Any:
        import torch

        import memascend
        from benchmarks.train.cell.systems.ours import held_budget, smallest_budget

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        options |= {"storage": self.work["storage"], "device": "cpu"}
        part = options.get("host_memory")
        if isinstance(part, int):
            options["host_memory"] = held_budget(model, optimizer, options, part)
        if part == "smallest":
            options["host_memory"] = smallest_budget(model, optimizer, options)
        return memascend.offload(model, optimizer, **options)[1]

    def _turn(self, steps: int) -> dict[str, Any]:
        parts: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "update": []}
        for _ in range(steps):
            at = [time.perf_counter()]
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
            at.append(time.perf_counter())
            loss.backward()
            at.append(time.perf_counter())
            self._update()
            at.append(time.perf_counter())
            del loss
            for name, first, last in (("step", 0, 3), ("forward", 0, 1), ("backward", 1, 2), ("update", 2, 3)):
                parts[name].append(at[last] - at[first])
        self.steps += steps
        return {"seconds": parts}

    def _update(self) -> None:
        if self.case == _RAM:
            self.optimizer.update()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _end(self) -> dict[str, Any]:
        from benchmarks import counters
        from memascend.cli import process

        peak = process.resident_peak()
        moved = counters.counts().since(self.before)
        read, written = moved["read"], moved["written"]
        answer = {
            "peak_bytes": peak,
            "added_bytes": peak - self.baseline,
            "read_per_parameter": read / self.steps / self.parameters,
            "written_per_parameter": written / self.steps / self.parameters,
            "moved_per_parameter": (read + written) / self.steps / self.parameters,
        }
        if self.case != _RAM:
            answer["report"] = self.optimizer.report().to_dict()
            self.optimizer.close()
        return answer


if __name__ == "__main__":
    main()
