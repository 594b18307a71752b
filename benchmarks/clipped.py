"""Measures steps that are clipped by the norm of all gradients: never, always, every other one; beside the unclipped.

"auto" begins updates before the norm is known, "ssd" waits for it. Each case trains in a process of its own; the
processes take turns. The loss of a step that is to be clipped is large, of any other small, and the limit is between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.turns import at_work, serve

# Which steps are clipped, by their number; None: no limit is given.
_HABITS: dict[str, Any] = {
    "not asked for": None,
    "never": lambda _: False,
    "always": lambda _: True,
    "every other": lambda step: step % 2 == 1,
}
_CASES = {
    "unclipped": ("auto", "not asked for"),
    **{f"{gradients}, {habit}": (gradients, habit) for habit in list(_HABITS)[1:] for gradients in ("auto", "ssd")},
}
# The case, what it is divided by, and the most that the ratio is to be.
_TARGETS = (
    ("auto, never", "unclipped", 1.15),
    ("auto, always", "ssd, always", 1.02),
    ("auto, every other", "ssd, every other", 1.0),
)
# The loss is multiplied by one of them, for gradients far below the limit of the norm, or far above.
_SMALL, _LARGE = 1e-3, 1e3
# "auto" has seen enough of the loop after these.
_WARM_STEPS = 6


def main() -> None:
    """Measure all cases, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=("4M", "25M", "125M", "500M"), default="125M")
    parser.add_argument("--length", type=int, default=128, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each process")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--storage", default=".", help="a folder on the disk to measure")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="also write clipped.txt and clipped.json there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        serve(_Worker(json.loads(options.work)).turn)
        return
    from benchmarks.machine import described

    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-clipped-") as folder:
        found = {"machine": described(), "parameters": options.parameters, "cases": _measured(options, folder)}
    text = _shown(found["cases"])
    print(text)
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "clipped.json").write_text(json.dumps(found, indent=1) + "\n")
        about = "\n".join(f"{name}: {value}" for name, value in found["machine"].items())
        head = f"{about}\n{options.parameters} parameters, 1 x {options.length} tokens"
        (options.write / "clipped.txt").write_text(f"{head}\n\n{text}\n")


def _measured(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in _CASES}
    common = {"parameters": options.parameters, "length": options.length}
    works = {
        name: {**common, "gradients": gradients, "habit": habit, "storage": f"{folder}/{name}.store"}
        for name, (gradients, habit) in _CASES.items()
    }
    with at_work("clipped", works, steps=1) as processes:
        for _ in range(options.rounds):
            for name, process in processes.items():
                turns[name].append(process.ask(steps=options.steps))
    found = {}
    for name, own in turns.items():
        taken = [one for turn in own for one in turn["seconds"]]
        found[name] = {
            # Of every other step the mean decides, since there are two kinds.
            "seconds": statistics.fmean(taken) if "other" in name else statistics.median(taken),
            "spread": [min(taken), max(taken)],
            "moved": statistics.median(turn["moved"] for turn in own),
            "peak": max(turn["peak"] for turn in own),
            "early": own[-1]["early"],
            "anew": own[-1]["anew"],
        }
    return found


def _shown(cases: dict[str, Any]) -> str:
    from memascend.text import table

    plain = cases["unclipped"]["seconds"]
    rows = [
        (
            name,
            f"{case['seconds']:.3f}",
            f"{case['spread'][0]:.3f}..{case['spread'][1]:.3f}",
            f"{case['seconds'] / plain:.3f}",
            f"{case['moved']:.1f}",
            f"{case['peak'] / 1e6:.0f}",
            str(case["early"]),
            str(case["anew"]),
        )
        for name, case in cases.items()
    ]
    columns = ("gradients, clipped", "s/step", "spread", "of unclipped", "B/param", "MB", "steps begun early", "anew")
    lines = [table(columns, rows), ""]
    for name, beside, most in _TARGETS:
        ratio = cases[name]["seconds"] / cases[beside]["seconds"]
        met = "met" if ratio <= most else "MISSED"
        lines.append(f"{name}, of {beside}: {ratio:.3f} (at most {most}: {met})")
    return "\n".join(lines)


class _Worker:
    """A case, in its own process."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch

        import memascend
        from benchmarks.train.cell.workload import WORKLOADS, made

        workload = WORKLOADS[f"{work['parameters']}-1x128"]
        self.parameters = workload.parameters
        self.is_clipped = _HABITS[work["habit"]]
        model = made(workload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        limit = {} if self.is_clipped is None else {"max_grad_norm": 1.0}
        self.model, self.optimizer = memascend.offload(
            model, optimizer, storage=work["storage"], device="cpu", gradients=work["gradients"], **limit
        )
        self.tokens = torch.randint(0, workload.vocabulary, (1, work["length"]))
        self.done = 0
        for _ in range(_WARM_STEPS):
            self._step()

    def turn(self, steps: int) -> dict[str, Any]:
        """Take so many steps, after one that is not counted: the disk may still be at others'."""
        from benchmarks import counters
        from memascend.cli import process

        self._step()
        if steps % 2 == 1 and self.is_clipped is not None:
            # As many of both kinds.
            steps += 1
        process.restart_peak()
        before, seconds = counters.counts(), []
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - began)
        moved = counters.counts().since(before)
        report = self.optimizer.report()
        return {
            "seconds": seconds,
            "moved": (moved["read"] + moved["written"]) / steps / self.parameters,
            "peak": process.resident_peak(),
            "early": report.early,
            "anew": report.anew,
        }

    def _step(self) -> None:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        clipped = self.is_clipped is not None and self.is_clipped(self.done)
        (loss * (_LARGE if clipped else _SMALL)).backward()
        self.optimizer.step()
        if self.is_clipped is not None and (self.optimizer.grad_norm > 1.0) != clipped:
            raise SystemExit(
                f"a norm of {self.optimizer.grad_norm} in a step that is {'' if clipped else 'not '}clipped"
            )
        self.optimizer.zero_grad()
        self.done += 1


if __name__ == "__main__":
    main()
