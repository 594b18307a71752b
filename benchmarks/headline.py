"""Measures on a CUDA machine the case that README's table predicts: large batches, and too much state for card and RAM.

By default, the model is Qwen2.5 1.5B in bf16, and it gets 24 GiB of the card. It gets as much host memory for each
parameter as a model of 8 B parameters gets from 48 GiB.

`questions` chooses the number of tokens in a step. The ratio of the step's planned computation time to its planned
drive time is near the ratio of an 8 B model on an RTX 4090. `questions` prefers the largest micro-batches that fit, and
avoids steps that take longer than `_LONGEST` seconds.

Each cell runs in a separate process. The process is killed when the time of `--seconds` is over. In-memory torch may
use the whole card. Each other system may use `--card` bytes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import described
from benchmarks.peers import environment
from benchmarks.train.cell.systems import SYSTEMS, ours
from benchmarks.train.cell.workload import Workload
from benchmarks.train.code import commit
from benchmarks.train.judge import loss_difference
from benchmarks.train.launch import Launcher
from memascend.cli import plan as planning
from memascend.cli.plan.answer import answer, disk_seconds
from memascend.cli.plan.machine import drive_at, parse_gpu
from memascend.cli.plan.shapes import shape_named
from memascend.errors import BudgetError
from memascend.plan.hardware import REACHED, gpu_here
from memascend.plan.options import parse_bytes
from memascend.text import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.cli.plan.answer import Answer, Question
    from memascend.plan.cost import Drive

# The row of README's table whose two ratios the benchmark copies: host memory to parameters, and computation time to
# drive time.
_ROW = "llama-8b --gpu 4090 --drive 5,4 --host-memory 48GiB --length 1024 --tokens 32768 --accumulation-steps 2"
_CLIPPED = "--one-after-the-other --max-grad-norm 1"
# A chosen step has at most this number of planned seconds, if a step that short exists. The cell of torch and four
# cells of memascend must end within eight minutes, including their set-up.
_LONGEST = 15.0
# The fraction of the card's memory that a step's plan may fill. torch needs the rest for gaps between tensors. The
# fraction is below 0.9, because a Trainer trains by layer only if its plan fits into nine tenths of the memory.
_PART = 0.85
# `questions` chooses the number of sequences in a micro-batch from `_SEQUENCES`, and the number of micro-batches in a
# step from `_MICRO_BATCHES`.
_SEQUENCES = (1, 2, 4, *range(8, 257, 8))
_MICRO_BATCHES = range(2, 33)
# The system that trains the cells of memascend: TRL's Trainer, or a plain loop if TRL, datasets or accelerate is not
# installed. Neither of the two computes the logits of all tokens at once for its loss.
TRAINER = "memascend-trainer" if all(map(importlib.util.find_spec, ("trl", "datasets", "accelerate"))) else "memascend"
# The number of warm-up steps, and the number of measured steps, in the cells of memascend. In the warm-up steps,
# memascend fills the RAM tier and detects whether the loop clips.
_WARM, _STEPS = 2, 4
# The number of DeepSpeed's swap buffers for optimizer state. `benchmarks.train.tuning` found no model that trains with
# fewer buffers.
_STATE_BUFFERS = 12
# A cell starts only if more than this number of seconds is left. It must import modules, fill the store and make a
# step.
_LEAST = 30.0
TORCH, TURNS, LAYERS = "torch, in the card's memory", "one after the other", "by layer"


# --- choosing the steps and cells --------------------------------------------------------------


def _asked(words: str) -> Question:
    parser = argparse.ArgumentParser()
    planning.add_arguments(parser)
    return planning.ask(parser.parse_args(words.split()))


def _balance(question: Question, found: Answer) -> float:
    """Returns the ratio of a step's planned computation time to its planned drive time."""
    computed = sum(phase.parts["compute"] for phase in found.phases or () if "compute" in phase.parts)
    return computed / (disk_seconds(question, found) or math.nan)


def questions(
    options: argparse.Namespace, drive: Drive | None, storage: Path | None = None
) -> tuple[float, dict[str, Question]]:
    """Returns the `_balance` of README's row, and two questions for `memascend plan`.

    Both questions are about a step with the same number of sequences, and the step clips gradients. In the question
    `TURNS`, the step computes its micro-batches one after the other. In the question `LAYERS`, the step computes its
    micro-batches by layer. If the folder `storage` is given, the free space of its disk limits the planned gradient
    log.
    """
    row = _asked(f"{_ROW} {_CLIPPED}")
    wanted = _balance(row, answer(row))
    words = f"{options.model} --drive gen4 --length {options.length} --tokens {options.length} {_CLIPPED}"
    base = _asked(f"{words} {_computes(options)}")
    share = parse_bytes("48GiB") * base.subject.parameters // row.subject.parameters
    placed = None if storage is None else (str(storage),)
    base = replace(base, drive=drive, drive_assumed=False, options=replace(base.options, storage=placed))
    base = _affordable(base, share)
    largest = max((size for size in _SEQUENCES if not answer(_of(base, size, 2)).problems), default=1)
    steps = [_of(base, size, 2) for size in _SEQUENCES if size < largest]
    steps += [_of(base, largest, count) for count in _MICRO_BATCHES]
    nearest = sorted(steps, key=lambda step: abs(math.log(_balance(step, answer(step)) / wanted)))
    short: tuple[float, dict[str, Question]] | None = None
    for step in nearest:
        layers = _by_layer(step)
        if layers is None:
            continue
        in_turn, layered = (answer(way).seconds or math.inf for way in (step, layers))
        if short is None or max(in_turn, layered) < short[0]:
            short = max(in_turn, layered), {TURNS: step, LAYERS: layers}
        # Users train by layer because it is faster. So this return takes only a step that is not slower by layer than
        # one after the other.
        if layered <= in_turn <= _LONGEST:
            return wanted, {TURNS: step, LAYERS: layers}
    if short is None:
        raise SystemExit(
            f"no planned step of {options.model} by layer fits: pass a larger --card or a smaller --length"
        )
    return wanted, short[1]


def _computes(options: argparse.Namespace) -> str:
    """Returns the options that describe the device to `memascend plan`.

    For a GPU, the memory in the options is only the part that a step may fill.
    """
    if options.device == "cpu":
        return "--device cpu"
    gpu = parse_gpu(options.gpu) if options.gpu else gpu_here()
    if gpu is None:
        raise SystemExit("memascend does not know the speed of this GPU: pass it as --gpu TFLOPS,GB,PCIE_GB_S")
    return f"--gpu {gpu.tflops},{_PART * _card(options) / 1e9},{gpu.link / 1e9}"


def _card(options: argparse.Namespace) -> int:
    return parse_bytes(options.card or "24GiB", "--card")


def _affordable(question: Question, budget: int) -> Question:
    """Returns `question` with `budget` as its host memory.

    If `budget` is too small, uses the smallest budget that works.
    """

    def reply(nbytes: int) -> Question:
        return replace(question, options=replace(question.options, host_memory=nbytes))

    try:
        answer(reply(budget))
    except BudgetError as error:
        return reply(error.smallest)
    return reply(budget)


def _of(question: Question, sequences: int, count: int) -> Question:
    return replace(question, sequences=sequences, micro_batches=count).one_after_the_other()


def _by_layer(turns: Question) -> Question | None:
    """Returns the question about a step by layer with the number of sequences of `turns`; None if no such step fits.

    The function compares steps with micro-batches of several sizes. It keeps the steps that take at most 2 % longer
    than the fastest step. Of these, it chooses the step with the largest micro-batches.
    """
    asked: list[tuple[float, Question]] = []
    for count in (turns.micro_batches << power for power in range(8)):
        sequences, rest = divmod(turns.micro_batches * turns.sequences, count)
        for activations in ("device", "ssd") if sequences and not rest else ():
            options = replace(turns.options, accumulation_steps=1, activations=activations)
            one = replace(turns, sequences=sequences, micro_batches=count, options=options)
            # A BudgetError means that the budget is too small for activations on storage. Such a step is skipped.
            with contextlib.suppress(BudgetError):
                found = answer(one)
                if not found.problems and found.seconds is not None:
                    asked.append((found.seconds, one))
    fastest = min((seconds for seconds, _ in asked), default=0.0)
    return next((one for seconds, one in asked if seconds <= 1.02 * fastest), None)


def _workload(options: argparse.Namespace) -> Workload:
    """Returns the workload of `--model`.

    As in `memascend plan`, `--model` is a model's name or the path of a config.json.
    """
    path = Path(options.model)
    known = shape_named(path)
    config = known[1] if known else json.loads((path / "config.json" if path.is_dir() else path).read_text())
    if config["model_type"] != "qwen2":
        raise SystemExit("--model must name a model whose model_type is qwen2")
    return Workload(
        name=known[0] if known else path.name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        vocabulary=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        length=options.length,
        checkpoint=True,
        loss="chunked",
        device=options.device,
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A measurement: a system, its workload and its settings.

    `memascend plan` predicts the step from `question`.
    """

    system: str
    work: Workload
    question: Question
    settings: dict[str, Any] = field(default_factory=dict)
    warm: int = _WARM


def cells(work: Workload, asked: dict[str, Question], values: Path, card: int | None) -> dict[str, Cell]:
    """Returns all cells, the most important cells first.

    `values` is a checkpoint folder, from which memascend loads the model's weights.
    """
    turns = asked[TURNS]
    step = replace(work, batch=turns.sequences, micro_batches=turns.micro_batches)
    found = {TORCH: Cell(system="torch", work=step, question=turns, warm=1)}
    for clip in (1.0, None):
        for way, clipped in asked.items():
            question = replace(clipped, options=replace(clipped.options, max_grad_norm=clip))
            found[f"{way}, {'clipped' if clip else 'not clipped'}"] = Cell(
                system=TRAINER,
                work=replace(
                    work, batch=question.sequences, micro_batches=question.micro_batches, clip=clip, card=card
                ),
                question=question,
                settings={
                    "weights": str(values),
                    "turns": way == TURNS,
                    "host_memory": question.options.host_memory,
                    "activations": question.options.activations,
                },
            )
    limited = replace(step, clip=1.0, card=card)
    for name, settings in (("zero-infinity-pipelined", {"state_buffers": _STATE_BUFFERS}), ("zero-offload", {})):
        found[f"{name}, clipped"] = Cell(system=name, work=limited, question=turns, settings=settings, warm=1)
    return found


# --- measuring ---------------------------------------------------------------------------------


def measured(options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures the cells that --cells chooses, by default all; returns the results.

    Calls `report` with the results so far after each cell.
    """
    until = time.monotonic() + options.seconds
    work = _workload(options)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-headline-") as name:
        folder = Path(name)
        drive, speeds = drive_at([folder])
        values_are_read = not options.cells or any(word not in TORCH for word in options.cells)
        if values_are_read:
            # The checkpoint takes disk space, so it must be written before `questions` reads the disk's free space.
            ours.write(work, folder / "values")
        wanted, asked = questions(options, drive, folder)
        card = None if options.device == "cpu" else parse_gpu(f"1,{_card(options) / 1e9},1").usable
        chosen = cells(work, asked, folder / "values", card)
        if options.cells:
            chosen = {one: cell for one, cell in chosen.items() if any(word in one for word in options.cells)}
        values: dict[str, Any] = {
            "machine": {**described(), "commit": commit(), "device": options.device},
            "model": work.name,
            "parameters": work.parameters,
            "host_memory": asked[TURNS].options.host_memory,
            "card": card,
            "gb_per_second": speeds,
            "balance": {"of the row in README": wanted, "here": _balance(asked[TURNS], answer(asked[TURNS]))},
            "cells": {},
        }
        deepspeed = environment.found(options.deepspeed)
        # `able` has the cells that share the time. It leaves out DeepSpeed's cells if DeepSpeed is not installed,
        # because they fail at once.
        able = [name for name, cell in chosen.items() if deepspeed or not SYSTEMS[cell.system].deepspeed]
        for one, cell in chosen.items():
            left = until - time.monotonic()
            share = left / max(1, len(able) - able.index(one)) if one in able else left
            found = values["cells"][one] = {"system": cell.system, "error": "no time was left"}
            if left > _LEAST:
                launcher = Launcher(folder, deepspeed, seconds=left, within=share)
                taken = launcher.run(cell.work, cell.system, steps=_STEPS, warm=cell.warm, settings=cell.settings)
                found = values["cells"][one] = _figures(cell, taken, values["cells"].get(TORCH, {}))
            print(f"{one}: {found.get('error') or seconds_shown(found['seconds'])}", file=sys.stderr, flush=True)
            report(values)
    return values


def _figures(cell: Cell, taken: dict[str, Any], torch: dict[str, Any]) -> dict[str, Any]:
    """Returns the measurements and the plan of a cell, or its error.

    Also returns how far the cell's losses differ from the losses of torch's cell, if that cell has losses.
    """
    question, work = cell.question, cell.work
    about = {"system": cell.system, "step": f"{work.micro_batches} x {work.batch} x {work.length}"}
    if "error" in taken:
        return {**about, **taken}
    steps = _steps(taken)
    seconds = statistics.median(steps)
    tokens = work.micro_batches * work.batch * work.length
    assert not isinstance(question.trace, str)
    flops = work.micro_batches * (question.trace.forward + question.trace.backward)
    found = {
        **about,
        "seconds": seconds,
        "spread": [min(steps), max(steps)],
        "steps": len(steps),
        "all_steps": list(zip(taken["ways"], taken["seconds"]["step"], strict=True)),
        "losses": taken["losses"],
        "tokens_per_second": tokens / seconds,
        "flops": flops / seconds,
        "of_peak": flops / seconds / _peak(question),
        "device_bytes": taken["device_peak_bytes"],
        "host_bytes": taken["peak_bytes"],
        "host_set_up_bytes": taken["set_up_peak_bytes"],
        "set_up_seconds": taken["set_up_seconds"],
        "read_per_parameter": taken["read_per_parameter"],
        "written_per_parameter": taken["written_per_parameter"],
        "versions": taken["versions"],
        "report": taken.get("report"),
        "in_turn_since": taken.get("in_turn_since"),
    }
    if "losses" in torch:
        difference = loss_difference(taken["losses"], torch["losses"])
        found["loss_difference"] = difference if math.isfinite(difference) else None
    return found | _planned(cell, torch.get("of_peak"))


def _steps(taken: dict[str, Any]) -> list[float]:
    """Returns the seconds of the measured steps.

    If memascend was still comparing two ways to write deferred updates, returns only the steps of the faster way.
    """
    by_way: dict[str, list[float]] = {}
    for way, seconds in zip(taken["ways"], taken["seconds"]["step"], strict=True):
        by_way.setdefault(way, []).append(seconds)
    return min(by_way.values(), key=statistics.median)


def _peak(question: Question) -> float:
    """Returns the largest number of operations that the device can compute in a second."""
    return (question.gpu.flops / REACHED) if question.gpu is not None else question.processor or math.nan


def _planned(cell: Cell, reached: float | None) -> dict[str, Any]:
    """Returns the plan's predictions for a cell of memascend; an empty dict for other systems.

    `reached` is the fraction of the device's peak speed that torch reached in its cell.
    """
    question = cell.question
    if not cell.system.startswith("memascend"):
        return {}
    output = answer(question)
    found = {
        "planned_seconds": output.seconds,
        "planned_device_bytes": output.device_bytes or None,
        "planned_host_bytes": output.host_bytes,
        "planned_read_per_parameter": output.read / cell.work.parameters,
        "planned_written_per_parameter": output.written / cell.work.parameters,
    }
    if reached and question.gpu is not None:
        gpu = replace(question.gpu, tflops=question.gpu.tflops * reached / REACHED)
        found["planned_seconds_as_torch"] = answer(replace(question, gpu=gpu)).seconds
    return found


# --- printing -----------------------------------------------------------------------------------


def shown(values: dict[str, Any]) -> str:
    """Returns the results as text: the machine, a table and notes."""
    balance = values["balance"]
    speeds = ", ".join(f"{name} {speed:.2f}" for name, speed in values["gb_per_second"].items())
    about = [
        *(f"{name}: {value}" for name, value in values["machine"].items()),
        f"{values['model']}: {values['parameters']:,} parameters in bf16",
        f"host_memory: {bytes_shown(values['host_memory'])}",
        f"of the card for torch: {'none' if values['card'] is None else bytes_shown(values['card'])}",
        f"the drive, GB/s: {speeds}",
        f"seconds of computation for each of the drive: {balance['here']:.2f}",
        f"of README's row: {balance['of the row in README']:.2f}",
    ]
    columns = ("a step", "sequences", "tokens/s", "s", "spread", "planned s", "as torch computes", "of peak",
               "GPU GiB (planned)", "host GiB (planned)", "B/param read + written (planned)", "losses")  # fmt: skip
    rows = [_row(name, cell) for name, cell in values["cells"].items()]
    notes = [
        "of peak: includes the operations of recomputation. planned s: assumes half of the peak. as torch computes:",
        "assumes the part that torch reached. losses: the largest difference from torch's, which clips no step",
    ]
    if not any(cell["system"] == "memascend-trainer" for cell in values["cells"].values()):
        notes.append("TRL, datasets or accelerate is not installed: memascend trained in a loop, with a chunked loss")
    for name, cell in values["cells"].items():
        if name.startswith(LAYERS) and cell.get("in_turn_since"):
            notes.append(f"{name}: trained one after the other, since {', '.join(cell['in_turn_since'])}")
    return "\n".join([*about, "", table(columns, rows), "", *notes])


def _row(name: str, cell: dict[str, Any]) -> tuple[str, ...]:
    if "error" in cell:
        return (name, cell.get("step", ""), cell["error"].splitlines()[0][:40], *[""] * 9)
    difference = cell.get("loss_difference")
    return (
        name,
        cell["step"],
        f"{cell['tokens_per_second']:,.0f}",
        f"{cell['seconds']:.2f}",
        f"{cell['spread'][0]:.2f}..{cell['spread'][1]:.2f}",
        _figure(cell.get("planned_seconds")),
        _figure(cell.get("planned_seconds_as_torch")),
        f"{cell['of_peak']:.0%}",
        _gib(cell, "device_bytes"),
        _gib(cell, "host_bytes"),
        f"{_moved(cell, '')} ({_moved(cell, 'planned_')})",
        "" if difference is None else f"{difference:.2%}",
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _gib(cell: dict[str, Any], name: str) -> str:
    found = [cell.get(key) for key in (name, f"planned_{name}")]
    measured, planned = ("-" if value is None else f"{value / 2**30:.1f}" for value in found)
    return f"{measured} ({planned})"


def _moved(cell: dict[str, Any], prefix: str) -> str:
    ways = [cell.get(f"{prefix}{way}_per_parameter") for way in ("read", "written")]
    return " + ".join("-" if way is None else f"{way:.1f}" for way in ways)


def add_arguments(add: Callable[..., Any]) -> None:
    """Adds the options for `--headline` to those of `benchmarks.cuda`."""
    add("--headline", action="store_true", help="instead, measure a 1.5 B model as in README's table")
    add("--model", default="qwen2.5-1.5b", help="a shape of Qwen2, by its name or config.json (%(default)s)")
    add("--gpu", metavar="TFLOPS,GB,PCIE_GB_S", help="the GPU's figures (default: those known to `memascend plan`)")
    add("--seconds", type=float, default=480.0, help="seconds for all cells together (%(default).0f)")
    add("--cells", nargs="+", metavar="WORD", help="only cells whose name has one of these words")
    add("--deepspeed", metavar="PYTHON", help=environment.OPTION_HELP)


def run(options: argparse.Namespace) -> int:
    """Measures the chosen cells and prints the results; returns 1 if every cell failed, otherwise 0.

    After each cell, also writes the results so far to the folder of --write.
    """

    def report(values: dict[str, Any]) -> None:
        if options.write:
            options.write.mkdir(parents=True, exist_ok=True)
            (options.write / "headline.json").write_text(json.dumps(values, indent=1) + "\n")
            (options.write / "headline.txt").write_text(shown(values) + "\n")

    # Makes only the first card visible, since a Trainer would use all visible cards.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    values = measured(options, report)
    print(json.dumps(values, indent=1) if options.json else shown(values))
    return int(all("error" in cell for cell in values["cells"].values()))
