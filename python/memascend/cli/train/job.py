"""Puts a run together and decides how it begins; data, model, folder and storage are looked at before any change."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memascend.cli.train.data import Batches, Counts, Encoder, Sequences, alone, packed
from memascend.cli.train.loop import Log, Loop, Rate, open_display, open_reporters, require_reporters, warmup_steps
from memascend.cli.train.model import (
    describe_model,
    keeps_rows_apart,
    load_tokenizer,
    make_optimizer,
    merge,
    require_transformers,
)
from memascend.cli.train.output import LOG, LOGS, Output, Record
from memascend.cli.train.rows import find_files, find_model, read_rows
from memascend.cli.train.settings import OF_THE_END, with_defaults
from memascend.distributed.setup import candidates
from memascend.errors import ConfigError, MemascendError, StorageError
from memascend.session.decide import file_of, planned
from memascend.session.offload import offload
from memascend.session.optimizer import session_of
from memascend.storage import look
from memascend.text import Closing, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    import torch

    from memascend.cli.train.output import Ranks
    from memascend.cli.train.settings import Settings
    from memascend.session.optimizer import OffloadedOptimizer

    _T = TypeVar("_T")


# Of a weights file: its header is there, and values that no other model has.
_SAMPLE_BYTES = 1 << 20
_ANEW = "start a new run with another --output and --storage (and --model {output}, to continue from its weights)"


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What to do."""

    existing: Literal["refuse", "replace", "resume", "previous"] | None  # for `offload()`; None: the store is gone
    next_step: int = 0  # the data's, counted from 0


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a store says."""

    uuid: str  # which store it is
    run: str | None  # which run's, where it was trained. Another number of ranks has other stores of the same run.
    output: str | None  # its folder
    step: int  # committed
    next_step: int  # the data's
    used: bool  # whether anybody left something of his own in it
    files: tuple[str, ...]  # that it lies in

    def is_of(self, record: Record) -> bool:
        return record.store in (self.uuid, self.run)


def find_beginning(output: Output, storage: tuple[str, ...], ranks: Ranks, *, previous: bool = False) -> Beginning:
    """Look at the folder and at the storage; all ranks do so together, and find the same.

    Raises:
        ConfigError: one of them is of another run.
        StorageError: a store is there and cannot be opened.
    """
    record = output.record
    if previous and (record is None or record.store is None):
        raise ConfigError(f"--previous resumes a run, and {output.folder} holds none that has begun: leave it out")
    if record is None:
        return _first(output, storage, ranks)
    if record.store is None:
        # Nothing of this run was ever trained: whatever of its store is there was not whole yet.
        found = _look(storage, ranks, unfinished=True)
        if found is not None and (found.step or found.used):
            raise _foreign(storage, found, output)
        return Beginning(existing="replace")
    found = _look(storage, ranks)
    if found is None and record.is_finished:
        return Beginning(existing=None, next_step=record.steps)
    if found is None:
        raise gone(output, storage)
    if not found.is_of(record):
        raise _foreign(storage, found, output)
    return Beginning(existing="previous" if previous else "resume", next_step=found.next_step)


def gone(output: Output, storage: tuple[str, ...]) -> ConfigError:
    """The error of a run that has steps to do, and no training state."""
    return ConfigError(
        f"the training state of {output.folder} is not at {_named(storage)}: give the --storage of this run, "
        f"or {_ANEW.format(output=output.folder)}"
    )


def files_of_run(output: Output, storage: tuple[str, ...], ranks: Ranks) -> list[str]:
    """The files and devices that hold the run's training state: they, and nothing beside them, are the run's."""
    record = output.record
    assert record is not None
    own: set[str] = set()
    # One rank after the other: several may see the same store, and who looks at it locks it.
    for number in range(ranks.count):
        for place in candidates(storage, ranks.rank, ranks.count) if number == ranks.rank else []:
            with contextlib.suppress(StorageError):
                found = _look_at(place, unfinished=True)
                if found is not None and found.is_of(record):
                    own.update(found.files)
        ranks.everyone(None)
    return sorted({file for one in ranks.everyone(sorted(own)) for file in one})


def said_of_files(files: list[str]) -> str:
    """What may be done with them, once the run is over."""
    if not files:
        return ""
    devices = [file for file in files if Path(file).is_block_device()]
    others = [file for file in files if file not in devices]
    said = ""
    if others:
        verb = "holds" if len(others) == 1 else "hold"
        said += f"; {', '.join(others)} {verb} its training state, which more epochs need: remove it if you want none"
    if devices:
        said += f"; its training state is on {', '.join(devices)}, which more epochs need"
    return said


def _first(output: Output, storage: tuple[str, ...], ranks: Ranks) -> Beginning:
    try:
        found = _look(storage, ranks)
    except StorageError:
        # On a device, only offload() tells none from a foreign one; it refuses both a store and what is foreign.
        if any(Path(path).is_block_device() for path in storage):
            return Beginning(existing="refuse")
        raise
    if found is not None:
        raise _foreign(storage, found, output)
    return Beginning(existing="refuse")


def _look(storage: tuple[str, ...], ranks: Ranks, *, unfinished: bool = False) -> _Found | None:
    """What the store says that the first rank sees of those that have one, of whatever number of ranks."""
    # One after the other: several may see the same store, and who looks at it locks it.
    for number in range(ranks.count):
        own = _look_at_own(storage, ranks, unfinished=unfinished) if number == ranks.rank else None
        told = ranks.everyone(None if own is None else asdict(own))[number]
        if told is not None:
            return _Found(**{**told, "files": tuple(told["files"])})
    return None


def _look_at_own(storage: tuple[str, ...], ranks: Ranks, *, unfinished: bool) -> _Found | None:
    refused: StorageError | None = None
    for place in candidates(storage, ranks.rank, ranks.count):
        try:
            found = _look_at(place, unfinished=unfinished)
        except StorageError as error:
            # New stores that are being filled from those of another number of ranks are not whole.
            refused = refused or error
            continue
        if found is not None:
            return found
    if refused is not None:
        raise refused
    return None


def _look_at(places: list[str], *, unfinished: bool) -> _Found | None:
    """What the store at these paths says; None where there is none, and with `unfinished` where it is not whole."""
    files = [file_of(path) for path in places]
    if not any(file.is_block_device() or (file.is_file() and file.stat().st_size) for file in files):
        return None
    try:
        # What is looked at stays as it is to the byte: it may be another's.
        with look(places) as store:
            state = store.user_state
            position: dict[str, Any] = state if isinstance(state, dict) else {}
            run, output, next_step = (position.get(name) for name in ("run", "output", "next_step"))
            return _Found(
                uuid=store.info()["uuid"],
                run=run if isinstance(run, str) else None,
                output=output if isinstance(output, str) else None,
                step=store.step,
                next_step=next_step if isinstance(next_step, int) else 0,
                used=state is not None,
                files=tuple(str(file) for file in files),
            )
    except StorageError as error:
        # With a number the system refused it: in use, not readable. Without one it is no whole store.
        if unfinished and error.errno is None:
            return None
        raise


def _foreign(storage: tuple[str, ...], found: _Found, output: Output) -> ConfigError:
    of = f"the run of --output {found.output}" if found.output else f"another run (step {found.step})"
    return ConfigError(
        f"--storage {_named(storage)} holds the training state of {of}, and not that of {output.folder}: name another "
        f"--storage, or remove {', '.join(found.files)} if nothing in it is needed"
    )


def _named(storage: tuple[str, ...]) -> str:
    return " ".join(storage)


def require_same(
    record: Record, options: Mapping[str, Any], digests: Mapping[str, str], output: Path, *, steps: int, done: int
) -> None:
    """Refuse options that decide the result and are others than at the beginning.

    Where the rate stays, a run may have more or fewer steps than it began with.

    Args:
        record: what the run is.
        options: that are given now.
        digests: of the model and the data that are given now.
        output: the folder.
        steps: that these options make.
        done: that are committed.

    Raises:
        ConfigError: some are; it lists them and says what to do.
    """
    changed = changes(with_defaults(record.options), options)
    of_the_end = changed and all(change.split()[0] in OF_THE_END for change in changed)
    if digests.get("model") != record.digests.get("model"):
        changed.append("--model: another configuration or other weights")
    if digests.get("data") != record.digests.get("data"):
        changed.append("--data: other tokens (another file, tokenizer or chat template)")
    if not changed:
        return
    if of_the_end and len(changed) <= len(OF_THE_END) and options["--schedule"] == "constant":
        if steps >= done:
            return
        raise ConfigError(
            f"the run in {output} has done {done} steps, and {'; '.join(changed)} would end it at {steps}: give at "
            f"least {done} steps"
        )
    why = ""
    if of_the_end:
        why = (
            f"With --schedule {options['--schedule']} each learning rate depends on the number of steps, and {done} "
            "steps are done with other learning rates; only --schedule constant allows more epochs. "
        )
    raise ConfigError(
        f"the run in {output} cannot resume: options changed: {'; '.join(changed)}. {why}Give the options that it "
        f"began with, or {_ANEW.format(output=output)}"
    )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words."""
    return [
        f"{name} {_shown(before.get(name))} -> {_shown(value)}"
        for name, value in now.items()
        if before.get(name) != value
    ]


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def model_digest(folder: Path) -> str:
    """Of configuration and weights: all bytes of what is small, samples of what is large."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if not path.is_file():
            continue
        nbytes = path.stat().st_size
        digest.update(f"{path.name}\0{nbytes}\0".encode())
        with path.open("rb") as file:
            for start in sorted({0, nbytes // 2, max(0, nbytes - _SAMPLE_BYTES)}):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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
            raise ConfigError(
                "--model and --output are one folder, and training would overwrite the model: give another --output"
            )
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
            self._data, self._batches = self._read(settings.data)
            self._held_out = self._read(settings.eval, held_out=True)[1] if settings.eval else None
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

    def _read(self, texts: tuple[str, ...], *, held_out: bool = False) -> tuple[str, Batches]:
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
            said += f"; packed into {counted(len(packs), 'sequence')}, with attention within each example"
        elif settings.packing and not counts.packs_text:
            said += f"; not packed: {type(self._described.own).__name__} would mix examples that share a sequence"
        return f"{said}; {left_out}" if left_out else said, batches

    def _require_same_on_all(self) -> None:
        told = self._ranks.everyone(self._digests)
        for what in self._digests:
            other = next((rank for rank, one in enumerate(told) if one[what] != told[0][what]), None)
            if other is not None:
                raise ConfigError(f"--{what} of rank {other} differs from that of rank 0: give all ranks the same")

    def _require_tokens(self) -> None:
        model: Any = self._described.model
        held = model.get_input_embeddings().weight.shape[0]
        if len(self._tokenizer) > held:
            raise ConfigError(
                f"the tokenizer has {len(self._tokenizer):,} tokens, and the model's embedding {held:,}: use the "
                "tokenizer of this model"
            )

    # --- before ------------------------------------------------------------------------

    def plan(self) -> str:
        """What would be done."""
        options = self._settings.offload_options(self._ranks.count)
        found = planned(self._described.model, self._optimizer(), options, self._ranks.count)
        of = f"of each of {self._ranks.count} ranks:\n" if self._ranks.count > 1 else ""
        return f"{self._said()}\n\n{of}{found.plan}\n\nthis was a dry run: nothing was changed"

    def _said(self) -> str:
        settings, batches = self._settings, self._batches
        what = f"adapters of rank {settings.lora}" if settings.lora else "all parameters"
        unit = "packed sequence" if batches.is_packed else "example"
        count = sum(parameter.numel() for parameter in self._described.trained)
        lines = [
            f"model: {settings.model}, {what}: {count:,} trained",
            f"data: {self._data}",
            f"steps: {batches.steps:,} of {settings.accumulate} x {counted(settings.batch, unit)}; {self._rate.said()}",
        ]
        if self._next_step:
            lines.append(f"resumes after step {self._next_step:,}, from {' '.join(settings.storage)}")
        record = self._output.record
        if record is not None:
            changed = changes(with_defaults(record.machine), settings.of_the_machine())
            changed += changes(with_defaults(record.options), settings.of_the_result())
            lines += [f"changed since the last start: {'; '.join(changed)}"] if changed else []
            others = changes(record.versions, _versions())
            if others:
                lines.append(f"other versions than before, so results may differ from here on: {'; '.join(others)}")
        return "\n".join(lines)

    def _optimizer(self) -> list[torch.optim.Optimizer]:
        return make_optimizer(self._settings, self._described)

    # --- the run -----------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, from where the run stands."""
        settings, output = self._settings, self._output
        if self._is_finished:
            self._merge()
            files = files_of_run(output, settings.storage, self._ranks)
            held = f"this run is finished: {output.folder} holds the {self._made} of step {self._batches.steps:,}"
        else:
            files = self._train()
            held = f"{output.folder} holds the trained {self._made}"
        merged = f", {output.merged} the model with adapters added" if output.merged.is_dir() else ""
        self._ranks.say(f"{held}{merged}{said_of_files(files)}", as_json=settings.json)

    @property
    def _made(self) -> str:
        return "adapters" if self._described.adapted else "model"

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
            f"step {self._next_step:,} of {self._batches.steps:,} is on storage: run the same command{again} to resume"
        )


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("memascend", "torch", "transformers")}
