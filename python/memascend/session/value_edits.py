"""Commits changes of values outside of a step: `edit()`, `load_state_dict()`, `materialized(modify=True)`, `train()`.

The first three are *doors*: user code can write to weights only through a door. A *block* is one use of a door.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError, UsageError
from memascend.params.weight_access import checksum
from memascend.tensors import bytes_of
from memascend.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.params.offloaded_param import Place
    from memascend.session.run import Run
    from memascend.storage import Chunk


_log = logging.getLogger("memascend")
_PART_BYTES = 8 << 20
# The advice in the error if a change of values fails on a rank.
_UNCHANGED = "no rank has changed anything: continue without the change, or try it again on all ranks"


@dataclass(eq=False)
class Edit:
    """A change of values that is staged and not yet committed."""

    # If True, persistent buffers are committed with the values, so that no commit has new weights and old statistics.
    with_buffers: bool
    # Reverts all changes of the edit, unless the edit is committed.
    undo: contextlib.ExitStack
    # The names of the parameters whose new values are staged.
    names: list[str] = field(default_factory=list)
    # The hyperparameters to commit, as `Metadata.hyperparameters` makes them; None if the edit does not set
    # hyperparameters.
    hyperparameters: dict[str, Any] | None = None


@dataclass(eq=False)
class Edits:
    """Makes the edits of a run: stages the changes of a block, and commits all of them or none.

    The commit of an edit belongs to the last committed step. So no edit may begin while a step is staged.
    """

    run: Run
    _exchange: Exchange | None  # exchanges messages between the ranks; None for one process
    _repeated: float = 0  # the number of further blocks whose changes are dropped; see `repeat`
    _repeated_after: int = 0  # `_repeated` has an effect only while `Metadata.step` is this number

    def repeat(self, blocks: int | None) -> None:
        """Drops the changes of the next `blocks` blocks, but only until the next step is committed.

        After a resume, a trainer's program runs some blocks again, but the store has their changes already. With None,
        the changes of all blocks are dropped until the next call of `repeat`, because the program runs these blocks
        before it reaches the resumed step.
        """
        self._repeated = math.inf if blocks is None else blocks
        self._repeated_after = self.run.metadata.step

    def _is_repetition(self) -> bool:
        """At the end of a block, counts it; returns True if the block was committed before the resume and ran again."""
        if not self._repeated or self._repeated_after != self.run.metadata.step:
            return False
        self._repeated -= 1
        return True

    def _count(self, edit: Edit) -> dict[str, Any]:
        """At the end of a block, increments `Metadata.blocks`; returns the hyperparameters for the block's commit."""
        metadata, blocks = self.run.metadata, self.run.metadata.blocks
        edit.undo.callback(setattr, metadata, "blocks", blocks)
        metadata.blocks = blocks + 1
        return {**(self.run.resources.store.hyperparameters or {}), "blocks": metadata.blocks}

    # --- the doors ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, *, changes_buffers: bool = False) -> Iterator[Edit]:
        """Makes an edit on all ranks together: commits it at the end of the block if any rank changed a value.

        The edit includes buffers that changed since the last commit; `changes_buffers`: the block itself may change
        buffers, so an exception restores them. An exception on one rank drops the edit on all ranks.
        """
        with self._sharing_failure(), self.edit(with_buffers=True) as edit:
            self.run.require_quiet(loads=changes_buffers)
            buffers, targets = self.run.buffers, self.run.buffers.target
            before = {name: targets(name).clone() for name in buffers.names} if changes_buffers else {}
            edit.undo.callback(lambda: [targets(name).copy_(values) for name, values in before.items()])
            yield edit
            if edit.hyperparameters is None and self._is_repetition():
                if edit.names:
                    _log.warning(
                        "a change of %s was dropped, because the program repeats it after the resume and the store "
                        "has it already",
                        listed(edit.names),
                    )
                edit.undo.close()
                self.is_any(False)
                return
            # An edit with hyperparameters (a trainer's position) is always committed, and does not count as a block.
            hyperparameters = edit.hyperparameters or self._count(edit)
            changed = bool(edit.names) or edit.hyperparameters is not None or buffers.differ(self.run.resources.store)
            if self.is_any(changed):
                with self.run.residency.turns.alone():
                    self.commit(edit, hyperparameters=hyperparameters)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """On all ranks together, runs a block that changes nothing; an exception on one rank reaches all ranks."""
        with self._sharing_failure():
            yield
            if not self.run.resources.closed:
                self.is_any(False)

    def _sharing_failure(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which an exception on this rank notifies the waiting ranks."""
        return contextlib.nullcontext() if self._exchange is None else self._exchange.part()

    def is_any(self, here: bool) -> bool:
        """True if `here` is True on any rank; all ranks call this together.

        Raises:
            RankError: another rank failed; no rank has changed anything.
        """
        return here if self._exchange is None else any(self._exchange.all_gather("a door", here, remedy=_UNCHANGED))

    @contextlib.contextmanager
    def values(self, parameters: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
        """Provides copies of this rank's values of `parameters` in a block; commits changed copies at the end."""
        run, residency = self.run, self.run.residency
        with self.together() as edit:
            places = [self._place_of(parameter) for parameter in parameters]
            own = {place.name: residency.copy_of(place) for place in places if place is not None}
            named = {place.name: place for place in places if place is not None}
            begun = {name: checksum(values, named[name]) for name, values in own.items()}
            # A rank without rows of a parameter gets an empty tensor.
            found = [
                torch.empty(parameter.to_local().shape, dtype=parameter.dtype) if place is None else own[place.name]
                for parameter, place in zip(parameters, places, strict=True)
            ]
            given = list(found)
            # If a rank failed to read its values, all ranks raise here, before code in the block waits for that rank.
            self.is_any(False)
            yield given
            run.require_quiet()
            if len(given) != len(found) or any(now is not was for now, was in zip(given, found, strict=True)):
                raise UsageError(
                    "the list of edit() no longer has the tensors that it had at the beginning of the block: write "
                    "new values into these tensors with copy_()"
                )
            for name, place in named.items():
                self._stage_edited(edit, place, own[name], begun[name])
        # A write to one of these copies after the block would not change the weight, so `copies` rejects such writes.
        residency.copies.keep([(place, own[name]) for name, place in named.items()], is_snapshot=True)

    def _stage_edited(self, edit: Edit, place: Place, values: torch.Tensor, begun: str) -> None:
        """Stages values if their checksum differs from `begun`, their checksum at the beginning of the block."""
        if values.dtype != place.dtype:
            raise UsageError(
                f"{place.name!r} is {place.dtype}, but the block gave it values of {values.dtype}: write into the "
                "tensor of edit() with copy_()"
            )
        if tuple(values.shape) == place.shape and checksum(values, place) == begun:
            return
        if self.run.residency.read_into(place, lambda stored: checksum(stored, place)) != begun:
            raise UsageError(
                f"{place.name!r} was changed in another way (such as a step, a load or another edit()) inside this "
                "edit(), whose values are outdated and were dropped: let each edit() end before the next change"
            )
        self.stage(edit, place, values)

    def _place_of(self, parameter: torch.Tensor) -> Place | None:
        """Returns the place of a parameter of this run; None if this rank has no rows of it."""
        known = getattr(parameter, "__dict__", {})
        place: Place | None = known.get("_memascend")
        if "_memascend" not in known or (place is not None and place.source is not self.run.residency):
            raise ConfigError(
                "edit() takes parameters of the offloaded model: pass one parameter or a list of parameters. Inside "
                "materialized(), write to the parameters directly"
            )
        return place

    @contextlib.contextmanager
    def load(self, position: str | None = None) -> Iterator[None]:
        """At the end of the block, commits the values that `load_state_dict()` loaded in it; an exception drops them.

        `position`: a trainer's position, which is committed with the values.
        """
        metadata = self.run.metadata
        with self.together(changes_buffers=True) as edit:
            if position is not None:
                stored = self.run.resources.store.hyperparameters or {}
                edit.hyperparameters = {**stored, "position": position}
                edit.undo.callback(metadata.set_position, metadata.position)
                metadata.set_position(position)

            def load(place: Place, values: torch.Tensor) -> None:
                if place.name in edit.names:
                    # The state dict has the parameter under two names; the later values replace the earlier values.
                    edit.names.remove(place.name)
                    self.run.resources.engine.discard(place.name)
                self.stage(edit, place, values)

            with self.run.residency.loading(load):
                yield

    # --- one edit ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def edit(self, *, with_buffers: bool) -> Iterator[Edit]:
        """Begins an edit, which code in the block commits; an exception before the commit reverts the edit."""
        with contextlib.ExitStack() as undo:
            edit = Edit(with_buffers, undo)
            undo.callback(self._discard, edit)
            yield edit
            undo.pop_all()

    def _discard(self, edit: Edit) -> None:
        """Drops the staged values of an edit."""
        for name in edit.names:
            self.run.resources.engine.discard(name)

    def stage(self, edit: Edit, place: Place, values: torch.Tensor) -> None:
        """If a bit of a parameter's values changed, stages the new values and a master weight that equals them."""
        if tuple(values.shape) != place.shape:
            raise UsageError(
                f"{place.name!r} has shape {list(place.shape)}, but was given values of shape {list(values.shape)}: "
                "pass values of the parameter's shape"
            )
        given = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu").copy_(values.detach())
        if not self.run.residency.read_into(place, lambda stored: _same_values(stored, given)):
            if not edit.names:
                self.run.gradients.catch_up()
            # Append the name before staging: after an interrupt in `apply`, `_discard` drops these values, too.
            edit.names.append(place.name)
            # `_rewritten` sets values and master; the moments keep their values.
            kept = self.run.gradients.by_name.get(place.name)
            self.run.resources.engine.apply(place.name, _rewritten, step=kept.step if kept else 0, gradient=given)

    def commit(self, edit: Edit, *, user_state: Any = None, hyperparameters: Any = None) -> None:
        """Commits the staged values of an edit in one atomic write.

        The commit also has `user_state` and `hyperparameters` (as `Metadata.hyperparameters` makes them); None keeps
        the stored value.
        """
        run, buffers = self.run, self.run.buffers
        step = run.metadata.step

        def stood() -> None:
            edit.undo.pop_all()
            if edit.with_buffers:
                buffers.committed()
            run.changed(edit.names)

        with run.committing(stood, lambda: None):
            run.residency.require_idle("this")
            run.residency.copies.require_released(edit.names)
            if edit.with_buffers:
                # After a failed write, the engine rejects every job until `discard`.
                edit.undo.callback(run.resources.engine.discard)
                edit.undo.callback(buffers.unstage, run.resources.engine)
                buffers.stage(run.resources.engine, step)
            run.resources.engine.commit(step, user_state=user_state, hyperparameters=hyperparameters)


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have the same bits; compares them in parts. Either tensor may be on a device."""
    parts = zip(bytes_of(one).split(_PART_BYTES), bytes_of(other).split(_PART_BYTES), strict=True)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in parts)


def _rewritten(chunk: Chunk) -> None:
    """Sets values and master of a chunk to the new values, which `Edits.stage` passes as the gradient."""
    assert chunk.gradient is not None
    chunk.values.copy_(chunk.gradient)
    if "master" in chunk.state:
        chunk.state["master"].copy_(chunk.gradient)
    # The master now equals the values. So clear the low bits of the master (the tensor "rest"), and the marks of
    # elements that were rounded up. The marks are the tensor "rounded_up", or the sign bits of the second moment.
    for of in ("rest", "rounded_up"):
        if of in chunk.state:
            chunk.state[of].zero_()
    second = chunk.state.get("exp_avg_sq")
    if "rest" in chunk.state and second is not None and second.is_floating_point():
        second.abs_()


def switch_mode(edits: Edits, mode: str) -> None:
    """Runs `train()` or `eval()` of the optimizer (`mode`), and adds changes of parameters to the last committed step.

    Raises:
        UsageError: a step is staged, a unit is in use, or code wrote to a copy of a weight.
        StorageError: storage failed; the last commit is intact.
    """
    run, metadata, engine = edits.run, edits.run.metadata, edits.run.resources.engine
    with run.resources.store.preparing():
        run.require_quiet()
        run.gradients.catch_up()
        changed = metadata.arithmetic.switched(mode)
        if not changed:
            # `mode` changes nothing, for example because the optimizer is in that mode already.
            return
        with run.residency.turns.alone(), edits.edit(with_buffers=False) as edit:
            edit.undo.callback(engine.discard)
            names = [
                name
                for name, one in run.gradients.by_name.items()
                if one.rule.code.first_group in changed and one.rule.switch(engine, mode, one.step)
            ]
            edit.undo.callback(metadata.arithmetic.adopt(names, engine.finish, changed))
            if not names:
                # No parameter changed: keep the changed attributes, which the next step commits.
                edit.undo.pop_all()
                return
            edit.names.extend(names)
            edits.commit(edit, user_state=metadata.user_state, hyperparameters=metadata.hyperparameters())
