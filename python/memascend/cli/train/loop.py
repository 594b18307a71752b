"""Runs the training loop: forward, backward, step, and what is told and saved between steps."""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from memascend.cli.train.batches import Batch, seed_of
from memascend.cli.train.display import Step
from memascend.errors import UsageError

if TYPE_CHECKING:
    from memascend.cli.train.batches import Batches
    from memascend.cli.train.display import Display
    from memascend.cli.train.model import Described
    from memascend.cli.train.output import Output
    from memascend.cli.train.ranks import Ranks
    from memascend.cli.train.rate import Rate
    from memascend.cli.train.reporters import Reporter
    from memascend.run.optimizer import OffloadedOptimizer

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
                f"the loss of step {step + 1} is {loss}, and nothing was learnt from it: storage holds step {step}. "
                "Begin again with a lower --lr or a longer --warmup, in another --output and --storage"
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
