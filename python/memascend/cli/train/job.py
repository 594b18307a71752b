"""Sets a run up and decides how it begins; checks data, model, folder and storage before anything changes."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import hashlib
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memascend.cli.train.data import Batches, Encoder, Sequences, alone, packed
from memascend.cli.train.loop import JsonLines, Lines, Log, Loop, Rate, open_reporters, require_reporters, warmup_steps
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
from memascend.cli.train.settings import OF_THE_END
from memascend.distributed.opening import AS_THEY_WERE
from memascend.distributed.setup import candidates
from memascend.errors import ConfigError, MemascendError, StorageError
from memascend.session.decide import bytes_there, file_of, nearest, planned
from memascend.session.offload import offload
from memascend.session.optimizer import session_of
from memascend.storage import look
from memascend.text import Closing, bytes_shown, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TypeVar

    import torch

    from memascend.cli.train.loop import Display
    from memascend.cli.train.output import Ranks
    from memascend.cli.train.settings import Settings
    from memascend.session.optimizer import OffloadedOptimizer

    _T = TypeVar("_T")


# A sample of a weights file has its header, and values that no other model has.
_SAMPLE_BYTES = 1 << 20
_ANEW = "start a new run with another --output and --storage (and --model {output}, to continue from its weights)"
# The description of a store as JSON: its names, its run's folder, its step, its files.
_Found = dict[str, Any]
# `existing=` of `offload()`; None: the run is finished, and its store is gone.
_Existing = Literal["refuse", "replace", "resume", "previous"] | None


def find_beginning(
    output: Output, storage: tuple[str, ...], ranks: Ranks, *, previous: bool = False
) -> tuple[_Existing, int]:
    """Decide how the run begins, from its folder and its storage; all ranks do so together.

    Returns:
        `existing=` for `offload()`, and the next step of the data, counted from 0.

    Raises:
        ConfigError: the folder or the storage belongs to another run.
        StorageError: there is a store that cannot be opened.
    """
    record = output.record
    if previous and (record is None or record.store is None):
        raise ConfigError(f"--previous resumes a run, and {output.folder} holds none that has begun: leave it out")
    if record is None:
        return _first(output, storage, ranks)
    if record.store is None:
        # This run never trained, so a store of its own is not complete.
        found = next(_stores(storage, ranks, unfinished=True), None)
        if found is not None and (found["step"] or found["used"]):
            raise _foreign(storage, found, output, ranks)
        return "replace", 0
    found = next(_stores(storage, ranks), None)
    if found is None and record.saved == record.steps:
        return None, record.steps
    if found is None:
        raise gone(output, storage)
    if record.store not in found["names"]:
        raise _foreign(storage, found, output, ranks)
    return "previous" if previous else "resume", found["next_step"]


def gone(output: Output, storage: tuple[str, ...]) -> ConfigError:
    """The error of a run that has steps left and no training state."""
    return ConfigError(
        f"the training state of {output.folder} is not at {' '.join(storage)}: give the --storage of this run, "
        f"or {_ANEW.format(output=output.folder)}"
    )


def files_of_run(output: Output, storage: tuple[str, ...], ranks: Ranks) -> list[str]:
    """The files and devices that hold the run's training state. Nothing else beside them belongs to the run."""
    assert output.record is not None
    name = output.record.store
    own = [found["files"] for found in _stores(storage, ranks, unfinished=True, skips=True) if name in found["names"]]
    return sorted({file for files in own for file in files})


def said_of_files(files: list[str]) -> str:
    """The end of the last line: which files hold the training state of a finished run."""
    devices = [file for file in files if Path(file).is_block_device()]
    others = [file for file in files if file not in devices]
    said = ""
    if others:
        verb = "holds" if len(others) == 1 else "hold"
        said += f"; {', '.join(others)} {verb} its training state, which more epochs need: remove it if you want none"
    if devices:
        said += f"; its training state is on {', '.join(devices)}, which more epochs need"
    return said


def _first(output: Output, storage: tuple[str, ...], ranks: Ranks) -> tuple[_Existing, int]:
    try:
        found = next(_stores(storage, ranks), None)
    except StorageError:
        # On a device, only offload() can tell free space from foreign data, and it rejects stores and foreign data.
        if any(Path(path).is_block_device() for path in storage):
            return "refuse", 0
        raise
    if found is not None:
        raise _foreign(storage, found, output, ranks)
    return "refuse", 0


def _stores(
    storage: tuple[str, ...], ranks: Ranks, *, unfinished: bool = False, skips: bool = False
) -> Iterator[_Found]:
    """The stores that the ranks see, for any number of ranks; all ranks iterate together and get the same.

    `skips`: leave out a store that cannot be read, as one that another process has open.
    """
    # One rank after another: several may see the same store, and reading a store locks it.
    for number in range(ranks.count):
        own: list[_Found] = []
        failed: StorageError | None = None
        for places in candidates(storage, ranks.rank, ranks.count) if number == ranks.rank else ():
            try:
                own += [{**found, "seen_by": number} for found in _look_at(places, unfinished=unfinished)]
            except StorageError as error:
                # Stores that are being filled for another number of ranks are not complete.
                failed = failed or error
        if failed is not None and not own and not skips:
            raise failed
        yield from ranks.everyone(own)[number]


def _look_at(places: list[str], *, unfinished: bool) -> list[_Found]:
    """The store at these paths; empty if there is none, and with `unfinished` if it is not complete."""
    files = [file_of(path) for path in places]
    if not any(file.is_block_device() or (file.is_file() and file.stat().st_size) for file in files):
        return []
    try:
        # look() changes no byte: the store may belong to another run.
        with look(places) as store:
            state = store.user_state
            position: dict[str, Any] = state if isinstance(state, dict) else {}
            run, output, next_step = (position.get(name) for name in ("run", "output", "next_step"))
            return [
                {
                    # Another number of ranks has other stores of the same run.
                    "names": [store.info()["uuid"], *([run] if isinstance(run, str) else [])],
                    "output": output if isinstance(output, str) else None,
                    "step": store.step,
                    "next_step": next_step if isinstance(next_step, int) else 0,
                    "used": state is not None,
                    "rank": store.info()["rank"],
                    "ranks": store.info()["ranks"],
                    "files": [str(file) for file in files],
                }
            ]
    except StorageError as error:
        # An error with a number is of the system: in use, not readable. Without a number, the store is not complete.
        if unfinished and error.errno is None:
            return []
        raise


def _foreign(storage: tuple[str, ...], found: _Found, output: Output, ranks: Ranks) -> ConfigError:
    of = f"the run of --output {found['output']}" if found["output"] else f"another run (step {found['step']})"
    reordered = _reordered(storage, ranks)
    if reordered is not None:
        return ConfigError(
            f"the hosts are in another order than when {of} began, whose ranks have their stores in folders of their "
            f"hosts: {reordered}; nothing was changed: {AS_THEY_WERE}"
        )
    return ConfigError(
        f"--storage {' '.join(storage)} holds the training state of {of}, and not that of {output.folder}: name "
        f"another --storage, or remove {', '.join(found['files'])} if nothing in it is needed"
    )


def _reordered(storage: tuple[str, ...], ranks: Ranks) -> str | None:
    """The hosts that have stores of ranks that run on other hosts now; None if there are none."""
    hosts = ranks.everyone(socket.gethostname())
    seen_by: dict[int, list[int]] = {}
    for found in _stores(storage, ranks, unfinished=True, skips=True):
        if found["ranks"] == ranks.count:
            seen_by.setdefault(found["rank"], []).append(found["seen_by"])
    apart = [
        f"{hosts[seers[0]]}, which has the store of rank {rank}, starts rank {', '.join(map(str, seers))} now"
        for rank, seers in sorted(seen_by.items())
        if rank not in seers
    ]
    return "; ".join(apart) or None


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences in words."""

    def shown(value: Any) -> str:
        return "none" if value is None else str(value)

    return [
        f"{name} {shown(before.get(name))} -> {shown(value)}"
        for name, value in now.items()
        if before.get(name) != value
    ]


def model_digest(folder: Path) -> str:
    """A digest of configuration and weights: all bytes of small files, samples of large files."""
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
        """Check everything and change nothing; all ranks do so together. A run keeps the time of its first start.

        Raises:
            ConfigError: an option, an example, the model, the folder or the storage does not fit.
        """
        self._ranks = ranks
        self._settings = settings = ranks.of_this(settings)
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
        self._existing, self._next_step = find_beginning(
            self._output, settings.storage, ranks, previous=settings.previous
        )
        self._tokenizer = load_tokenizer(self._folder)
        with contextlib.ExitStack() as opened:
            self._undo = opened
            # Checks that take seconds come before the data, which may take minutes.
            self._described = describe_model(self._folder, settings)
            self._optimizer()
            self._data, self._batches = self._read(settings.data)
            self._held_out = self._read(settings.eval, held_out=True)[1] if settings.eval else None
            self._require_tokens()
            self._digests = {"model": model_digest(self._folder), "data": self._batches.sequences.digest}
            self._require_same_on_all()
            if record is not None:
                self._require_same(record)
            steps = self._batches.steps
            self._is_finished = record is not None and record.saved == steps and self._next_step == steps
            if not settings.dry_run:
                self.require_room()
            self._undo = opened.pop_all()
        # Under a constant schedule a run may get more steps than at its start; its warmup stays.
        self._rate = Rate(
            peak=settings.lr,
            steps=steps,
            warmup_steps=warmup_steps(settings.warmup, steps) if record is None else record.warmup_steps,
            schedule=settings.schedule,
            lowest=settings.min_lr,
        )

    def close(self) -> None:
        """Release the data."""
        self._undo.close()

    def _of_first(self, find: Callable[[], _T]) -> _T:
        """Call `find` on rank 0, which may download something, then on all ranks."""
        self._ranks.together(lambda: None if self._ranks.rank else find())
        return find()

    def _require_same(self, record: Record) -> None:
        """Reject options that decide the result and differ from the record's.

        Under a constant schedule a run may have more or fewer steps than at its start.
        """
        schedule, steps, done = self._settings.schedule, self._batches.steps, self._next_step
        changed = changes(record.options, self._settings.of_the_result())
        of_the_end = bool(changed) and all(change.split()[0] in OF_THE_END for change in changed)
        others = [
            f"--{name}: {why}"
            for name, why in (
                ("model", "another configuration or other weights"),
                ("data", "other tokens (another file, tokenizer or chat template)"),
            )
            if self._digests[name] != record.digests.get(name)
        ]
        if of_the_end and not others and schedule == "constant":
            if steps < done:
                raise ConfigError(
                    f"the run in {self._output.folder} has done {done} steps, and {'; '.join(changed)} would end it "
                    f"at {steps}: give at least {done} steps"
                )
        elif changed or others:
            why = (
                f"With --schedule {schedule} each learning rate depends on the number of steps, and {done} steps are "
                "done with other learning rates; only --schedule constant allows more epochs. "
            )
            raise ConfigError(
                f"the run in {self._output.folder} cannot resume: options changed: {'; '.join(changed + others)}. "
                f"{why if of_the_end else ''}Give the options that it began with, or "
                f"{_ANEW.format(output=self._output.folder)}"
            )
        if self._existing is None and steps != record.steps:
            raise gone(self._output, self._settings.storage)

    def _read(self, texts: tuple[str, ...], *, held_out: bool = False) -> tuple[str, Batches]:
        """Read examples; return a description of them, and their batches."""
        settings = self._settings
        paths, left_out = self._of_first(lambda: find_files(texts, held_out=held_out))
        encoder = Encoder(
            self._tokenizer,
            settings.max_length,
            self._began,
            lambda text: self._ranks.say(f"memascend train: {text}", as_json=True),
        )
        rows = read_rows(*paths, columns=settings.columns)
        sequences = self._undo.enter_context(Sequences(encoder.run(rows), self._output.parent))
        padding = self._tokenizer.pad_token_id
        is_packed = settings.packing and not encoder.packs_text and keeps_rows_apart(self._described.own)
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
            # Padding is masked, so any token will do.
            padding=self._tokenizer.eos_token_id if padding is None else padding,
        )
        said = f"{texts[0] if len(texts) == 1 else counted(len(paths), 'file')}: {encoder.said()}"
        if is_packed:
            said += f"; packed into {counted(len(packs), 'sequence')}, with attention within each example"
        elif settings.packing and not encoder.packs_text:
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

    def require_room(self) -> None:
        """Reject an output without space for the models that the run will save, and for a new store beside them.

        Raises:
            StorageError: it says how much is missing.
        """
        self._ranks.together(lambda: None if self._ranks.rank else self._look_for_room())

    def _look_for_room(self) -> None:
        settings, output, described = self._settings, self._output, self._described
        every, steps = settings.save_every, self._batches.steps
        record = output.record
        # A run may have been killed between a step and its save.
        saved = 0 if record is None else record.saved or 0
        left = 0 if self._is_finished else -(-steps // every) - saved // every
        tokenizer = sum(path.stat().st_size for path in self._folder.glob("tokenizer*"))
        one = sum(parameter.nbytes for parameter in described.trained) if described.adapted else described.nbytes
        needed = output.copies(left, settings.keep, finds_best=bool(settings.eval)) * (one + tokenizer)
        if settings.merge and not output.merged.exists():
            needed += described.nbytes + tokenizer
        if self._ranks.count == 1 and self._existing in ("refuse", "replace"):
            needed += self._store_beside()
        free = shutil.disk_usage(output.parent).free
        if needed > free:
            raise StorageError(
                f"--output {output.folder} needs {bytes_shown(needed)} for what this run will save, and "
                f"{bytes_shown(free)} are free: free disk space, or name another --output; nothing was changed",
                errno=errno.ENOSPC,
                path=str(output.folder),
            )

    def _store_beside(self) -> int:
        """The bytes of a new store on the file system of the output."""
        places = [file_of(path) for path in self._settings.storage]
        system = self._output.parent.stat().st_dev
        beside = [place for place in places if not place.is_block_device() and nearest(place).stat().st_dev == system]
        if not beside:
            return 0
        plan = planned(self._described.model, self._optimizer(), self._settings.offload_options(1)).plan
        there = sum(map(bytes_there, beside))
        return max(0, plan.storage_bytes * len(beside) // len(places) - there)

    # --- before ------------------------------------------------------------------------

    def plan(self) -> str:
        """The description of a dry run."""
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
            changed = changes(record.options, settings.of_the_result())
            lines += [f"changed since the last start: {'; '.join(changed)}"] if changed else []
            others = changes(record.versions, _versions())
            if others:
                lines.append(f"other versions than before, so results may differ from here on: {'; '.join(others)}")
        return "\n".join(lines)

    def _optimizer(self) -> list[torch.optim.Optimizer]:
        return make_optimizer(self._settings, self._described)

    # --- the run -----------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, from the next step."""
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
        """Train; return the files that hold the state of all ranks."""
        optimizer = self._offload()
        with optimizer:
            displays = [] if self._ranks.rank else self._displays()
            loop = Loop(
                settings=self._settings,
                described=self._described,
                optimizer=optimizer,
                tokenizer=self._tokenizer,
                output=self._output,
                batches=self._batches,
                held_out=self._held_out,
                rate=self._rate,
                ranks=self._ranks,
                displays=displays,
            )
            try:
                said = self._said()
                for display in displays:
                    display.tell(said)
                self._keep_options()
                loop.run(self._next_step)
                # The ranks can communicate only while the run is open.
                self._merge()
                told = self._ranks.everyone(session_of(optimizer).run.resources.store.info()["devices"])
                return sorted({file for own in told for file in own})
            finally:
                for display in displays:
                    display.close()
                # For the message after an interruption.
                self._next_step = (optimizer.user_state or {}).get("next_step", 0)

    def _displays(self) -> list[Display]:
        """The displays of rank 0: the log, which has a step even if standard output is closed; for people; --report."""
        settings, folder = self._settings, self._output.folder
        assert self._output.record is not None
        return [
            Log(settings.log or folder / LOG),
            JsonLines() if settings.json else Lines(),
            *open_reporters(settings.report, folder / LOGS, str(self._output.record.store), settings.of_the_result()),
        ]

    def _keep_options(self) -> None:
        """Record the options of this start, and a new number of steps."""
        output, settings, steps = self._output, self._settings, self._batches.steps
        output.resolve(settings.resolved())
        options, record = settings.of_the_result(), output.record
        assert record is not None
        if (record.steps, record.options) != (steps, options):
            output.change(steps=steps, options=options, warmup_steps=self._rate.warmup_steps)

    def _offload(self) -> OffloadedOptimizer:
        """Offload, and record the store. An error leaves everything as it was."""
        settings, output, existing = self._settings, self._output, self._existing
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
                # From the first step on, the store names its run itself.
                own = optimizer.state_dict()["memascend"]["store"]
                output.change(store=self._ranks.everyone(own)[0])
            # A rank that was ahead has returned to the commit that all ranks have.
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
            digests=self._digests,
            versions=_versions(),
        )

    def position(self) -> str:
        """The position of the run, for the message after an interruption."""
        again = " without --previous" if self._settings.previous else ""
        return (
            f"step {self._next_step:,} of {self._batches.steps:,} is on storage: run the same command{again} to resume"
        )

    @property
    def has_steps(self) -> bool:
        """Whether the store has a step."""
        return self._next_step > 0

    def on_full_disk(self, error: OSError) -> StorageError:
        """The error of a disk without space, which the run survives."""
        done, steps = self._next_step, self._batches.steps
        then = "saves the model" if done == steps else f"resumes after step {done:,}"
        kept = f"no step is lost: {'all' if done == steps else 'the first'} {counted(done, 'step')} are in the store"
        again = "the same command" + (" without --previous" if self._settings.previous else "")
        path = getattr(error, "path", None) or error.filename
        return StorageError(f"{error}; {kept}. Free disk space, and {again} {then}", errno=error.errno, path=path)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("memascend", "torch", "transformers")}
