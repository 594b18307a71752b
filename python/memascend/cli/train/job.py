"""Puts a run together: data, model, folder and storage, each looked at before anything is changed."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import TYPE_CHECKING, Any

import torch

from memascend.cli.train.batches import Batches
from memascend.cli.train.beginning import changes, find_beginning, model_digest, require_same
from memascend.cli.train.display import open_display
from memascend.cli.train.encoding import Counts, Encoder
from memascend.cli.train.loop import Loop
from memascend.cli.train.model import describe_model, load_tokenizer, require_transformers
from memascend.cli.train.output import LOGS, Output, Record
from memascend.cli.train.rate import Rate
from memascend.cli.train.reporters import open_reporters, require_reporters
from memascend.cli.train.rows import read_rows
from memascend.cli.train.sequences import Sequences
from memascend.closing import Closing
from memascend.errors import ConfigError, MemascendError
from memascend.run.decision import planned
from memascend.run.offloading import offload

if TYPE_CHECKING:
    from pathlib import Path

    from memascend.cli.train.ranks import Ranks
    from memascend.cli.train.settings import Settings
    from memascend.run.optimizer import OffloadedOptimizer


class Job(Closing):
    """One start of a run."""

    def __init__(self, settings: Settings, now: dt.datetime, ranks: Ranks) -> None:
        """Look at everything; nothing is changed. All ranks do so together; a run keeps the time of its first start.

        Raises:
            ConfigError: something does not fit: an option, a row, the model, the folder or the storage.
        """
        self._ranks = ranks
        self._settings = settings = ranks.of_this(settings)
        self._undo = contextlib.ExitStack()
        require_transformers().utils.logging.disable_progress_bar()
        require_reporters(settings.report)
        if settings.model.resolve() == settings.output.resolve():
            raise ConfigError("--model and --output are one folder, and training would write over what it began from")
        self._output = Output(settings.output, ranks)
        record = self._output.record
        self._began = dt.datetime.fromisoformat(ranks.everyone(now.isoformat())[0] if record is None else record.began)
        self._beginning = find_beginning(self._output, settings.storage, ranks)
        self._tokenizer = load_tokenizer(settings.model)
        self._next_step = self._beginning.next_step
        try:
            self._counts, self._batches = self._read(settings.data, settings.epochs)
            self._held_out = None if settings.eval is None else self._read(settings.eval, 1)[1]
            self._described = describe_model(settings.model, settings.lora, settings.seed)
            self._require_tokens()
            self._digests = {"model": model_digest(settings.model), "data": self._batches.sequences.digest}
            self._require_same_on_all()
            if record is not None:
                require_same(record, settings.of_the_result(), self._digests, self._output.folder)
        except BaseException:
            self._undo.close()
            raise
        self._rate = Rate(
            peak=settings.lr, steps=self._batches.steps, warmup=settings.warmup, schedule=settings.schedule
        )

    def close(self) -> None:
        """Let go of the data."""
        self._undo.close()

    def _read(self, path: Path, epochs: float) -> tuple[Counts, Batches]:
        settings = self._settings
        counts = Counts()
        encoder = Encoder(self._tokenizer, settings.max_length, self._began)
        sequences = self._undo.enter_context(Sequences(encoder.run(read_rows(path), counts), self._output.parent))
        padding = self._tokenizer.pad_token_id
        batches = Batches(
            sequences=sequences,
            batch=settings.batch,
            accumulate=settings.accumulate,
            epochs=epochs,
            seed=settings.seed,
            # Padding is masked: any token does.
            padding=self._tokenizer.eos_token_id if padding is None else padding,
        )
        return counts, batches

    def _require_same_on_all(self) -> None:
        told = self._ranks.everyone(self._digests)
        for what in self._digests:
            other = next((rank for rank, one in enumerate(told) if one[what] != told[0][what]), None)
            if other is not None:
                raise ConfigError(f"--{what} of rank {other} is another than that of rank 0: all ranks read the same")

    def _require_tokens(self) -> None:
        model: Any = self._described.model
        held = model.get_input_embeddings().weight.shape[0]
        if len(self._tokenizer) > held:
            raise ConfigError(
                f"the tokenizer has {len(self._tokenizer):,} tokens, and the model's embedding {held:,}: they are not "
                "of one model"
            )

    # --- before ------------------------------------------------------------------------

    def plan(self) -> str:
        """What would be done."""
        options = self._settings.offload_options(self._ranks.count)
        found = planned(self._described.model, self._optimizer(), options, self._ranks.count)
        of = f"of each of {self._ranks.count} ranks:\n" if self._ranks.count > 1 else ""
        return f"{self._said()}\n\n{of}{found.plan}\n\nnothing was changed: this was a dry run"

    def _said(self) -> str:
        settings, batches = self._settings, self._batches
        what = f"adapters of rank {settings.lora}" if settings.lora else "all parameters"
        count = sum(parameter.numel() for parameter in self._described.trained)
        lines = [
            f"model: {settings.model}, {what}: {count:,} trained",
            f"data: {settings.data}: {self._counts.said(settings.max_length)}",
            f"steps: {batches.steps:,} of {settings.accumulate} x {settings.batch} rows; {self._rate.said()}",
        ]
        if self._next_step:
            lines.append(f"goes on after step {self._next_step:,}, from {' '.join(settings.storage)}")
        record = self._output.record
        if record is not None:
            changed = changes(record.machine, settings.of_the_machine())
            lines += [f"changed since the last start: {'; '.join(changed)}"] if changed else []
            others = changes(record.versions, _versions())
            if others:
                lines.append(f"other versions, whose bits may differ from here on: {'; '.join(others)}")
        return "\n".join(lines)

    def _optimizer(self) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(self._described.trained, lr=self._settings.lr, weight_decay=0.0)
        for group in made.param_groups:
            # The stored rate is the schedule's, made from this: no surprise to warn of.
            group["initial_lr"] = self._settings.lr
        return made

    # --- the run -----------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, from where the run stands."""
        settings = self._settings
        if self._beginning.existing is None:
            if not self._ranks.rank:
                print(
                    f"this run is finished: {settings.output} holds the model of step {self._batches.steps:,}, and "
                    f"{' '.join(settings.storage)} can be removed"
                )
            return
        optimizer = self._offload()
        with optimizer:
            display = open_display(self._batches.steps, self._next_step, as_json=settings.json, rank=self._ranks.rank)
            reporters = open_reporters(
                () if self._ranks.rank else settings.report,
                self._output.folder / LOGS,
                str(self._output.record and self._output.record.store),
                settings.of_the_result(),
            )
            loop = Loop(
                described=self._described,
                optimizer=optimizer,
                tokenizer=self._tokenizer,
                output=self._output,
                batches=self._batches,
                held_out=self._held_out,
                rate=self._rate,
                save_every=settings.save_every,
                seed=settings.seed,
                ranks=self._ranks,
                display=display,
                reporters=reporters,
            )
            try:
                display.tell(self._said())
                loop.run(self._next_step)
                display.tell(
                    f"{self._output.folder} holds the trained model; {' '.join(settings.storage)} can be removed"
                )
            finally:
                display.close()
                for reporter in reporters:
                    reporter.close()
                # For what is said of an interruption.
                self._next_step = (optimizer.user_state or {}).get("next_step", 0)

    def _offload(self) -> OffloadedOptimizer:
        """Offload, and keep which store it is; what is refused leaves everything as it was."""
        settings, output, existing = self._settings, self._output, self._beginning.existing
        assert existing is not None
        is_first = output.record is None
        if is_first:
            output.begin(self._record())
        try:
            weights = None if existing == "resume" else self._described.weights
            _, optimizer = offload(
                self._described.model,
                self._optimizer(),
                existing=existing,
                weights=weights,
                **settings.offloaded(self._ranks.count),
            )
        except MemascendError:
            if is_first:
                output.give_up()
            raise
        try:
            self._ranks.talk_through(optimizer)
            self._ranks.divide_nothing(self._described.model)
            if optimizer.user_state is None:
                # Once it is trained, the store itself says whose it is.
                own = optimizer.state_dict()["memascend"]["store"]
                output.change(store=self._ranks.everyone(own)[0])
            # A rank that was ahead has gone back to where all are.
            self._next_step = (optimizer.user_state or {}).get("next_step", 0)
        except BaseException:
            optimizer.close()
            raise
        return optimizer

    def _record(self) -> Record:
        settings = self._settings
        return Record(
            began=self._began.isoformat(),
            steps=self._batches.steps,
            options=settings.of_the_result(),
            machine=settings.of_the_machine(),
            digests=self._digests,
            versions=_versions(),
        )

    def position(self) -> str:
        """Where the run stands, for somebody who interrupted it."""
        return f"step {self._next_step:,} of {self._batches.steps:,} is on storage: the same command goes on from there"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("memascend", "torch", "transformers")}
