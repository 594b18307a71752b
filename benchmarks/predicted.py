"""Compares the step time that the plan predicts with the measured step time, with and without clipping.

A step has one micro-batch, or several that are computed by layer or one after the other. The plan predicts a time for
each way in which the updates may run. The table compares the time of the way in which they ran.

The model has as many blocks as Llama 3 8B, and an eightieth of its parameters. A sleep in the forward and in the
backward of each block (--compute) simulates a GPU. The sleep leaves the processors free. A few tokens produce the
gradients.

A cgroup throttles this machine's drive. The plan takes the limits of the cgroup as the speed of the drive. It does not
measure the speed, because a throttle does not slow the first second of reads, so a short measurement would find too
high a speed. The plan also needs the time of computation without memascend, which `_Worker` measures. Functions of
`benchmarks.processor` measure the other times: of the update, of checksums and copies, and of the Python code that runs
for each parameter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.throttled import throttled
from benchmarks.turns import Process, serve

if TYPE_CHECKING:
    from collections.abc import Mapping

# The shape of Llama 3 8B, with all widths and the vocabulary divided by about the square root of 80. The drive is
# throttled, so that a step takes long enough. With a real drive's speed, a step would be so short that the processors
# would have less time for each parameter than in a step on a GPU.
_SHAPE = {
    "hidden_size": 448,
    "intermediate_size": 1600,
    "num_hidden_layers": 32,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "vocab_size": 14_400,
    "tie_word_embeddings": False,
}
_TOKENS = 4  # number of tokens in a micro-batch
_ONE, _LAYERS, _TURNS = "one batch", "by layer", "one after the other"
_CASES: dict[str, dict[str, Any]] = {
    f"{_ONE}, clipped": {"micro_batches": 1, "clips": True},
    f"{_LAYERS}, clipped": {"micro_batches": 4, "by_layer": True, "clips": True},
    f"{_TURNS}, clipped": {"micro_batches": 4, "clips": True},
    f"{_ONE}, not clipped": {"micro_batches": 1, "clips": False},
    f"{_LAYERS}, not clipped": {"micro_batches": 4, "by_layer": True, "clips": False},
}
# The verdict is "met" if the measured time differs from the predicted time by at most this fraction.
_NEAR = 0.1


def main() -> None:
    """Measures the chosen cases and prints a table. With `--work`, trains one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=list(_CASES))
    parser.add_argument(
        "--drive", default="0.3,0.24", metavar="READ,WRITE", help="the drive's limits in GB/s (%(default)s)"
    )
    parser.add_argument(
        "--compute", default="1.5,4.1", metavar="FORWARD,BACKWARD", help="simulated seconds in a step (%(default)s)"
    )
    parser.add_argument("--held", type=int, default=35, help="percent of the parameters kept in RAM (%(default)s)")
    parser.add_argument("--warm", type=int, default=8, help="warm-up steps, not measured (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps (%(default)s)")
    parser.add_argument("--storage", default=".", help="a folder on the disk to throttle")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="also write predicted.txt and .json there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        serve(_Worker(json.loads(options.work)).turn)
        return
    from benchmarks.machine import described

    settings = {
        "drive": [float(part) for part in options.drive.split(",")],
        "compute": [float(part) for part in options.compute.split(",")],
        "held": options.held,
    }
    cases = {}
    for name in options.cases:
        with (
            tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-predicted-") as folder,
            throttled(Path(folder), *(1e9 * speed for speed in settings["drive"])),
        ):
            process = Process("predicted", {**settings, **_CASES[name], "folder": folder})
            try:
                process.ask(steps=options.warm)
                cases[name] = process.ask(steps=options.steps)
            finally:
                process.end()
        print(f"{name}: done", flush=True)
    text = _shown(settings, cases)
    print(text)
    if options.write:
        machine = described()
        found = {"machine": machine, "settings": settings, "cases": cases}
        (options.write / "predicted.json").write_text(json.dumps(found, indent=1) + "\n")
        about = "\n".join(f"{name}: {value}" for name, value in machine.items())
        (options.write / "predicted.txt").write_text(f"{about}\n{text}\n")


def _shown(settings: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    from memascend.text import table

    rows = []
    for name, case in cases.items():
        seconds, way = statistics.median(case["seconds"]), case["way"]
        output = case["predicted"][way]
        others = ", ".join(f"{other} {took:.2f}" for other, took in case["predicted"].items() if other != way)
        verdict = "met" if abs(seconds / output - 1) <= _NEAR else "MISSED"
        spread = f"{min(case['seconds']):.2f}..{max(case['seconds']):.2f}"
        of = f"{seconds / output:.3f} ({verdict})"
        rows.append((name, way, f"{output:.2f}", f"{seconds:.2f}", spread, of, others))
    columns = (
        "a step", "its updates", "predicted s", "measured s", "spread", f"of predicted (within {_NEAR:.0%})",
        "predicted otherwise",
    )  # fmt: skip
    first = next(iter(cases.values()))
    about = (
        f"{first['parameters'] / 1e6:.0f} M parameters, {first['held']:.0%} of them in RAM, a device that computes for "
        f"{settings['compute'][0]} and {settings['compute'][1]} s, a drive of {settings['drive'][0]} and "
        f"{settings['drive'][1]} GB/s"
    )
    return f"{about}\n\n{table(columns, rows)}"


# --- a case, in its own process --------------------------------------------------------------


class _Worker:
    """Trains one case. Makes steps when the main process asks for steps."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch
        import transformers

        import memascend
        from benchmarks.train.cell.systems.ours import held_budget

        torch.set_num_threads(1)
        self.by_layer, self.clips = work.get("by_layer", False), work["clips"]
        self.count: int = work["micro_batches"]
        config = transformers.LlamaConfig(**_SHAPE, use_cache=False)
        self.model = transformers.LlamaForCausalLM(config).bfloat16().train()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        blocks = self.model.model.layers
        for block in blocks:
            block.mlp.act_fn = _paused(
                block.mlp.act_fn, *(seconds / len(blocks) / self.count for seconds in work["compute"])
            )
        self.batches = [torch.randint(config.vocab_size, (1, _TOKENS)) for _ in range(self.count)]
        computed = self._computed()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        given = {
            "storage": f"{work['folder']}/run.store",
            "device": "cpu",
            "max_grad_norm": 1.0 if self.clips else None,
        }
        budget = held_budget(self.model, optimizer, given, work["held"])
        self._predict(work, computed, *memascend.offload(self.model, optimizer, host_memory=budget, **given))

    def _loss(self, batch: Any) -> Any:
        # If the case clips, this factor puts the norm of the gradients far above the limit.
        return self.model(input_ids=batch, labels=batch).loss * (1e3 if self.clips else 1.0)

    def _computed(self) -> tuple[float, float]:
        """Returns the seconds of a micro-batch's forward and of its backward, without memascend.

        The seconds of the backward include the addition of gradients to `p.grad`.
        """
        found = []
        for _ in range(3):
            forward = backward = 0.0
            for batch in self.batches:
                began = time.perf_counter()
                loss = self._loss(batch)
                between = time.perf_counter()
                loss.backward()
                forward, backward = forward + between - began, backward + time.perf_counter() - between
            found.append((forward / self.count, backward / self.count))
            self.model.zero_grad()
        return statistics.median(one for one, _ in found), statistics.median(other for _, other in found)

    def _predict(self, reply: Mapping[str, Any], computed: tuple[float, float], model: Any, optimizer: Any) -> None:
        from benchmarks.processor import byte_seconds, parameter_seconds
        from benchmarks.processor import update_seconds as measured_update
        from memascend.plan.cost import Drive, Work, assumed_host, seconds, update_seconds, ways

        self.model, self.optimizer = model, optimizer
        read, write = (1e9 * speed for speed in reply["drive"])
        # The throttle limits reads and writes separately. So a mix of equally many reads and writes moves bytes at
        # twice the lower limit.
        drive = Drive(read=read, write=write, mixed=2 * min(read, write))
        update, (check, copied), (bind, hand) = (
            measured_update()["fp32"],
            byte_seconds(),
            parameter_seconds(Path(reply["folder"])),
        )
        plan, count = optimizer.plan, len(list(model.parameters()))
        host = replace(assumed_host(None), update=update_seconds(plan, update), check=check, ram_tier_threads=2)
        # The sleep that simulates a GPU blocks the thread. So Python code adds its time to the time of the sleep. With
        # a real GPU, Python code would run while the GPU computes.
        forward = computed[0] + bind * count
        backward = computed[1] + hand * count + copied * sum(unit.nbytes for unit in plan.units)
        work = Work(forward=forward, backward=backward, backwards=self.count, by_layer=self.by_layer)
        found = ways(plan, work, drive, host)
        self.predicted = {way: seconds(phases) for way, phases in found.items()}
        self.phases = {
            way: [(one.name, one.seconds, dict(one.parts)) for one in phases] for way, phases in found.items()
        }

    def turn(self, steps: int) -> dict[str, Any]:
        """Makes `steps` steps. Returns their seconds, the way in which the updates ran, and the plan's predictions."""
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            taken.append(time.perf_counter() - began)
        report = self.optimizer.report()
        return {
            "seconds": taken,
            "way": self._way(report),
            "predicted": self.predicted,
            "phases": self.phases,
            "held": self.optimizer.plan.ram_tier_part,
            "parameters": self.parameters,
        }

    def _way(self, report: Any) -> str:
        if len(self.predicted) == 1:
            return next(iter(self.predicted))
        return f"next {report.deferred_to}" if report.deferred else "early"

    def _step(self) -> None:
        if self.by_layer:
            self.optimizer.accumulate(self._loss, self.batches, by_layer=True)
        else:
            for batch in self.batches:
                self._loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _paused(function: Any, forward: float, backward: float) -> Any:
    """Wraps `function` in a module that sleeps.

    It sleeps `forward` seconds in its forward and `backward` seconds in its backward.
    """
    import torch

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, values: Any) -> Any:
            time.sleep(forward)
            return values.view_as(values)

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            time.sleep(backward)
            return gradient

    class Paused(torch.nn.Module):
        def forward(self, values: Any) -> Any:
            return Pause.apply(function(values))

    return Paused()


if __name__ == "__main__":
    main()
