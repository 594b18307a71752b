"""Changes values outside of a step: loads, rewrites, writes of user code; makes state dicts."""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import RankError, UsageError
from memascend.params.module_hooks import COPIED
from memascend.tensors import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.params.offloaded_param import Place
    from memascend.session.run import Run
    from memascend.storage import Engine


_PIECE_BYTES = 8 << 20


@dataclass(eq=False)
class Edit:
    """One staged change of values. It refers to neither model nor run, so that `close()` may commit it later."""

    # Persistent buffers are committed with the edit, so that new weights never stand beside old statistics.
    with_buffers: bool
    # The earlier values of persistent buffers, where the edit changes them.
    before: Mapping[str, torch.Tensor]
    # torch's list of mismatches of a load. Where the list is not empty, torch has raised, and the edit is dropped.
    errors: Sequence[str]
    # The parameters that get other values.
    names: list[str] = field(default_factory=list)
    # Undoes the other changes, where the edit is dropped.
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    # The edit was committed or dropped.
    is_over: bool = False

    def end(self) -> bool:
        """Mark the edit as over; False where it was over before."""
        ended, self.is_over = not self.is_over, True
        return ended


class Edits:
    """Changes of values outside of a step: each is staged, and becomes live in one commit, or is dropped whole.

    Loads, materialized(modify=True), writes of user code and an optimizer's modes are edits. The commit of
    an edit belongs to the last committed step. So none may happen while a step is staged, except within step() itself.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def begin(self, *, with_buffers: bool, changes_buffers: bool = False, errors: Sequence[str] = ()) -> Edit:
        """Begin an empty edit."""
        buffers = self.run.record.buffers
        before = {name: buffers.target(name).clone() for name in buffers.names} if changes_buffers else {}
        return Edit(with_buffers, before, errors)

    @contextlib.contextmanager
    def edit(self, *, with_buffers: bool, changes_buffers: bool = False) -> Iterator[Edit]:
        """Begin an edit, which is committed inside; an exception before the commit drops the edit."""
        edit = self.begin(with_buffers=with_buffers, changes_buffers=changes_buffers)
        try:
            yield edit
        except BaseException:
            self.drop([edit])
            raise

    def rewrite(self, edit: Edit, place: Place, values: torch.Tensor) -> None:
        """Stage other values of a parameter and its master; moments stay."""
        # The name first: values that an interrupt leaves half staged are dropped, too.
        edit.names.append(place.name)
        self.run.gradients.rewrite(place.name, values)

    def stage(self, edit: Edit, place: Place, values: torch.Tensor) -> None:
        """Stage values that a user gave; nothing is staged where no bit differs."""
        if tuple(values.shape) != place.shape:
            raise UsageError(
                f"{place.name!r} has shape {list(place.shape)}, and was given {list(values.shape)}: give its shape"
            )
        given = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu").copy_(values.detach())
        reached = self.run.residency.reached
        stored = reached.is_stored(place, given)
        if self._is_stored(place, given) if stored is None else stored:
            # Values that user code wrote are overwritten; memory that has the same values stays the parameter's.
            if not reached.has_values(place, given):
                reached.forget([place.name])
            return
        self.rewrite(edit, place, given)

    def commit(
        self,
        edits: Sequence[Edit],
        stands: Callable[[], None] | None = None,
        *,
        user_state: Any = None,
        hyperparameters: Any = None,
    ) -> None:
        """Make the staged values live, all at once; or drop them, with the exception.

        Args:
            edits: in the order in which they were made.
            stands: called once they are live; None: cached values become stale, so no unit may be in use.
            user_state: committed with the values; None keeps the stored one. The same holds for `hyperparameters`.
            hyperparameters: see `Record.hyperparameters`.
        """
        run, names = self.run, [name for edit in edits for name in edit.names]
        buffers, with_buffers = run.record.buffers, any(edit.with_buffers for edit in edits)
        step = run.record.position.step

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
        """Discard the staged values, the last edit first; all values are as before."""
        buffers = self.run.record.buffers
        for edit in reversed(list(edits)):
            if not edit.end():
                continue
            self.run.discard(edit.names)
            if edit.with_buffers:
                buffers.unstage(self.run.resources.store)
            with torch.no_grad():
                for name, values in edit.before.items():
                    buffers.target(name).copy_(values)
            edit.undo.close()

    def _is_stored(self, place: Place, given: torch.Tensor) -> bool:
        home = self.run.residency.units.home_of[place.name]
        self.run.residency.bind(home)
        try:
            return _same_bits(place.parameter.detach(), given)
        finally:
            self.run.residency.unbind(home)


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
    """Values that were loaded into the model and are staged, but not committed yet.

    A load has two halves, the model's and the optimizer's, and the second may be rejected. So the first is held back
    until the values are about to be used. A state dict that the optimizer accepts proves nothing yet: accelerate passes
    the optimizer its own state dict in between.
    """

    def __init__(self, edits: Edits) -> None:
        self._run = edits.run
        self._edits = edits
        self._held: list[Edit] = []
        self._now: Edit | None = None

    @property
    def changed(self) -> list[str]:
        """Parameters whose loaded values differ from the committed ones, and are held back."""
        return [name for load in self._held for name in load.names]

    # --- one call of load_state_dict() ---------------------------------------------------------

    def begin(self, module: torch.nn.Module, given: Collection[str], errors: Sequence[str]) -> None:
        """Begin a load of `given` names. Edits that are held back and change one of them are committed first."""
        # Loaded values are staged, and committed before the step.
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
            # The state dict has another name of the same parameter, too.
            self._now.names.remove(place.name)
            self._run.discard([place.name])
        self._edits.stage(self._now, place, values)

    def end(self) -> None:
        """End the load: its edit is held back."""
        load, self._now = self._now, None
        assert load is not None
        self._held.append(load)
        engine, step, held = self._run.resources.engine, self._run.record.position.step, self._held
        self._run.record.buffers.stage(self._run.resources.store, step)
        self._run.residency.transfers.end_loading(self.settle)
        # Without a reference to the model, which may be collected before the loaded values are used.
        self._run.resources.finish_first(lambda: _commit(engine, held, step))

    def give_up(self) -> None:
        """Drop an interrupted load."""
        if self._now is not None:
            load, self._now = self._now, None
            self._edits.drop([load])
            self._run.residency.transfers.end_loading(self.settle if self._held else None)

    # --- all of them -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Commit the edits that are held back; loads that torch rejected in part are dropped."""
        if not self._held or self._now is not None:
            return
        with self._run.residency.turns.alone():
            held = self._taken()
            fine = [load for load in held if not load.errors]
            self._edits.drop(load for load in held if load.errors)
            if any(load.names for load in fine):
                self._edits.commit(fine)

    def drop(self) -> None:
        """Drop the edits that are held back: the model has its earlier values."""
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

    Several ranks write such values in one commit, at a point that all ranks reach. These points are in `step()` before
    its updates, in `save()` and in `close()`. Where updates do not wait for the step, there is one more: the first
    gather of a forward.
    """

    def __init__(self, edits: Edits, figures: Exchange | None = None) -> None:
        """`figures` exchanges figures between ranks, where there are several."""
        self._run = edits.run
        self._edits = edits
        self._figures = figures
        # A forward has begun, and no gather of it yet.
        self._begun = False

    def forward_begins(self) -> None:
        """Let the forward compute with the values that user code wrote."""
        self._run.residency.reached.look()
        self._begun = True

    def write_in_gather(self) -> None:
        """Write in a gather of a forward or a backward, which all ranks reach."""
        run = self._run
        begins = self._begun or not run.residency.reached.computes
        if self._figures is not None and begins and run.gradients.mode == "fused":
            self._write_together(buffers=False)
        self._begun = False

    def write_before_backward(self) -> None:
        """Let updates that the backward begins start from the values that its forward computed with.

        Where gradients wait until step(), so do the values: user code may restore the old ones before.
        """
        self._run.residency.reached.note_walk()
        if self._run.gradients.mode == "fused":
            if self._figures is None:
                self.write_before_step([self.told()])
            else:
                # Ranks reach this point one by one.
                self._run.residency.reached.give_late()

    def look_before_step(self) -> None:
        """Find the values that the updates of step() start from; after this call none is rejected."""
        if not self._run.gradients.has_updates and self._run.residency.reached.look():
            self._run.gradients.loop.notice("weights that are written before step()")
        self._run.residency.reached.require_seen()

    def told(self) -> list[bool]:
        """Whether there are values to write, and whether updates have begun; ranks exchange both."""
        return [bool(self._run.residency.reached.unwritten()), self._run.gradients.has_updates]

    def write_before_step(self, told: Sequence[Sequence[bool]]) -> None:
        """Let the updates of step() start from the values that the model has now; `told` is `told()` of all ranks.

        Raises:
            UsageError: updates of this step have begun from other values already, on some rank.
        """
        if not any(updates for _, updates in told):
            # Persistent buffers are ahead of the committed step: they belong to the next one.
            self._write(told, buffers=False)
        elif self._figures is not None and any(unwritten for unwritten, _ in told):
            self._run.residency.reached.give_late()
            ranks = ", ".join(str(rank) for rank, (unwritten, _) in enumerate(told) if unwritten)
            raise UsageError(
                f"weights of rank {ranks} were written to too late for this step: call zero_grad(), and write to them "
                "before the forward; between backward and step() it counts with gradients='ssd'"
            )

    def write_between_steps(self) -> None:
        """Write the values that the model has now to storage, unless updates have begun from earlier values.

        All ranks call it together.
        """
        if not self._run.gradients.has_updates:
            self._run.residency.reached.look()
        self._write_together(buffers=True)

    def write_at_end(self) -> None:
        """The same in close(), which a failing rank reaches alone.

        Raises:
            RankError: this rank has values to write, and another rank does not reach the call.
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
            # A run that ends with an error does not wait for other ranks.
            if sys.exc_info()[0] is None:
                self._write_together(buffers=True)
        except RankError as error:
            if reached.unwritten():
                error.add_note("what was written to weights since the last step is not kept")
                raise

    def _write_together(self, *, buffers: bool) -> None:
        """Write the values of all ranks; nothing where updates have begun."""
        told = [self.told()] if self._figures is None else self._figures.everyone(self.told())
        if not any(updates for _, updates in told):
            self._write(told, buffers=buffers)
        elif self._figures is not None:
            self._run.residency.reached.give_late()

    def _write(self, told: Sequence[Sequence[bool]], *, buffers: bool) -> None:
        if not any(unwritten for unwritten, _ in told):
            return
        reached = self._run.residency.reached
        self._run.gradients.take_back()
        unwritten = reached.unwritten()
        reached.require_seen()
        with self._edits.edit(with_buffers=buffers) as edit:
            for place, values in unwritten:
                self._edits.rewrite(edit, place, values)
            self._edits.commit([edit], lambda: reached.written(edit.names))


def switch_mode(edits: Edits, mode: str) -> None:
    """Run the optimizer's `train` or `eval`, and commit its changes as a part of the committed step.

    Raises:
        UsageError: a step is staged.
        StorageError: storage failed; the last commit stands.
    """
    run, record, engine = edits.run, edits.run.record, edits.run.resources.engine
    with run.resources.store.preparing():
        run.require_quiet()
        changed = record.arithmetic.switched(mode)
        if not changed:
            # The optimizer is in that mode.
            return
        with run.residency.turns.alone(), edits.edit(with_buffers=False) as edit:
            edit.undo.callback(engine.discard)
            names = run.gradients.switch(mode, changed)
            edit.undo.callback(record.arithmetic.adopt(names, engine.finish, changed))
            if not names:
                # The next step commits the mode.
                edit.undo.pop_all()
                return
            edits.commit(
                [edit],
                lambda: run.residency.units.changed(names),
                user_state=record.user_state,
                hyperparameters=record.hyperparameters(),
            )


_KEY = "memascend"
# A module's own tables of hooks.
_TABLES = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class StateDicts:
    """The hooks by which torch makes and loads state dicts of one offloaded model.

    The object itself is the hook after making: torch's own registration marks such hooks, and a method takes no mark.
    """

    # The mark of hooks that were registered by torch's own call.
    _from_public_api = True

    def __init__(self, model: torch.nn.Module, run: Run, loads: Loads, *, sharded: bool) -> None:
        """The model does not change before `install`; `sharded`: ranks share its parameters."""
        self._sharded = sharded
        self._model = model
        self._run = run
        self._loads = loads
        # The module whose state dict is being made.
        self._making: torch.nn.Module | None = None
        self._loading: list[torch.nn.Module] = []

    def install(self) -> None:
        """Give every module the hooks."""
        # Under one key, as module hooks do it: torch's own calls would leave a handle and a wrapper for each of them.
        before = self._before_making
        for module in self._model.modules():
            tables: Any = module.__dict__
            tables["_state_dict_pre_hooks"][_KEY] = before
            tables["_state_dict_hooks"][_KEY] = self
            tables["_load_state_dict_pre_hooks"][_KEY] = functools.partial(self._before_loading, module)
            tables["_load_state_dict_post_hooks"][_KEY] = self._after_loading

    def remove(self) -> None:
        """Remove the hooks."""
        for module in self._model.modules():
            for table in _TABLES:
                module.__dict__[table].pop(_KEY, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(COPIED)

    def forget(self) -> None:
        """Drop a state dict whose making or loading was interrupted."""
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

    def __call__(self, module: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        """A module has added its values to a state dict."""
        del state_dict, prefix, local_metadata
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
            # torch writes to the rows, as user code may between steps.
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
