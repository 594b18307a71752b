"""Puts a run together: data, model, folder and storage, each looked at before anything is changed."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import TYPE_CHECKING, Any

from memascend.cli.train.batches import Batches, alone, packed
from memascend.cli.train.beginning import (
    changes,
    files_of_run,
    find_beginning,
    gone,
    model_digest,
    require_same,
    said_of_files,
)
from memascend.cli.train.display import Log, open_display
from memascend.cli.train.encoding import Counts, Encoder
from memascend.cli.train.files import find_files, find_model
from memascend.cli.train.loop import Loop
from memascend.cli.train.model import describe_model, keeps_rows_apart, load_tokenizer, merge, require_transformers
from memascend.cli.train.optimizer import make_optimizer
from memascend.cli.train.output import LOG, LOGS, Output, Record
from memascend.cli.train.rate import Rate, warmup_steps
from memascend.cli.train.reporters import open_reporters, require_reporters
from memascend.cli.train.rows import read_rows
from memascend.cli.train.sequences import Sequences
from memascend.cli.train.settings import with_defaults
from memascend.closing import Closing
from memascend.errors import ConfigError, MemascendError
from memascend.formatting import counted
from memascend.run.decision import planned
from memascend.run.offloading import offload
from memascend.run.optimizer import session_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    import torch

    from memascend.cli.train.ranks import Ranks
    from memascend.cli.train.settings import Settings
    from memascend.run.optimizer import OffloadedOptimizer

    _T = TypeVar("_T")


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
        self._folder = self._of_first(lambda: find_model(settings.model))
        if self._folder.resolve() == settings.output.resolve():
            raise ConfigError("--model and --output are one folder, and training would write over what it began from")
        self._output = Output(settings.output, ranks)
        record = self._output.record
        self._began = dt.datetime.fromisoformat(ranks.everyone(now.isoformat())[0] if record is None else record.began)
        self._beginning = find_beginning(self._output, settings.storage, ranks, previous=settings.previous)
        self._tokenizer = load_tokenizer(self._folder)
        self._next_step = self._beginning.next_step
        try:
            # What can be refused at once comes before the data, which may take minutes.
            self._described = describe_model(self._folder, settings)
            self._optimizer()
            self._data, self._counts, self._batches = self._read(settings.data)
            self._held_out = self._read(settings.eval, held_out=True)[2] if settings.eval else None
            self._require_tokens()
            self._digests = {"model": model_digest(self._folder), "data": self._batches.sequences.digest}
            self._require_same_on_all()
            if record is not None:
                self._require_same(record)
        except BaseException:
            self._undo.close()
            raise
        steps = self._batches.steps
        # A rate that stays may have more steps than the run began with, and warms up as it did then.
        warm = warmup_steps(settings.warmup, steps if record is None else record.steps)
        self._rate = Rate(
            peak=settings.lr,
            steps=steps,
            warmup_steps=warm if record is None or record.warmup_steps is None else record.warmup_steps,
            schedule=settings.schedule,
            lowest=settings.min_lr,
        )
        self._is_finished = record is not None and record.saved == steps and self._next_step == steps

    def close(self) -> None:
        """Let go of the data."""
        self._undo.close()

    def _of_first(self, find: Callable[[], _T]) -> _T:
        """What each rank finds, once the first has; it may have to download it."""
        self._ranks.together(lambda: None if self._ranks.rank else find())
        return find()

    def _require_same(self, record: Record) -> None:
        require_same(
            record,
            self._settings.of_the_result(),
            self._digests,
            self._output.folder,
            steps=self._batches.steps,
            done=self._next_step,
        )
        if self._beginning.existing is None and self._batches.steps != record.steps:
            raise gone(self._output, self._settings.storage)

    def _read(self, texts: tuple[str, ...], *, held_out: bool = False) -> tuple[str, Counts, Batches]:
        """Rows, in words too, and the batches of them."""
        settings = self._settings
        paths, left_out = self._of_first(lambda: find_files(texts, held_out=held_out))
        counts = Counts()
        encoder = Encoder(self._tokenizer, settings.max_length, self._began, self._ranks.note)
        rows = read_rows(*paths, columns=settings.columns)
        sequences = self._undo.enter_context(Sequences(encoder.run(rows, counts), self._output.parent))
        padding = self._tokenizer.pad_token_id
        is_packed = settings.packing and not counts.packs_text and keeps_rows_apart(self._described.own)
        packs = packed(sequences, settings.max_length, settings.seed) if is_packed else alone(sequences)
        batches = Batches(
            sequences=sequences,
            packs=packs,
            is_packed=is_packed,
            batch=settings.batch,
            accumulate=settings.accumulate,
            epochs=1 if held_out else settings.epochs,
            steps_max=None if held_out else settings.max_steps,
            seed=settings.seed,
            # Padding is masked: any token does.
            padding=self._tokenizer.eos_token_id if padding is None else padding,
        )
        said = f"{texts[0] if len(texts) == 1 else counted(len(paths), 'file')}: {counts.said(settings.max_length)}"
        if is_packed:
            said += f"; packed into {counted(len(packs), 'sequence')}, in which no row sees another"
        elif settings.packing and not counts.packs_text:
            said += f"; not packed: {type(self._described.own).__name__} would not keep rows apart"
        return f"{said}; {left_out}" if left_out else said, counts, batches

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
        unit = "packed sequence" if batches.is_packed else "row"
        count = sum(parameter.numel() for parameter in self._described.trained)
        lines = [
            f"model: {settings.model}, {what}: {count:,} trained",
            f"data: {self._data}",
            f"steps: {batches.steps:,} of {settings.accumulate} x {counted(settings.batch, unit)}; {self._rate.said()}",
        ]
        if self._next_step:
            lines.append(f"goes on after step {self._next_step:,}, from {' '.join(settings.storage)}")
        record = self._output.record
        if record is not None:
            changed = changes(with_defaults(record.machine), settings.of_the_machine())
            changed += changes(with_defaults(record.options), settings.of_the_result())
            lines += [f"changed since the last start: {'; '.join(changed)}"] if changed else []
            others = changes(record.versions, _versions())
            if others:
                lines.append(f"other versions, whose bits may differ from here on: {'; '.join(others)}")
        return "\n".join(lines)

    def _optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self._settings, self._described)

    # --- the run -----------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, from where the run stands."""
        settings, output = self._settings, self._output
        if self._is_finished:
            self._merge()
            files = files_of_run(output, settings.storage, self._ranks)
            held = f"this run is finished: {output.folder} holds the model of step {self._batches.steps:,}"
        else:
            files = self._train()
            held = f"{output.folder} holds the trained model"
        merged = f", {output.merged} the model with its adapters added" if output.merged.is_dir() else ""
        self._ranks.say(f"{held}{merged}{said_of_files(files)}", as_json=settings.json)

    def _merge(self) -> None:
        if self._settings.merge:
            self._output.merge(lambda new: merge(self._folder, self._output.folder, new, self._tokenizer))

    def _train(self) -> list[str]:
        """Train; the files that hold the state of all ranks."""
        settings = self._settings
        optimizer = self._offload()
        with optimizer:
            steps, rank = self._batches.steps, self._ranks.rank
            display = open_display(steps, self._next_step, as_json=settings.json, rank=rank)
            if not rank:
                display = Log(settings.log or self._output.folder / LOG, display)
            reporters = open_reporters(
                () if rank else settings.report,
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
                eval_every=settings.eval_every,
                keep=settings.keep,
                seed=settings.seed,
                ranks=self._ranks,
                display=display,
                reporters=reporters,
            )
            try:
                display.tell(self._said())
                self._keep_options()
                loop.run(self._next_step)
                # The ranks talk as long as the run is open.
                self._merge()
                told = self._ranks.everyone(session_of(optimizer).run.resources.store.info()["devices"])
                return sorted({file for own in told for file in own})
            finally:
                display.close()
                for reporter in reporters:
                    reporter.close()
                # For what is said of an interruption.
                self._next_step = (optimizer.user_state or {}).get("next_step", 0)

    def _keep_options(self) -> None:
        """What the run is from now on: where it goes on longer than it began, and what is no part of the result."""
        output, settings, steps = self._output, self._settings, self._batches.steps
        output.resolve(settings.resolved())
        options, record = settings.of_the_result(), output.record
        assert record is not None
        if (record.steps, record.options) != (steps, options):
            output.change(steps=steps, options=options, warmup_steps=self._rate.warmup_steps)

    def _offload(self) -> OffloadedOptimizer:
        """Offload, and keep which store it is; what is refused leaves everything as it was."""
        settings, output, existing = self._settings, self._output, self._beginning.existing
        assert existing is not None
        is_first = output.record is None
        if is_first:
            output.begin(self._record())
        try:
            weights = None if existing in ("resume", "previous") else self._described.weights
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
            warmup_steps=self._rate.warmup_steps,
            options=settings.of_the_result(),
            machine=settings.of_the_machine(),
            digests=self._digests,
            versions=_versions(),
        )

    def position(self) -> str:
        """Where the run stands, for somebody who interrupted it."""
        again = " without --previous" if self._settings.previous else ""
        return (
            f"step {self._next_step:,} of {self._batches.steps:,} is on storage: the same command{again} goes on from "
            "there"
        )


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("memascend", "torch", "transformers")}
