"""Changes values outside of a step: loads, rewrites, writes of user code, an older step; makes state dicts."""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.checkpoint.reader import Checkpoint, CheckpointValues
from memascend.errors import RankError, UsageError
from memascend.params.module_hooks import COPIED
from memascend.tensors import flat

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.optim.rules import Arithmetic
    from memascend.params.offloaded_param import Place
    from memascend.session.run import Run
    from memascend.storage import Engine


_PIECE_BYTES = 8 << 20


@dataclass(eq=False)
class Edit:
    """What one change of values has staged. It knows neither model nor run, so that `close()` may commit it later."""

    # Persistent buffers are committed with it, so that new weights never stand beside old statistics.
    with_buffers: bool
    # The values that persistent buffers had before, where it changes them.
    before: Mapping[str, torch.Tensor]
    # torch's list of what did not fit; where it is not empty, the load has raised, and is dropped.
    errors: Sequence[str]
    # The parameters that get other values.
    names: list[str] = field(default_factory=list)
    # What else has to be taken back.
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    # It was committed, or dropped.
    is_over: bool = False

    def end(self) -> bool:
        """It is committed, or about to be dropped; False where it was before."""
        ended, self.is_over = not self.is_over, True
        return ended


class Edits:
    """Changes of values outside of a step: each is staged, and becomes live in one commit, or is dropped whole.

    Loads, materialized(modify=True), writes of user code, rollbacks and an optimizer's modes all go this way. A commit
    is a part of the step that is committed, so none may come while a step is staged, but by what makes the step.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def begin(self, *, with_buffers: bool, changes_buffers: bool = False, errors: Sequence[str] = ()) -> Edit:
        """One edit, of nothing yet."""
        buffers = self._run.record.buffers
        before = {name: buffers.target(name).clone() for name in buffers.names} if changes_buffers else {}
        return Edit(with_buffers, before, errors)

    @contextlib.contextmanager
    def edit(self, *, with_buffers: bool, changes_buffers: bool = False) -> Iterator[Edit]:
        """One edit, which is committed inside; an exception before that drops it."""
        edit = self.begin(with_buffers=with_buffers, changes_buffers=changes_buffers)
        try:
            yield edit
        except BaseException:
            self.drop([edit])
            raise

    def rewrite(self, edit: Edit, place: Place, values: torch.Tensor) -> None:
        """Stage other values of a parameter and its master; moments stay."""
        # Before it is staged: what an interrupt leaves is dropped, too.
        edit.names.append(place.name)
        kept = self._run.gradients.by_name.get(place.name)
        self._run.gradients.rule.rewrite(place.name, values, kept.step if kept else 0)

    def stage(self, edit: Edit, place: Place, values: torch.Tensor) -> None:
        """The same with values as they were given; nothing is staged where no bit differs."""
        given = _as_stored(place, values)
        reached = self._run.residency.reached
        there = reached.is_stored(place, given)
        if self._is_there(place, given) if there is None else there:
            # What user code wrote there is overwritten; memory that has the same values stays the parameter's.
            if not reached.has_values(place, given):
                reached.forget([place.name])
            return
        self.rewrite(edit, place, given)

    def commit(
        self,
        edits: Sequence[Edit],
        stands: Callable[[], None] | None = None,
        *,
        step: int | None = None,
        user_state: Any = None,
        hyperparameters: Any = None,
    ) -> None:
        """Make what was staged live, all at once; or drop it, with the exception.

        Args:
            edits: in the order in which they were made.
            stands: called once it is live; None: memory that has the values of before is old, so none may be in use.
            step: another step than the one that is committed.
            user_state: what is committed beside the values; None leaves what there is, as of `hyperparameters`.
            hyperparameters: see `Record.hyperparameters`.
        """
        run, names = self._run, [name for edit in edits for name in edit.names]
        buffers, with_buffers = run.record.buffers, any(edit.with_buffers for edit in edits)
        step = run.record.position.step if step is None else step

        def stood() -> None:
            for edit in edits:
                edit.end()
                edit.undo.pop_all()
            if with_buffers:
                buffers.committed()
            if stands is None:
                run.changed(names)
            else:
                stands()

        with run.committing(stood, lambda: self.drop(edits)):
            if stands is None:
                run.residency.require_idle("this")
            if with_buffers:
                buffers.stage(run.resources.store, step)
            run.resources.engine.commit(step, user_state=user_state, hyperparameters=hyperparameters)

    def drop(self, edits: Iterable[Edit]) -> None:
        """Forget what was staged, the last edit first; values are what they were before."""
        buffers = self._run.record.buffers
        for edit in reversed(list(edits)):
            if not edit.end():
                continue
            self._run.discard(edit.names)
            if edit.with_buffers:
                buffers.unstage(self._run.resources.store)
            with torch.no_grad():
                for name, values in edit.before.items():
                    buffers.target(name).copy_(values)
            edit.undo.close()

    def _is_there(self, place: Place, given: torch.Tensor) -> bool:
        home = self._run.residency.units.home_of[place.name]
        self._run.residency.bind(home)
        try:
            return _same_bits(place.parameter.detach(), given)
        finally:
            self._run.residency.unbind(home)


def _as_stored(place: Place, values: torch.Tensor) -> torch.Tensor:
    """A copy of values, laid out and of the dtype in which the parameter is stored."""
    if tuple(values.shape) != place.shape:
        raise UsageError(
            f"{place.name!r} has shape {list(place.shape)}, and was given {list(values.shape)}: give its shape"
        )
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu").copy_(values.detach())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    whole = torch.int16 if one.element_size() == 2 else torch.uint8
    left, right = (flat(tensor).view(whole) for tensor in (one, other))
    if left.device == right.device:
        return torch.equal(left, right)
    pieces = zip(left.split(_PIECE_BYTES), right.split(_PIECE_BYTES), strict=True)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pieces)


class Loads:
    """What was loaded into the model and is staged, but not committed yet.

    A load has two halves, the model's and the optimizer's, and may be refused in the second. So the model's is held
    back until somebody is about to use the values. That the optimizer takes a state dict says nothing yet: accelerate
    hands it its own one in between.
    """

    def __init__(self, run: Run, edits: Edits) -> None:
        self._run = run
        self._edits = edits
        self._held: list[Edit] = []
        self._now: Edit | None = None

    @property
    def changed(self) -> list[str]:
        """Parameters whose loaded values differ from what is committed, and are held back."""
        return [name for load in self._held for name in load.names]

    # --- one call of load_state_dict() ---------------------------------------------------------

    def begin(self, module: torch.nn.Module, given: Collection[str], errors: Sequence[str]) -> None:
        """A load begins, of `given` names; what is held back is committed first, where it has other values for that."""
        # What is loaded is staged, and committed before the step.
        self._run.gradients.take_back()
        held = set(self.changed)
        if held:
            changed = {
                id(place.parameter)
                for home in self._run.residency.units.homes
                for place in home.places
                if place.name in held
            }
            if any(name in given and id(p) in changed for name, p in module.named_parameters(remove_duplicate=False)):
                self.settle()
        self._run.residency.transfers.begin_loading(self._load)
        self._now = self._edits.begin(with_buffers=True, changes_buffers=True, errors=errors)

    def _load(self, place: Place, values: torch.Tensor) -> None:
        assert self._now is not None
        if place.name in self._now.names:
            # By another name of the same parameter.
            self._now.names.remove(place.name)
            self._run.discard([place.name])
        self._edits.stage(self._now, place, values)

    def end(self) -> None:
        """All of it is staged: hold it back."""
        load, self._now = self._now, None
        assert load is not None
        self._held.append(load)
        engine, step, held = self._run.resources.engine, self._run.record.position.step, self._held
        self._run.record.buffers.stage(self._run.resources.store, step)
        self._run.residency.transfers.end_loading(self.settle)
        # Nothing that knows the model: it may be collected before anybody uses what was loaded.
        self._run.resources.finish_first(lambda: _commit(engine, held, step))

    def give_up(self) -> None:
        """Drop a load that was interrupted."""
        if self._now is not None:
            load, self._now = self._now, None
            self._edits.drop([load])
            self._run.residency.transfers.end_loading(self.settle if self._held else None)

    # --- all of them -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Commit what is held back; what torch refused in part is dropped."""
        if not self._held or self._now is not None:
            return
        with self._run.residency.turns.alone():
            held = self._taken()
            fine = [load for load in held if not load.errors]
            self._edits.drop(load for load in held if load.errors)
            if any(load.names for load in fine):
                self._edits.commit(fine)

    def drop(self) -> None:
        """Let the model be as it was before."""
        self._edits.drop(self._taken())

    def _taken(self) -> list[Edit]:
        held, self._held = self._held, []
        self._run.residency.transfers.end_loading(None)
        self._run.resources.finish_first(None)
        return held


def _commit(engine: Engine, held: list[Edit], step: int) -> None:
    for load in held:
        if load.errors:
            for name in load.names:
                engine.discard(name)
    if any(load.names and not load.errors for load in held):
        engine.commit(step)


class ReachedValues:
    """Values that the model computes with and that are not on storage yet.

    Ranks that share the parameters write them in one commit, where all of them come: before the updates of a step, in
    `save()` and `close()`, and, where updates do not wait for the step, in the first gather of a forward.
    """

    def __init__(self, run: Run, edits: Edits, figures: Exchange | None = None) -> None:
        """`figures` is what ranks tell each other, where there are several."""
        self._run = run
        self._edits = edits
        self._figures = figures
        # A forward has begun, and the ranks did not meet in it yet.
        self._begun = False

    def forward_begins(self) -> None:
        """Let the forward compute with what was written."""
        self._run.residency.reached.look()
        self._begun = True

    def write_in_gather(self) -> None:
        """All ranks meet in a forward or a backward."""
        run = self._run
        begins = self._begun or not run.residency.reached.computes
        if self._figures is not None and begins and run.gradients.mode == "fused":
            self._write_together(buffers=False)
        self._begun = False

    def write_before_backward(self) -> None:
        """Let updates that the backward begins start from the values that its forward computed with.

        Where gradients wait until step(), so do the values: they may be put back before.
        """
        self._run.residency.reached.note_walk()
        if self._run.gradients.mode == "fused":
            if self._figures is None:
                self.write_before_step([self.told()])
            else:
                # Ranks come here one by one.
                self._run.residency.reached.give_late()

    def look_before_step(self) -> None:
        """Find what the updates that step() begins are to start from; what is refused, is by now."""
        if not self._run.gradients.has_updates and self._run.residency.reached.look():
            self._run.gradients.noticed("weights that are written before step()")
        self._run.residency.reached.require_seen()

    def told(self) -> list[bool]:
        """Whether there is something to write, and whether updates have begun; what ranks tell each other."""
        return [bool(self._run.residency.reached.unwritten()), self._run.gradients.has_updates]

    def write_before_step(self, told: Sequence[Sequence[bool]]) -> None:
        """Let the updates that step() begins start from the values that the model has now; `told` is by all ranks.

        Raises:
            UsageError: updates of this step have begun from others already, on some rank.
        """
        if not any(updates for _, updates in told):
            # Persistent buffers are ahead of the step that is committed: they are of the next one.
            self._write_of_any(told, buffers=False)
        elif self._figures is not None and any(unwritten for unwritten, _ in told):
            self._run.residency.reached.give_late()
            ranks = ", ".join(str(rank) for rank, (unwritten, _) in enumerate(told) if unwritten)
            raise UsageError(
                f"weights of rank {ranks} were written to too late for this step: call zero_grad(), and write to them "
                "before the forward; between backward and step() it counts with gradients='ssd'"
            )

    def write_between_steps(self) -> None:
        """Let storage have what the model has now, unless updates have begun from what it had before.

        All ranks come here together.
        """
        if not self._run.gradients.has_updates:
            self._run.residency.reached.look()
        self._write_together(buffers=True)

    def write_at_end(self) -> None:
        """The same in close(), to which a rank that fails comes alone.

        Raises:
            RankError: this rank has something to write, and another one does not come.
        """
        figures, reached = self._figures, self._run.residency.reached
        if figures is None:
            self.write_between_steps()
            return
        if not reached.handed_out:
            return
        reached.look()
        try:
            if figures.broken is not None:
                raise figures.broken
            # What ends because of an error waits for nobody.
            if sys.exc_info()[0] is None:
                self._write_together(buffers=True)
        except RankError as error:
            if reached.unwritten():
                error.add_note("what was written to weights since the last step is not kept")
                raise

    def _write_together(self, *, buffers: bool) -> None:
        """Write what any rank has to write; nothing where updates have begun."""
        told = [self.told()] if self._figures is None else self._figures.everyone(self.told())
        if not any(updates for _, updates in told):
            self._write_of_any(told, buffers=buffers)
        elif self._figures is not None:
            self._run.residency.reached.give_late()

    def _write_of_any(self, told: Sequence[Sequence[bool]], *, buffers: bool) -> None:
        if any(unwritten for unwritten, _ in told):
            self._write(buffers=buffers)

    def _write(self, *, buffers: bool) -> None:
        reached = self._run.residency.reached
        self._run.gradients.take_back()
        unwritten = reached.unwritten()
        reached.require_seen()
        with self._edits.edit(with_buffers=buffers) as edit:
            for place, values in unwritten:
                self._edits.rewrite(edit, place, values)
            self._edits.commit([edit], lambda: reached.written(edit.names))


# What may wait for the engine at once; a larger parameter is let in alone.
_WAITING_BYTES_MAX = 16 << 20


class _Unit(NamedTuple):
    parameters: tuple[str, ...]


class Rollback:
    """Lets a run stand where a checkpoint of it was written."""

    def __init__(self, model: torch.nn.Module, arithmetic: Arithmetic, run: Run, edits: Edits) -> None:
        self._model = model
        self._arithmetic = arithmetic
        self._run = run
        self._edits = edits

    def go_to(self, folder: str | os.PathLike[str]) -> None:
        """Commit what a checkpoint holds: values, state, counts, buffers, loss scale and `user_state`.

        Raises:
            ConfigError, CorruptionError: it does not fit, or is damaged; nothing was changed.
            UsageError: a step is staged.
        """
        source = self._source(Checkpoint(folder))
        source.check()
        self._run.require_quiet()
        with (
            self._run.residency.turns.alone(),
            self._edits.edit(with_buffers=True, changes_buffers=True) as edit,
        ):
            edit.undo.callback(self._run.resources.engine.discard)
            counts = self._stage(source)
            hyperparameters = {**self._arithmetic.committed(), **source.hyperparameters([])}
            self._arithmetic.restore(hyperparameters.get("attributes") or {}, edit.undo)
            line = self._run.resources.store.info()["generation"]
            hyperparameters["line"] = line

            def stands() -> None:
                self._run.changed(place.name for home in self._run.residency.units.homes for place in home.places)
                for name, count in counts.items():
                    self._run.gradients.by_name[name].restart_at(count)
                self._run.record.go_back(source.step, source.user_state, hyperparameters)

            self._edits.commit(
                [edit], stands, step=source.step, user_state=source.user_state, hyperparameters=hyperparameters
            )

    def _source(self, checkpoint: Checkpoint) -> CheckpointValues:
        places = {place.name: place.parameter for home in self._run.residency.units.homes for place in home.places}
        buffers = {name: self._run.record.buffers.tensor(name) for name in self._run.record.buffers.names}
        trained = self._run.gradients.by_name.keys()
        return CheckpointValues(checkpoint, self._model, places, buffers, self._arithmetic, trained)

    def _stage(self, source: CheckpointValues) -> dict[str, int]:
        """Stage all of it; how many updates made each parameter that is trained."""
        engine, record = self._run.resources.engine, self._run.record
        counts, waiting = {}, 0
        units: Any = [_Unit(tuple(place.name for place in home.places)) for home in self._run.residency.units.homes]
        with contextlib.closing(source.parameters(units)) as found:
            for name, values, state, step in found:
                engine.fill(name, values, state, step=step)
                if name in self._run.gradients.by_name:
                    counts[name] = step
                waiting += values.nbytes + sum(tensor.nbytes for tensor in state.values())
                if waiting >= _WAITING_BYTES_MAX:
                    engine.finish()
                    waiting = 0
        for name in record.buffers.names:
            source.buffer(name, record.buffers.target(name))
        engine.finish()
        return counts


class Modes:
    """What an optimizer does to its parameters between training and evaluation."""

    def __init__(self, run: Run, edits: Edits) -> None:
        self._run = run
        self._edits = edits

    def switch(self, mode: str) -> None:
        """Run `train` or `eval`, and commit what it changed, as a part of the step that is committed.

        Raises:
            UsageError: a step is staged.
            StorageError: storage failed; what was committed stands.
        """
        with self._run.resources.store.preparing():
            self._switch(mode)

    def _switch(self, mode: str) -> None:
        run = self._run
        run.require_quiet()
        record, engine = run.record, run.resources.engine
        changed = record.arithmetic.switched(mode)
        if not changed:
            # It is in that mode.
            return
        with run.residency.turns.alone(), self._edits.edit(with_buffers=False) as edit:
            edit.undo.callback(engine.discard)
            names = run.gradients.rule.switch(mode, run.gradients.by_name.values(), changed)
            edit.undo.callback(record.arithmetic.adopt(names, engine.finish, changed))
            if not names:
                # The next step commits the mode.
                edit.undo.pop_all()
                return
            self._edits.commit(
                [edit],
                lambda: run.residency.units.changed(names),
                user_state=record.user_state,
                hyperparameters=record.hyperparameters(),
            )


_KEY = "memascend"


# A module's own tables of hooks.
_TABLES = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class StateDicts:
    """The hooks by which torch makes and loads state dicts of one offloaded model."""

    def __init__(self, model: torch.nn.Module, run: Run, loads: Loads, *, sharded: bool) -> None:
        """Nothing of the model changes before `install`; `sharded`: ranks share its parameters."""
        self._sharded = sharded
        self._model = model
        self._run = run
        self._loads = loads
        # The module whose state dict is being made.
        self._making: torch.nn.Module | None = None
        self._loading: list[torch.nn.Module] = []

    def install(self) -> None:
        """Give every module the hooks."""
        # Under one key, as gates do it: torch's own calls would leave a handle and a wrapper for each of them.
        before, after = self._before_making, _AfterMaking(self)
        for module in self._model.modules():
            tables: Any = module.__dict__
            tables["_state_dict_pre_hooks"][_KEY] = before
            tables["_state_dict_hooks"][_KEY] = after
            tables["_load_state_dict_pre_hooks"][_KEY] = functools.partial(self._before_loading, module)
            tables["_load_state_dict_post_hooks"][_KEY] = self._after_loading

    def remove(self) -> None:
        """Take the hooks away."""
        for module in self._model.modules():
            for table in _TABLES:
                module.__dict__[table].pop(_KEY, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(COPIED)

    def forget(self) -> None:
        """Give up a state dict whose making or loading was interrupted."""
        self._making = None
        self._run.residency.transfers.end_making()
        self._loading.clear()
        self._loads.give_up()

    # --- making ---------------------------------------------------------------------------

    def _before_making(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        del prefix
        if self._making is None and not keep_vars:
            self._making = module
            self._run.residency.transfers.begin_making()

    def after_making(self, module: torch.nn.Module) -> None:
        """A module has added what it has."""
        if self._making is module:
            self._making = None
            self._run.residency.transfers.end_making()
            self._run.resources.read_out()

    # --- loading ------------------------------------------------------------------------------

    def _before_loading(  # noqa: PLR0913, PLR0917 - as torch calls it
        self,
        module: torch.nn.Module,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        del strict, missing, unexpected
        if local_metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would replace offloaded parameters, which are on storage: leave "
                "assign out"
            )
        if not self._loading:
            self._run.require_quiet()
        if self._sharded:
            # torch writes to the rows, as anybody may between steps.
            return
        if not self._loading:
            self._loads.begin(module, {name.removeprefix(prefix) for name in state_dict}, errors)
        self._loading.append(module)

    def _after_loading(self, module: torch.nn.Module, incompatible: Any) -> None:
        del incompatible
        if module not in self._loading:
            return
        del self._loading[self._loading.index(module) :]
        if not self._loading:
            self._loads.end()


class _AfterMaking:
    """A hook of its own class: torch marks it, which a method does not allow."""

    def __init__(self, state_dicts: StateDicts) -> None:
        self._state_dicts = state_dicts

    def __call__(self, module: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        del state_dict, prefix, local_metadata
        self._state_dicts.after_making(module)

    # What torch marks the hooks with that were registered by its own call.
    _from_public_api = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(COPIED)
