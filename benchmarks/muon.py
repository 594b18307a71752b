"""Compares training steps of two optimizers: Muon with AdamW, and AdamW alone; offloaded and in memory.

Muon updates the model's matrices, and AdamW updates the other parameters. Each case trains in a separate process, and
the processes take turns. The kernel counts the bytes that a process moves. The benchmark computes the bytes of Muon's
parameters from the difference of the two offloaded cases. The other parameters move the same number of bytes in both
cases.

In the case "one matrix", the budget has memory for only one matrix and its state, instead of two. In this case,
memascend cannot read or write one matrix while it updates another matrix.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.turns import at_work, serve

_CASES = {
    "AdamW": {"muon": False, "memory": False},
    "Muon + AdamW": {"muon": True, "memory": False},
    "Muon + AdamW, one matrix": {"muon": True, "memory": False, "one": True},
    "torch's AdamW in memory": {"muon": False, "memory": True},
    "torch's Muon + AdamW in memory": {"muon": True, "memory": True},
}
# The target: a step may move at most this number of bytes for each of Muon's parameters.
_MOST_BYTES = 18.0
_WARM_STEPS = 3


def main() -> None:
    """Measures all cases and prints a table. With `--work`, trains one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=("4M", "25M", "125M", "500M"), default="125M")
    parser.add_argument("--length", type=int, default=128, help="tokens in a step")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each process")
    parser.add_argument("--steps", type=int, default=3, help="number of steps in a turn")
    parser.add_argument("--storage", default=".", help="a folder on the disk to measure")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="also write muon.txt and muon.json there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        serve(_Worker(json.loads(options.work)).turn)
        return
    from benchmarks.machine import described

    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-muon-") as folder:
        found = {"machine": described(), "parameters": options.parameters, "cases": _measured(options, folder)}
    text = _shown(found["cases"])
    print(text)
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "muon.json").write_text(json.dumps(found, indent=1) + "\n")
        about = "\n".join(f"{name}: {value}" for name, value in found["machine"].items())
        head = f"{about}\n{options.parameters} parameters, 1 x {options.length} tokens"
        (options.write / "muon.txt").write_text(f"{head}\n\n{text}\n")


def _measured(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in _CASES}
    common = {"parameters": options.parameters, "length": options.length}
    works = {name: {**case, **common, "storage": f"{folder}/{name}.store"} for name, case in _CASES.items()}
    with at_work("muon", works, steps=1) as processes:
        for number in range(options.rounds):
            for name, process in processes.items():
                turns[name].append(process.ask(steps=options.steps))
                seconds = " ".join(f"{one:.2f}" for one in turns[name][-1]["seconds"])
                print(f"turn {number + 1} of {options.rounds}, {name}: {seconds} s", file=sys.stderr, flush=True)
    return {
        name: {
            **own[-1],
            "seconds": statistics.median(one for turn in own for one in turn["seconds"]),
            "moved": statistics.median(turn["moved"] for turn in own),
            "peak": max(turn["peak"] for turn in own),
            "waited": statistics.median(turn["waited"] for turn in own),
        }
        for name, own in turns.items()
    }


def _shown(cases: dict[str, Any]) -> str:
    from memascend.text import table

    rows = [
        (
            name,
            f"{case['seconds']:.3f}",
            f"{case['seconds'] / cases['AdamW']['seconds']:.2f}",
            f"{case['moved']:.1f}",
            f"{case['peak'] / 1e6:.0f}",
            f"{case['waited']:.2f}" if case["waited"] else "",
        )
        for name, case in cases.items()
    ]
    plain, muon, one = (cases[name] for name in ("AdamW", "Muon + AdamW", "Muon + AdamW, one matrix"))
    part = muon["by_muon"]
    own = (muon["moved"] - (1 - part) * plain["moved"]) / part
    memory = cases["torch's Muon + AdamW in memory"]["seconds"] - cases["torch's AdamW in memory"]["seconds"]
    more = muon["seconds"] - plain["seconds"]
    met = "met" if own <= _MOST_BYTES else "MISSED"
    head = ("optimizer", "s/step", "of AdamW's", "B/param", "MB", "waits for I/O, s")
    return f"""{table(head, rows)}

Muon has {part:.0%} of the parameters; each moves {own:.1f} bytes a step (at most {_MOST_BYTES:.0f}: {met})
Muon takes {more:.2f} s more than AdamW offloaded, {memory:.2f} s in memory
with memory for one matrix a step takes {one["seconds"] / muon["seconds"]:.2f} of its time with memory for two"""


class _Worker:
    """Trains one case. Makes steps when the main process asks for steps."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch

        import memascend
        from benchmarks.train.cell.workload import WORKLOADS, made
        from memascend.plan.options import Options
        from memascend.session.decide import planned
        from memascend.session.optimizer import session_of

        workload = WORKLOADS[f"{work['parameters']}-1x128"]
        self.parameters = workload.parameters
        self.model = made(workload)
        self.tokens = torch.randint(0, workload.vocabulary, (1, work["length"]))
        self.masters: list[Any] = []
        named = list(self.model.named_parameters())
        if work["memory"]:
            named = [(name, torch.nn.Parameter(parameter.detach().float())) for name, parameter in named]
            self.masters = [master for _, master in named]
        matrices = [one for name, one in named if one.ndim == 2 and "embed" not in name and "head" not in name]
        if not work["muon"]:
            matrices = []
        chosen = {id(one) for one in matrices}
        rest = [one for _, one in named if id(one) not in chosen]
        self.by_muon = sum(one.numel() for one in matrices) / sum(one.numel() for _, one in named)
        members: list[Any] = [torch.optim.AdamW(rest, lr=1e-4, fused=True)]
        if matrices:
            members.insert(0, torch.optim.Muon(matrices, lr=1e-3))
        self.members = members
        self.engine: Any = None
        if not work["memory"]:
            how: dict[str, Any] = {"storage": work["storage"], "device": "cpu", "gradients": "fused"}
            if work.get("one"):
                plan = planned(self.model, members, Options(**how)).plan
                how["host_memory"] = plan.comfortable - plan.whole_next_bytes
            self.model, optimizer = memascend.offload(self.model, members, **how)
            self.engine = session_of(optimizer).run.resources.engine
            assert bool(optimizer.plan.whole_next_bytes) == (bool(matrices) and not work.get("one"))
            self.members = [optimizer]
        for _ in range(_WARM_STEPS):
            self._step()

    def turn(self, steps: int) -> dict[str, Any]:
        """Measures `steps` steps; returns their seconds, bytes, memory peak and waits for I/O.

        One unmeasured step comes first, because the disk may still write for another case.
        """
        from benchmarks import counters
        from memascend.cli import process

        self._step()
        process.restart_peak()
        before, seconds, waited = counters.counts(), [], self._waited()
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - began)
        moved = counters.counts().since(before)
        return {
            "seconds": seconds,
            "moved": (moved["read"] + moved["written"]) / steps / self.parameters,
            "peak": process.resident_peak(),
            "waited": (self._waited() - waited) / steps,
            "by_muon": self.by_muon,
        }

    def _waited(self) -> float:
        """Returns the seconds that the engine's thread has spent on reads and on waits for writes; 0 in memory.

        The seconds of reads include the verification of checksums.
        """
        seconds = {} if self.engine is None else self.engine.counters()["seconds"]
        return float(seconds.get("reading", 0) + seconds.get("writing", 0))

    def _step(self) -> None:
        import torch

        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        weights = list(self.model.parameters()) if self.masters else []
        for parameter, master in zip(weights, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        for member in self.members:
            member.step()
            member.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(weights, self.masters, strict=True):
                parameter.copy_(master)


if __name__ == "__main__":
    main()
