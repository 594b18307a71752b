"""Opens a run's store and writes its first values; closes an earlier run of this process that has the store open."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend import storage as engines
from memascend.checkpoint.init import MetaBuffers, ModelValues
from memascend.checkpoint.reader import Checkpoint, CheckpointValues
from memascend.checkpoint.weights import open_weights, sources_of
from memascend.distributed.rows import Partition
from memascend.errors import ConfigError, StorageError, UsageError
from memascend.optim.members import is_owners, is_roster, title_of
from memascend.optim.shared import require_as_many
from memascend.optim.state import options_of_formats
from memascend.plan.decision import folders_of
from memascend.session.decide import temporary
from memascend.session.optimizer import session_of
from memascend.storage.store import foreign_contents_error
from memascend.text import Progress, expanded, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from memascend.distributed.replicas import Refill
    from memascend.distributed.reshard import EarlierValues
    from memascend.plan.decision import Decision
    from memascend.plan.table import Plan
    from memascend.session.decide import Subject
    from memascend.session.optimizer import OffloadedOptimizer
    from memascend.storage import Engine, Store

    # The source of a store's first values. `FirstValues.prepare` calls its method `check` before a value is written.
    # Then `FirstValues.write` reads each parameter once.
    ValueSource = ModelValues | CheckpointValues | EarlierValues | Refill


# The optimizers of this process that `offload()` returned. A closed optimizer stays in this set until Python collects
# it.
RUNS: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()


def holds(run: OffloadedOptimizer, paths: Sequence[str]) -> str | None:
    """Returns a file of the run's store that is at one of `paths`.

    The result is None if there is no such file, or if the store is not open in this process.
    """
    resources = session_of(run).run.resources
    # A forked child must not call the store: a thread that exists only in the parent may hold the store's locks.
    is_passed_over = resources.closed or resources.process.is_elsewhere
    files = [] if is_passed_over else [os.fspath(file) for file in resources.store.info()["devices"]]
    return next((file for file in files for path in paths if _is_at(file, path)), None)


def _close_holders(subject: Subject, records: list[engines.Record]) -> None:
    """Closes the run of this process that has the store open, with a warning.

    Raises an error, and leaves that run open, if `existing` does not allow closing the run, or if the store does not
    fit this call.
    """
    existing, paths = subject.options.existing, subject.options.paths or ()
    for run in list(RUNS):
        file = holds(run, paths)
        if file is None:
            continue
        if existing not in ("resume", "replace"):
            raise StorageError(
                f"{file}: another run of this process has this store open: call optimizer.close() of that run, or "
                'pass existing="resume" or "replace", with which offload() closes that run',
                errno=errno.EBUSY,
                path=file,
            )
        _require_fits(subject, records, session_of(run).run.resources.store)
        unkept = ""
        try:
            run.close()
        except UsageError as error:
            # `run` is closed despite this error. The error (such as a write to a copy of the weights of `run`) is added
            # to the warning below, because the present call of `offload()` did not cause it.
            unkept = f"; {error}"
        warn(
            f"{file}: a run of this process had this store open and was closed at step {run.steps}; the model of that "
            f"run cannot be used any more (call optimizer.close() before offload() to avoid this warning){unkept}"
        )


def _is_at(file: str, path: str) -> bool:
    """True if `path`, as given to `offload()`, names `file` or the folder that contains it."""
    given = Path(path)
    try:
        return given.samefile(Path(file).parent if given.is_dir() else file)
    except OSError:
        return False


_log = logging.getLogger("memascend")


def _require_fits(subject: Subject, records: list[engines.Record], store: Store) -> None:
    """Rejects a store that another run of this process has open and that does not fit this call.

    The check runs before the other run is closed.
    """
    where = store.info()["devices"][0]
    difference = store.difference(records, optimizer=title_of(subject.original))
    if subject.options.existing == "replace":
        if difference is not None:
            raise ConfigError(
                f"the store at {where} belongs to a run of a different model or optimizer, which this process has open "
                f"at step {store.step} ({difference}), and existing='replace' would destroy that run. Nothing was "
                "changed, and that run continues: pass a different storage=, or call optimizer.close() of that run "
                "first"
            )
        # The store fits this model and optimizer, as when a notebook's cell runs again: "replace" may close the run.
        return
    _require_format(store, records)
    if difference is not None:
        raise ConfigError(
            f"the store at {where} does not fit: {difference}. Nothing was changed, and the run that has the store "
            "open continues: resume with the model and the optimizer of that run, or call optimizer.close() of that "
            "run and pass existing='replace' to overwrite the store"
        )
    subject.arithmetic.require_members(store.hyperparameters, f"the store at {where}")
    require_as_many(subject.original.param_groups, (store.hyperparameters or {}).get("groups"))


def open_store(subject: Subject, records: list[engines.Record]) -> Store:
    """Opens or creates the store; if another run of this process has the store open, closes that run first."""
    options = subject.options
    paths = list(options.paths or ())

    def create(where: str | list[str]) -> Store:
        return engines.Store.create(
            where,
            records,
            optimizer=title_of(subject.original),
            existing=options.existing,
            durability=subject.durability,
        )

    if not paths:
        return temporary(create, None if options.scratch is None else folders_of(options)[0])
    try:
        store = None
        try:
            store = create(paths)
        except StorageError as error:
            if error.errno != errno.EBUSY:
                raise
        if store is None:
            # A model that user code has dropped may be part of reference cycles. Collecting the model closes its run.
            gc.collect()
            # `_close_holders` is called outside of the `except` block, because `close()` does not check copies of
            # weights while an exception is handled.
            _close_holders(subject, records)
            store = create(paths)
    except ConfigError:
        if options.resumes:
            # If the formats of state differ, raise the error that says how to convert the store.
            with contextlib.suppress(StorageError), engines.Store.open(paths) as store:
                _require_format(store, records)
        raise
    if subject.sharding is None or subject.sharding.layout.size == 1:
        _require_whole(store)
    return store


def _require_whole(store: Store) -> None:
    """Rejects and closes a store of a run with several ranks, because the present run has only one process."""
    info = store.info()
    if info["ranks"] is not None:
        store.end()
        store.close()
        if info["ranks"] == 1:
            raise ConfigError(
                f"the store at {info['devices'][0]} belongs to rank {info['rank']} of a run with several ranks, but "
                "this run has only one process. Start all ranks as before and call optimizer.save(folder); then start "
                "the one process with checkpoint=folder. Nothing was changed"
            )
        raise ConfigError(
            f"the store at {info['devices'][0]} belongs to rank {info['rank']} of a run that shards the model among "
            f"{info['ranks']} ranks, but this run has only one process. Pass the folder that has the stores of all "
            f"ranks as storage=, since one process can resume from it, or start {info['ranks']} ranks. Nothing was "
            "changed"
        )


def _require_format(store: Store, records: list[engines.Record]) -> None:
    """Rejects a store with optimizer state in another format; the message says how to resume or convert the store."""
    there = options_of_formats(record["format"] for record in store.each_record())
    asked = options_of_formats(record.format for record in records)
    if there != asked:
        raise ConfigError(
            f"the store at {store.info()['devices'][0]} was made with {there}, but this call asks for {asked}. To "
            f"resume the store, pass {there}. To convert the store, resume it with {there}, call "
            f"optimizer.save(folder), and start a new store with offload(checkpoint=folder, {asked}). Nothing was "
            "changed"
        )


def _hyperparameters(store: Store) -> dict[str, Any]:
    """Returns the hyperparameters of the last commit; rejects hyperparameters that memascend cannot have written."""
    # `store.user_state` raises an error if the stored text is not JSON.
    stored, _ = store.hyperparameters or {}, store.user_state
    if isinstance(stored, dict):
        groups = stored.get("groups", [])
        if isinstance(groups, list) and is_roster(stored.get("members", [])) and is_owners(stored.get("owners", [])):
            objects = [*groups, stored.get("attributes") or {}, stored.get("loss_scale") or {}]
            if all(isinstance(one, dict) for one in objects):
                return stored
    raise foreign_contents_error(
        store.info()["devices"][0], f"the hyperparameters of step {store.step} are not those of an optimizer"
    )


def end_log(store: Store, engine: Engine) -> None:
    """Replays the gradient log, if it has steps, so that all records have the state of the last step."""
    steps = store.info()["log_steps"]
    if not steps:
        return
    # With `existing="previous"`, drop the newest commit for good before the replay writes anything.
    store.go_back()
    with Progress(f"applying {steps} logged steps", 0) as progress:
        engine.replay(progress.reached)


def begin_places(store: Store, names: Sequence[str]) -> Sequence[str] | None:
    """Reserves a second place on storage for each gradient of `names`, so that updates of `names` may be deferred.

    Returns `names`, or None if the disk has too little free space.
    """
    if not names or store.keep_places(names):
        return names
    _log.warning(
        "too little disk space to defer the updates of %d parameters to the next step: a step() that clips gradients "
        "takes longer. Free disk space before the next start",
        len(names),
    )
    return None


def begin_log(store: Store, plan: Plan) -> Plan:
    """Reserves disk space for the gradient log of parameters kept in RAM; returns the plan with the log that fits."""
    steps = store.keep_log(plan.logged, plan.log_steps) if plan.log_steps else 0
    if steps < plan.log_wanted:
        instead = f"only {steps} steps" if steps else "no steps, so parameters kept in RAM are written whole each step"
        _log.warning(
            "no disk space for a gradient log of %d steps: the log holds %s. Free disk space before the next start",
            plan.log_wanted,
            instead,
        )
    return plan.logging(steps, store.info()["log_bytes"]) if plan.log_steps else plan


class FirstValues:
    """Checks first values and writes them to a new store, or reads values back from an existing store."""

    def __init__(self, subject: Subject, undo: contextlib.ExitStack) -> None:
        """Opens the weights, if any; replaces buffers on meta; `undo` puts them back if `offload()` fails."""
        self._subject = subject
        self._undo = undo
        self._meta_buffers = MetaBuffers(subject.model)
        weights = subject.options.weights
        if weights is None and subject.options.checkpoint is None:
            weights = sources_of(subject.model)
        self._weights = None if weights is None else open_weights(weights)
        self._source: ValueSource | None = None
        self._meta_buffers.install()
        undo.callback(self._meta_buffers.uninstall)

    def prepare(self, *, created: bool) -> None:
        """Checks the first values before one of them is written, and computes buffers that were on meta.

        `created`: the store is new. Otherwise the store has the values, so only the buffers are computed.
        """
        subject = self._subject
        if created:
            self._source = self._found()
            self._source.check()
            if subject.earlier is not None:
                subject.arithmetic.require_members(self._source.hyperparameters(), "the earlier run")
        given = (self._weights, subject.options.checkpoint, subject.earlier, subject.refilled)
        initialised = created and all(one is None for one in given)
        self._meta_buffers.rebuild(self._weights, saved=initialised)
        count = sum(parameter.is_meta for parameter in subject.named.values())
        if count and initialised:
            _log.info(
                "%d parameters on meta are initialised by the model's own code, from torch's default generator", count
            )

    def _found(self) -> ValueSource:
        subject, sharding = self._subject, self._subject.sharding
        partition = sharding or Partition()
        if subject.refilled is not None:
            return subject.refilled
        if subject.earlier is not None:
            from memascend.distributed.reshard import EarlierValues

            shapes = {name: own.shape for name, own in subject.named.items()} if sharding is None else sharding.shapes
            return EarlierValues(subject.earlier, shapes, subject.named, self._described, title_of(subject.original))
        if subject.options.checkpoint is not None:
            return CheckpointValues(Checkpoint(expanded(subject.options.checkpoint)), subject, partition)
        return ModelValues(subject, self._weights, self._meta_buffers.saved, partition)

    def _described(self, name: str) -> dict[str, torch.Tensor]:
        """Returns a parameter's state tensors by name, on meta; an empty dict if the parameter is not trained."""
        subject = self._subject
        return subject.arithmetic.of(subject.named[name]).describe() if name in subject.trained else {}

    def write(self, engine: Engine, decision: Decision) -> dict[str, Any]:
        """Writes and commits the first values; returns the committed hyperparameters."""
        subject, source = self._subject, self._source
        assert source is not None
        with Progress("writing the model to storage", decision.sizes.slot_bytes) as progress:
            waiting = 0
            with contextlib.closing(source.parameters(decision.plan.units)) as firsts:
                for name, values, state, step in firsts:
                    engine.fill(name, values, state, step=step)
                    waiting += values.nbytes + sum(tensor.nbytes for tensor in state.values())
                    if waiting >= decision.plan.queue_bytes:
                        # The engine keeps these values in memory until they are written, and `queue_bytes` limits this
                        # memory. So wait until all values are written.
                        engine.finish()
                        waiting = 0
                    progress.add(values.nbytes + sum(tensor.nbytes for tensor in self._described(name).values()))
            # Buffers are filled in sorted order, because a replica that refills this store sends the buffers in sorted
            # order.
            for name in sorted(subject.buffers.names):
                if not isinstance(source, ModelValues):
                    self._undo_buffer(name)
                source.buffer(name, subject.buffers.target(name))
                engine.fill(name, subject.buffers.tensor(name), {})
            hyperparameters = {**subject.arithmetic.committed(), **source.hyperparameters()}
            engine.commit(source.step, user_state=source.user_state, hyperparameters=hyperparameters)
        return hyperparameters

    def read(self, store: Store, ram_tier: Sequence[str]) -> dict[str, Any]:
        """Restores the buffers from a store, and reads the RAM tier; returns the store's hyperparameters."""
        for name in self._subject.buffers.names:
            self._undo_buffer(name)
        self._subject.buffers.restore(store)
        if ram_tier:
            with Progress("reading parameters kept in RAM", 0) as progress:
                store.refresh(ram_tier, progress.reached)
        return _hyperparameters(store)

    def _undo_buffer(self, name: str) -> None:
        """Makes `undo` give the buffer its present values back if `offload()` fails."""
        target = self._subject.buffers.target(name)
        self._undo.callback(target.copy_, target.clone())

    def drop_sources(self) -> None:
        """Drops the sources of the first values, so that the files of the sources are unmapped."""
        self._source = self._weights = None
