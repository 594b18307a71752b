"""Runs the training loop: forward, backward, step; reports and saves between steps."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.files import file_errors
from memascend.cli.train.data import Batch, seed_of
from memascend.errors import ConfigError, UsageError
from memascend.text import bytes_shown, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from memascend.cli.train.data import Batches
    from memascend.cli.train.model import Described
    from memascend.cli.train.output import Output, Ranks
    from memascend.cli.train.settings import Settings
    from memascend.session.optimizer import OffloadedOptimizer


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate over a run."""

    peak: float  # the highest learning rate
    steps: int  # of the run
    warmup_steps: int  # steps of them that warm up
    schedule: str  # "linear", "cosine" or "constant" after the warmup
    lowest: float = 0.0  # the learning rate at the end of the schedule

    def of_step(self, step: int) -> float:
        """The learning rate of a step, counted from 0. It is above 0 in the first and the last step, too."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        part = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        factor = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "constant": 1.0}[self.schedule]
        return self.lowest + (self.peak - self.lowest) * factor

    def said(self) -> str:
        """The schedule in words."""
        falls = {"linear": "falls linearly to {}", "cosine": "falls to {} along a cosine", "constant": "stays"}
        fall = falls[self.schedule].format(f"{self.lowest:g}")
        rises = f"rises to {self.peak:g} in {counted(self.warmup_steps, 'step')}, then" if self.warmup_steps else ""
        return f"learning rate {rises or f'starts at {self.peak:g} and'} {fall}"


def warmup_steps(warmup: float, steps: int) -> int:
    """The number of warmup steps. --warmup gives a fraction of all steps, or the number itself."""
    return int(warmup) if warmup >= 1 else math.ceil(steps * warmup)


class Display:
    """A destination for the reports of a run; this base class discards them."""

    def tell(self, text: str) -> None:
        """Show a sentence."""

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Show an event of a step ("step", "eval" or "save"): `values` for programs, `text` for people."""

    def close(self) -> None:
        """Release files and connections."""


class Lines(Display):
    """Sentences and events on standard output."""

    def tell(self, text: str) -> None:
        """Print a sentence."""
        print(text, flush=True)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Print a line."""
        of_all = f"/{values['steps']}" if name == "step" else ""
        self.tell(f"step {values['step']}{of_all}: {text}")


class JsonLines(Display):
    """Events as JSON on standard output, sentences on standard error."""

    def tell(self, text: str) -> None:
        """Print a sentence."""
        print(text, file=sys.stderr, flush=True)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Print a line."""
        del text
        print(json.dumps({"event": name, **values}), flush=True)


class Log(Display):
    """A file with one JSON line for each event."""

    def __init__(self, path: Path) -> None:
        """Append to the file, and end a line that a killed process left unfinished."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab+", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Append a line."""
        del text
        with file_errors(self._path, "cannot be written"):
            self._file.write(json.dumps({"event": name, **values}).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def time_shown(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def require_reporters(names: Sequence[str]) -> None:
    """Check that the packages of --report are installed.

    Raises:
        ConfigError: a package is missing.
    """
    for name in names:
        try:
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter  # noqa: F401
            else:
                import wandb  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--report {name} needs a package that is not installed: pip install {name}") from error


def open_reporters(names: Sequence[str], folder: Path, run: str, options: Mapping[str, Any]) -> list[Display]:
    """The reporters of --report, which write to `folder`; a run that resumes has the same name `run`."""
    kinds: dict[str, Callable[[], Display]] = {
        "tensorboard": lambda: _TensorBoard(folder),
        "wandb": lambda: _Wandb(folder, run, options),
    }
    return [kinds[name]() for name in dict.fromkeys(names)]


def _reported(values: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an event that reporters draw as curves."""
    names = ("loss", "lr", "tokens_per_second", "grad_norm", "eval_loss")
    return {name: values[name] for name in names if values.get(name) is not None}


class _TensorBoard(Display):
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del name, text
        for figure, value in _reported(values).items():
            self._writer.add_scalar(f"train/{figure}", value, values["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb(Display):
    def __init__(self, folder: Path, run: str, options: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(dir=str(folder), id=run, resume="allow", config=dict(options))

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del name, text
        if figures := _reported(values):
            self._run.log(figures, step=values["step"])

    def close(self) -> None:
        self._run.finish()


# The remaining time is estimated from the mean speed of the last steps.
_STEPS_OF_SPEED = 20


@dataclass(kw_only=True)
class Loop:
    """The training loop of one start of a run."""

    settings: Settings  # the options of the run
    described: Described  # the offloaded model
    optimizer: OffloadedOptimizer  # of that model
    tokenizer: Any  # saved beside the model
    output: Output  # the folder of the run
    batches: Batches  # of each step
    held_out: Batches | None  # for the evaluation; None: no --eval
    rate: Rate  # the learning rate
    ranks: Ranks  # which rank computes which micro-batch of a step
    displays: list[Display]  # where events are reported
    _times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_STEPS_OF_SPEED), init=False)

    def run(self, first: int) -> None:
        """Train from step `first`, counted from 0, to the end.

        Raises:
            UsageError: the loss is not finite.
        """
        # The run may have been killed between a step and its save.
        if first:
            self._save_where_due(first)
        for step in range(first, self.batches.steps):
            began, before = time.monotonic(), self._moved()
            found, tokens = self._step(step)
            self._times.append((tokens, time.monotonic() - began))
            self._tell(step, found, tokens, before)
            self._save_where_due(step + 1)

    def _step(self, step: int) -> tuple[float, int]:
        """Compute one step; return its loss and its number of tokens."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate.of_step(step)
        batches = self.batches.of_step(step)
        learnt = sum(batch.learnt for batch in batches)

        def part_of(number: int) -> torch.Tensor:
            # Dropout depends on step and batch alone, so a resumed run draws the same numbers, on any rank.
            torch.manual_seed(seed_of(self.settings.seed, f"step {step}", number))
            if number < len(batches):
                # The loss of the step is the mean over the tokens of all its batches.
                return self._loss(batches[number]) * (batches[number].learnt / learnt)
            return self._loss(Batch.of_padding(self.batches.padding)) * 0.0

        parts = [
            part.item() for part in self.optimizer.accumulate(part_of, self.ranks.numbers(len(batches)), by_layer=True)
        ]
        loss = _sum(self.ranks.in_order(parts, len(batches)))
        if not math.isfinite(loss):
            self.optimizer.zero_grad()
            raise UsageError(
                f"the loss of step {step + 1} is {loss}, so the step was dropped, and storage holds step {step}. "
                "Start again with a lower --lr or a longer --warmup, in another --output and --storage"
            )
        assert self.output.record is not None
        self.optimizer.user_state = {
            "output": str(self.output.folder),
            "run": self.output.record.store,
            "next_step": step + 1,
        }
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, sum(batch.tokens for batch in batches)

    def _loss(self, batch: Batch) -> torch.Tensor:
        device = self.described.model.device
        made = self.described.model(
            input_ids=batch.input_ids.to(device),
            labels=batch.labels.to(device),
            use_cache=False,
            # Position ids separate examples that share a sequence; a mask would turn that off.
            **(
                {"attention_mask": batch.attention_mask.to(device)}
                if batch.position_ids is None
                else {"position_ids": batch.position_ids.to(device)}
            ),
        )
        loss: torch.Tensor = made.loss
        return loss

    # --- reports -----------------------------------------------------------------------

    def _event(self, name: str, values: dict[str, Any], text: str) -> None:
        for display in self.displays:
            display.event(name, values, text)

    def _moved(self) -> tuple[int, int]:
        """Bytes read and written. Several ranks report the sum of all, up to the beginning of their last `step()`."""
        report = self.optimizer.report()
        if self.ranks.count > 1:
            return (0, 0) if report.ranks is None else (report.ranks.read, report.ranks.written)
        return sum(report.read.values()), sum(report.written.values())

    def _tell(self, step: int, loss: float, tokens: int, before: tuple[int, int]) -> None:
        read, written = self._moved()
        seconds = sum(each for _, each in self._times)
        left = (self.batches.steps - step - 1) * seconds / len(self._times)
        skipped, norm = self.optimizer.overflowed, self.optimizer.grad_norm
        moved = read - before[0], written - before[1]
        speed = sum(each for each, _ in self._times) / seconds
        values = {
            "step": step + 1,
            "steps": self.batches.steps,
            "epoch": round((step + 1) / self.batches.steps_of_epoch, 4),
            "loss": loss,  # the mean over the trained tokens
            "grad_norm": None if skipped else norm,  # of all gradients, before clipping
            "lr": self.rate.of_step(step),
            "tokens": tokens,  # without padding
            "seconds": self._times[-1][1],
            "tokens_per_second": speed,  # over the last steps
            "read_bytes": moved[0],
            "written_bytes": moved[1],
            "seconds_left": left,
            "skipped": skipped,  # whether gradients overflowed, so that the step changed nothing
        }
        shown = "skipped (overflow)" if skipped or norm is None else f"norm {norm:.3g}"
        text = f"loss {loss:.4f}, {shown}, {speed:,.0f} tokens/s, {bytes_shown(sum(moved))} moved"
        self._event("step", values, f"{text}, {time_shown(left)} left")

    # --- saving ------------------------------------------------------------------------

    def _save_where_due(self, step: int) -> None:
        """Evaluate and save the model if either is due after so many steps."""
        assert self.output.record is not None
        record, is_last, keep = self.output.record, step == self.batches.steps, self.settings.keep
        due = (is_last or step % self.settings.save_every == 0) and record.saved != step
        every = self.settings.eval_every
        looks = due if every is None else is_last or step % every == 0 or (due and keep > 0)
        if self.held_out is not None and looks and record.evaluated != step:
            loss = self.evaluate(self.held_out)
            self._event("eval", {"step": step, "eval_loss": loss}, f"eval loss {loss:.4f}")
            self.output.change(evaluated=step, eval_loss=loss)
        if not due:
            return
        self.output.save(self.described, self.optimizer, self.tokenizer, step, keep)
        self._event("save", {"step": step, "folder": str(self.output.folder)}, f"saved to {self.output.folder}")

    @torch.no_grad()
    def evaluate(self, held_out: Batches) -> float:
        """The mean loss over the trained tokens of the held-out examples."""
        model = self.described.model
        model.eval()
        own: list[float] = []
        learnt: list[int] = []
        try:
            for number, batch in enumerate(held_out.in_file_order()):
                learnt.append(batch.learnt)
                if number % self.ranks.count == self.ranks.rank:
                    own.append(self._loss(batch).item() * batch.learnt)
            if len(own) < len(self.ranks.numbers(len(learnt))):
                # The other ranks compute one more batch, and all ranks must run the same collectives.
                own.append(self._loss(Batch.of_padding(held_out.padding)).item())
        finally:
            model.train()
        return _sum(self.ranks.in_order(own, len(learnt))) / sum(learnt)


def _sum(numbers: list[float]) -> float:
    """Add in order and round each time: sum() of Python compensates rounding errors."""
    return reduce(operator.add, numbers, 0.0)
