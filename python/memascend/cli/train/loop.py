"""Runs the training loop: forward, backward, step, and what is shown and saved between steps."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.cli.train.data import Batch, seed_of
from memascend.errors import ConfigError, UsageError
from memascend.text import bytes_shown, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from memascend.cli.train.data import Batches
    from memascend.cli.train.model import Described
    from memascend.cli.train.output import Output, Ranks
    from memascend.session.optimizer import OffloadedOptimizer


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate over a run."""

    peak: float  # the highest
    steps: int  # of the run
    warmup_steps: int  # of them, that warm up
    schedule: str  # "linear", "cosine" or "constant" after that
    lowest: float = 0.0  # what it falls to

    def of_step(self, step: int) -> float:
        """Of a step, counted from 0: the first and the last learn something, too."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        part = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        factor = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "constant": 1.0}[self.schedule]
        return self.lowest + (self.peak - self.lowest) * factor

    def said(self) -> str:
        """In words."""
        falls = {"linear": "falls linearly to {}", "cosine": "falls to {} along a cosine", "constant": "stays"}
        fall = falls[self.schedule].format(f"{self.lowest:g}")
        rises = f"rises to {self.peak:g} in {counted(self.warmup_steps, 'step')}, then" if self.warmup_steps else ""
        return f"learning rate {rises or f'starts at {self.peak:g} and'} {fall}"


def warmup_steps(warmup: float, steps: int) -> int:
    """Steps that warm up, of --warmup: a part of all, or how many."""
    return int(warmup) if warmup >= 1 else math.ceil(steps * warmup)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is told of a step."""

    step: int  # its number, from 1
    steps: int  # of the run
    epoch: float  # passes over the data so far
    loss: float  # the mean over the tokens that are learnt
    grad_norm: float | None  # of all gradients, before clipping; None where the step was skipped
    lr: float  # the learning rate
    tokens: int  # computed, without padding
    seconds: float  # that the step took
    tokens_per_second: float  # over the last steps
    read_bytes: int  # from storage
    written_bytes: int  # to storage
    seconds_left: float  # to the end of the run, at the speed of the last steps
    skipped: bool = False  # whether gradients overflowed, so that nothing was learnt

    def figures(self) -> str:
        """In a few words."""
        norm = "skipped (overflow)" if self.skipped or self.grad_norm is None else f"norm {self.grad_norm:.3g}"
        moved = bytes_shown(self.read_bytes + self.written_bytes)
        return f"loss {self.loss:.4f}, {norm}, {self.tokens_per_second:,.0f} tokens/s, {moved} moved"


class Display:
    """Where it is told; here nowhere."""

    def tell(self, text: str) -> None:
        """A sentence."""

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Something beside steps: `values` for machines, `text` for people."""

    def step(self, step: Step) -> None:
        """A step was committed."""

    def close(self) -> None:
        """Nothing more comes."""


def open_display(steps: int, first: int, *, as_json: bool, rank: int = 0) -> Display:
    """What fits where the output goes; `first` steps are done. The first rank tells: what all do is the same."""
    if rank:
        return Display()
    if as_json:
        return _JsonLines()
    if sys.stderr is not None and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            return _Bar(tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True))
    return _Lines()


class Log(Display):
    """Another display, and one JSON line for each step and event in a file."""

    def __init__(self, path: Path, shown: Display) -> None:
        """Go on with the file, behind what a killed process may have left of a line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._shown = shown
        self._file = path.open("ab+", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def tell(self, text: str) -> None:
        """A sentence, which the file does not have."""
        self._shown.tell(text)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Something beside steps."""
        self._write({"event": name, **values})
        self._shown.event(name, values, text)

    def step(self, step: Step) -> None:
        """A step was committed."""
        self._write({"event": "step", **asdict(step)})
        self._shown.step(step)

    def close(self) -> None:
        """Nothing more comes."""
        self._shown.close()
        self._file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values).encode() + b"\n")


class _Lines(Display):
    def tell(self, text: str) -> None:
        print(text, flush=True)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del name, values
        self.tell(text)

    def step(self, step: Step) -> None:
        self.tell(f"step {step.step}/{step.steps}: {step.figures()}, {time_shown(step.seconds_left)} left")


class _Bar(Display):
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def tell(self, text: str) -> None:
        self._bar.write(text)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del name, values
        self.tell(text)

    def step(self, step: Step) -> None:
        self._bar.set_postfix_str(step.figures(), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


class _JsonLines(Display):
    """Steps and events on standard output, sentences on standard error."""

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del text
        print(json.dumps({"event": name, **values}), flush=True)

    def step(self, step: Step) -> None:
        self.event("step", asdict(step), "")


def time_shown(seconds: float) -> str:
    """A time to wait, in the two largest units that it has."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


class Reporter(Protocol):
    """One of them."""

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step."""

    def close(self) -> None:
        """Nothing more comes."""


def require_reporters(names: Sequence[str]) -> None:
    """Refuse those that are not installed, before anything is done.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        try:
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter  # noqa: F401
            else:
                import wandb  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--report {name} needs a package that is not installed: pip install {name}") from error


def open_reporters(names: Sequence[str], folder: Path, run: str, options: Mapping[str, Any]) -> list[Reporter]:
    """Those that were asked for, which write to `folder`; a run that goes on has the same name in `run`."""
    found: list[Reporter] = []
    if "tensorboard" in names:
        found.append(_TensorBoard(folder))
    if "wandb" in names:
        found.append(_Wandb(folder, run, options))
    return found


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, run: str, options: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(dir=str(folder), id=run, resume="allow", config=dict(options))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


# Steps whose mean speed tells how long the rest takes.
_STEPS_OF_SPEED = 20


@dataclass(kw_only=True)
class Loop:
    """A run between two saves and over all of them."""

    described: Described  # the offloaded model
    optimizer: OffloadedOptimizer  # of it
    tokenizer: Any  # saved beside the model
    output: Output  # the folder
    batches: Batches  # of each step
    held_out: Batches | None  # for the evaluation, where there is one
    rate: Rate  # the learning rate
    save_every: int  # steps
    eval_every: int | None  # steps; None: at each save
    keep: int  # models in folders of their own
    seed: int  # of what is random in the model
    ranks: Ranks  # who computes which micro-batch of a step
    display: Display  # for people
    reporters: list[Reporter]  # for programs
    _times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_STEPS_OF_SPEED), init=False)

    def run(self, first: int) -> None:
        """Train from a step of the data on, counted from 0, to the end.

        Raises:
            UsageError: the loss is no number any more.
        """
        # A run that was killed between a step and its save.
        if first:
            self._save_where_due(first)
        for step in range(first, self.batches.steps):
            began, before = time.monotonic(), self._moved()
            found, tokens = self._step(step)
            self._times.append((tokens, time.monotonic() - began))
            self._tell(step, found, tokens, before)
            self._save_where_due(step + 1)

    def _step(self, step: int) -> tuple[float, int]:
        """One step; its loss, and its tokens."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate.of_step(step)
        batches = self.batches.of_step(step)
        learnt = sum(batch.learnt for batch in batches)

        def part_of(number: int) -> torch.Tensor:
            # Dropout depends on step and batch alone: a run that goes on draws what it would have drawn, on any rank.
            torch.manual_seed(seed_of(self.seed, f"step {step}", number))
            if number < len(batches):
                # The mean over all tokens of the step, whichever batch they are in.
                return self._loss(batches[number]) * (batches[number].learnt / learnt)
            return self._loss(Batch.of_padding(self.batches.padding)) * 0.0

        parts = [part.item() for part in self.optimizer.accumulate(part_of, self.ranks.numbers(len(batches)))]
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
            # Rows that share a sequence are told apart by their positions, where there is no mask.
            **(
                {"attention_mask": batch.attention_mask.to(device)}
                if batch.position_ids is None
                else {"position_ids": batch.position_ids.to(device)}
            ),
        )
        loss: torch.Tensor = made.loss
        return loss

    # --- telling -----------------------------------------------------------------------

    def _moved(self) -> tuple[int, int]:
        """Bytes read and written; of several ranks by all, up to the beginning of their last `step()`."""
        report = self.optimizer.report()
        if self.ranks.count > 1:
            return (0, 0) if report.ranks is None else (report.ranks.read, report.ranks.written)
        return sum(report.read.values()), sum(report.written.values())

    def _tell(self, step: int, loss: float, tokens: int, before: tuple[int, int]) -> None:
        read, written = self._moved()
        seconds = sum(each for _, each in self._times)
        told = Step(
            step=step + 1,
            steps=self.batches.steps,
            epoch=round((step + 1) / self.batches.steps_of_epoch, 4),
            loss=loss,
            grad_norm=None if self.optimizer.overflowed else self.optimizer.grad_norm,
            lr=self.rate.of_step(step),
            tokens=tokens,
            seconds=self._times[-1][1],
            tokens_per_second=sum(each for each, _ in self._times) / seconds,
            read_bytes=read - before[0],
            written_bytes=written - before[1],
            seconds_left=(self.batches.steps - step - 1) * seconds / len(self._times),
            skipped=self.optimizer.overflowed,
        )
        self.display.step(told)
        figures = {"loss": loss, "lr": told.lr, "tokens_per_second": told.tokens_per_second}
        self._report(step + 1, figures if told.grad_norm is None else {**figures, "grad_norm": told.grad_norm})

    def _report(self, step: int, figures: dict[str, float]) -> None:
        for reporter in self.reporters:
            reporter.add(step, figures)

    # --- saving ------------------------------------------------------------------------

    def _save_where_due(self, step: int) -> None:
        """After so many steps: the evaluation, and the model into its folder."""
        assert self.output.record is not None
        record, is_last = self.output.record, step == self.batches.steps
        due = (is_last or step % self.save_every == 0) and record.saved != step
        looks = due if self.eval_every is None else is_last or step % self.eval_every == 0 or (due and self.keep > 0)
        if self.held_out is not None and looks and record.evaluated != step:
            loss = self.evaluate(self.held_out)
            self.display.event("eval", {"step": step, "eval_loss": loss}, f"step {step}: eval loss {loss:.4f}")
            self._report(step, {"eval_loss": loss})
            self.output.change(evaluated=step, eval_loss=loss)
        if not due:
            return
        self.output.save(self.described, self.optimizer, self.tokenizer, step, self.keep)
        text = f"step {step}: saved to {self.output.folder}"
        self.display.event("save", {"step": step, "folder": str(self.output.folder)}, text)

    @torch.no_grad()
    def evaluate(self, held_out: Batches) -> float:
        """The mean loss over all tokens that would be learnt."""
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
                # The others compute one more, and ranks compute together.
                own.append(self._loss(Batch.of_padding(held_out.padding)).item())
        finally:
            model.train()
        return _sum(self.ranks.in_order(own, len(learnt))) / sum(learnt)


def _sum(numbers: list[float]) -> float:
    """One after the other: sum() would make up for what each addition rounds."""
    return reduce(operator.add, numbers, 0.0)
