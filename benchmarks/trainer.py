"""Measures what it costs to save a Trainer's position in each step.

Three Trainers train the same model in float32. Each of them has a separate process, and the processes take turns:

- "one line" uses `memascend.trainer.offload(trainer)`. It commits the Trainer's position with each step.
- "no position" does the same, but commits an empty position.
- "by hand" uses `memascend.offload()`, `optimizers=(optimizer, None)` and `Callback()`. This Trainer cannot resume.

The time of a step is the time from one `on_step_end` to the next `on_step_end`. It includes the fetch of the batch.
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

from benchmarks.turns import at_work

_CASES = ("one line", "no position", "by hand")
# The position contains the Trainer's log. So the benchmark also measures the position with longer logs. `_LINES` has
# the numbers of lines that the benchmark adds to the log. With each number, the benchmark takes the position `_TAKEN`
# times, and does not count the first time.
_LINES = (100, 1_000, 10_000)
_TAKEN = 5
_WARM_STEPS = 6
_ROWS = 4_096


def main() -> None:
    """Measures all cases and prints the results. With --work, trains one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=("4M", "25M", "125M", "500M"), default="125M")
    parser.add_argument("--length", type=int, default=32, help="tokens in a step")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each process")
    parser.add_argument("--steps", type=int, default=4, help="number of measured steps in a turn")
    parser.add_argument("--storage", default=".", help="a folder on the disk to measure")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="also write trainer.txt and trainer.json there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _train(json.loads(options.work))
        return
    from benchmarks.machine import described

    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-trainer-") as folder:
        found = {"machine": described(), "parameters": options.parameters, **_measured(options, folder)}
    text = _shown(found)
    print(text)
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "trainer.json").write_text(json.dumps(found, indent=1) + "\n")
        about = "\n".join(f"{name}: {value}" for name, value in found["machine"].items())
        head = f"{about}\n{options.parameters} parameters in float32, 1 x {options.length} tokens"
        (options.write / "trainer.txt").write_text(f"{head}\n\n{text}\n")


def _measured(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in _CASES}
    common = {"parameters": options.parameters, "length": options.length, "folder": folder}
    with at_work("trainer", {name: {**common, "case": name} for name in _CASES}, steps=_WARM_STEPS) as processes:
        for _ in range(options.rounds):
            for name, process in processes.items():
                turns[name].append(process.ask(steps=options.steps))
        logs = {lines: processes["one line"].ask(lines=lines) for lines in _LINES}
    seconds = {name: [one for turn in own for one in turn["seconds"]] for name, own in turns.items()}
    taken = [one for turn in turns["one line"] for one in turn["positions"]]
    return {
        "cases": {
            name: {"seconds": statistics.median(own), "spread": [min(own), max(own)]} for name, own in seconds.items()
        },
        # There is one ratio for each round, because the machine's speed changes between rounds.
        "ratios": {
            name: [
                statistics.median(one["seconds"]) / statistics.median(other["seconds"])
                for one, other in zip(turns["one line"], turns[name], strict=True)
            ]
            for name in _CASES[1:]
        },
        "position": {"seconds": statistics.median(taken), "bytes": turns["one line"][-1]["bytes"]},
        "logs": {
            lines: {"seconds": statistics.median(one["positions"]), "bytes": one["bytes"]}
            for lines, one in logs.items()
        },
    }


def _shown(found: dict[str, Any]) -> str:
    from memascend.text import table

    cases, position = found["cases"], found["position"]
    rows = [
        (name, f"{case['seconds']:.3f}", f"{case['spread'][0]:.3f}..{case['spread'][1]:.3f}")
        for name, case in cases.items()
    ]
    lines = [table(("a Trainer", "s/step", "spread"), rows), ""]
    for name, ratios in found["ratios"].items():
        lines.append(
            f"one line, of {name}: {cases['one line']['seconds'] / cases[name]['seconds']:.3f} "
            f"(rounds {min(ratios):.3f}..{max(ratios):.3f})"
        )
    share = position["seconds"] / cases["one line"]["seconds"]
    lines.append(f"the position: {position['seconds'] * 1e3:.1f} ms, {position['bytes']} bytes, {share:.2%} of a step")
    for count, one in found["logs"].items():
        lines.append(f"after {int(count):,} lines of the log: {one['seconds'] * 1e3:.1f} ms, {one['bytes']} bytes")
    return "\n".join(lines)


# --- a case, in its own process ---------------------------------------------------------------------


def _train(work: dict[str, Any]) -> None:
    import torch
    import transformers

    import memascend.trainer
    from benchmarks.train.cell.workload import WORKLOADS, configuration, prepared

    positions = _Positions(empty=work["case"] == "no position")
    workload = WORKLOADS[f"{work['parameters']}-1x128"]
    models: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = prepared(workload, models.from_config(configuration(workload), dtype=torch.float32))
    ids = torch.randint(0, workload.vocabulary, (_ROWS, work["length"])).tolist()
    rows = [{"input_ids": one, "labels": one} for one in ids]
    by_hand = work["case"] == "by hand"
    arguments = transformers.TrainingArguments(
        f"{work['folder']}/out",
        max_steps=1_000_000,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        max_grad_norm=0.0 if by_hand else 1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    storage = f"{work['folder']}/{work['case']}.store"
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    if by_hand:
        optimizer = trainer.create_optimizer()
        _, optimizer = memascend.offload(model, optimizer, storage=storage, device="cpu", max_grad_norm=1.0)
        callbacks: list[Any] = [memascend.trainer.Callback()]
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, optimizers=(optimizer, None), callbacks=callbacks
        )
    else:
        memascend.trainer.offload(trainer, storage=storage)
    # PrinterCallback would print to standard output, from which `Process.ask` reads the answers.
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(_turns(positions))
    trainer.train()


class _Positions:
    """Replaces `Resume.position` in this process. Measures the time of each call.

    If `empty` is True, each call returns an empty position.
    """

    def __init__(self, *, empty: bool) -> None:
        from memascend.trainer.resume import Resume

        self.seconds: list[float] = []
        self.bytes = 0
        self.again: Any = None
        own = Resume.position

        def position(resume: Resume) -> str:
            began = time.perf_counter()
            text = "" if empty else own(resume)
            self.seconds.append(time.perf_counter() - began)
            self.bytes, self.again = len(text), lambda: position(resume)
            return text

        Resume.position = position  # type: ignore[assignment,method-assign]


def _turns(positions: _Positions) -> Any:
    """Returns a callback that answers the questions of the main process.

    A question has "steps" or "lines". For "steps", the Trainer makes one step that is not counted, and then this number
    of steps. For "lines", the callback takes the position with this number of lines added to the log.
    """
    import transformers

    class Turns(transformers.TrainerCallback):
        """Reads questions from standard input, and prints an answer to each of them.

        A turn begins with a question that asks for steps. The answer follows after the last of these steps.
        """

        def __init__(self) -> None:
            self._left, self._began = 0, 0.0
            self._seconds: list[float] = []

        def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
            """Waits for the first question."""
            self._wait(state)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
            """Counts a step. After the last step of a turn, answers the question and waits for the next question."""
            self._seconds.append(time.perf_counter() - self._began)
            self._left -= 1
            if self._left == 0:
                self._answer()
                self._wait(state)
            self._began = time.perf_counter()

        def _answer(self) -> None:
            # The first step of a turn is not counted, because the disk may still write for another case. The first
            # position with a long log is not counted, either.
            counted = {"seconds": self._seconds[1:], "positions": positions.seconds[1:], "bytes": positions.bytes}
            print(json.dumps(counted), flush=True)
            self._seconds.clear()
            positions.seconds.clear()

        def _wait(self, state: Any) -> None:
            """Waits for a question that has "steps". Until then, answers questions that have "lines"."""
            while True:
                question = json.loads(sys.stdin.readline())
                if "steps" in question:
                    self._left, self._began = question["steps"] + 1, time.perf_counter()
                    return
                kept = list(state.log_history)
                line = {"loss": 2.345678, "grad_norm": 1.234567, "learning_rate": 9.87e-6, "epoch": 0.123}
                more = ({**line, "loss": line["loss"] + step / 997, "step": step} for step in range(question["lines"]))
                state.log_history.extend(more)
                for _ in range(_TAKEN):
                    positions.again()
                state.log_history[:] = kept
                self._answer()

    return Turns()


if __name__ == "__main__":
    main()
