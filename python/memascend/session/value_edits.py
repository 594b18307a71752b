"""Changes values outside of a step: `edit()`, loads, `materialized(modify=True)`, modes of optimizers."""

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
# What to do after a change of values that failed on a rank.
_UNCHANGED = "no rank has changed anything: go on, or try it again on all of them"


@dataclass(eq=False)
class Edit:
    """One staged change of values."""

    # Persistent buffers are committed with the edit, so that new weights never stand beside old statistics.
    with_buffers: bool
    # Undoes what was changed and staged, until it is committed.
    undo: contextlib.ExitStack
    # The parameters that get other values.
    names: list[str] = field(default_factory=list)
    # What is committed with them, as of `Metadata.hyperparameters`; None: what there is stays.
    hyperparameters: dict[str, Any] | None = None


@dataclass(eq=False)
class Edits:
    """Changes of values outside of a step: each is staged, and becomes live in one commit, or is dropped whole.

    The commit of an edit belongs to the last committed step. So none may happen while a step is staged.
    """

    run: Run
    _exchange: Exchange | None  # between the ranks, where there are several
    # How many blocks that end after this step are dropped.
    _repeated: float = 0
    _repeated_after: int = 0

    def repeat(self, blocks: int | None) -> None:
        """Drop the changes of so many blocks that end after this step: a trainer's resume runs them again.

        None: of all blocks until the next call, since they come before the step in the program.
        """
        self._repeated = math.inf if blocks is None else blocks
        self._repeated_after = self.run.metadata.step

    def _is_repetition(self) -> bool:
        """Whether the block that ends is one that a resume runs again; counts it."""
        if not self._repeated or self._repeated_after != self.run.metadata.step:
            return False
        self._repeated -= 1
        return True

    def _count(self, edit: Edit) -> dict[str, Any]:
        """Count a block that ends; returns the hyperparameters of its commit."""
        metadata, blocks = self.run.metadata, self.run.metadata.blocks
        edit.undo.callback(setattr, metadata, "blocks", blocks)
        metadata.blocks = blocks + 1
        return {**(self.run.resources.store.hyperparameters or {}), "blocks": metadata.blocks}

    # --- the doors ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, *, changes_buffers: bool = False) -> Iterator[Edit]:
        """An edit of all ranks, committed at the end if one of them changed a value; an exception drops it on all.

        Buffers that changed since the last commit are a part of it.
        """
        with self._alike(), self.edit(with_buffers=True) as edit:
            self.run.require_quiet(loads=changes_buffers)
            buffers, targets = self.run.buffers, self.run.buffers.target
            before = {name: targets(name).clone() for name in buffers.names} if changes_buffers else {}
            edit.undo.callback(lambda: [targets(name).copy_(values) for name, values in before.items()])
            yield edit
            if edit.hyperparameters is None and self._is_repetition():
                if edit.names:
                    _log.warning("a repeated change of %s is dropped: the store has it", listed(edit.names))
                edit.undo.close()
                self.is_any(False)
                return
            # A position is committed in any case, and is no block of the program's.
            hyperparameters = edit.hyperparameters or self._count(edit)
            changed = bool(edit.names) or edit.hyperparameters is not None or buffers.differ(self.run.resources.store)
            if self.is_any(changed):
                with self.run.residency.turns.alone():
                    self.commit(edit, hyperparameters=hyperparameters)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A door of all ranks that changes nothing; an exception on one of them reaches all."""
        with self._alike():
            yield
            if not self.run.resources.closed:
                self.is_any(False)

    def _alike(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._exchange is None else self._exchange.part()

    def is_any(self, here: bool) -> bool:
        """Whether it is so on any rank; all ranks call this together.

        Raises:
            RankError: another rank failed, which changed nothing on any.
        """
        return here if self._exchange is None else any(self._exchange.tell("a door", here, remedy=_UNCHANGED))

    @contextlib.contextmanager
    def values(self, parameters: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
        """Real values of parameters, on this rank; what was changed of them is committed at the end."""
        run, residency = self.run, self.run.residency
        with self.together() as edit:
            places = [self._place_of(parameter) for parameter in parameters]
            own = {place.name: residency.copy_of(place) for place in places if place is not None}
            named = {place.name: place for place in places if place is not None}
            begun = {name: checksum(values, named[name]) for name, values in own.items()}
            # A rank may have no rows of a parameter.
            found = [
                torch.empty(parameter.to_local().shape, dtype=parameter.dtype) if place is None else own[place.name]
                for parameter, place in zip(parameters, places, strict=True)
            ]
            given = list(found)
            # A rank that cannot give them ends the block of all before they wait for it inside.
            self.is_any(False)
            yield given
            run.require_quiet()
            if len(given) != len(found) or any(now is not was for now, was in zip(given, found, strict=True)):
                raise UsageError("edit() gave a list whose tensors were replaced: write into them, by copy_()")
            for name, place in named.items():
                self._stage_edited(edit, place, own[name], begun[name])
        # What is written to this memory from now on reaches no weight.
        residency.copies.keep([(place, own[name]) for name, place in named.items()], is_snapshot=True)

    def _stage_edited(self, edit: Edit, place: Place, values: torch.Tensor, begun: str) -> None:
        """Stage values that had the checksum `begun`, unless they have it still."""
        if values.dtype != place.dtype:
            raise UsageError(
                f"{place.name!r} is {place.dtype}, and was given {values.dtype}: write into it, by copy_()"
            )
        if tuple(values.shape) == place.shape and checksum(values, place) == begun:
            return
        if self.run.residency.read_into(place, lambda stored: checksum(stored, place)) != begun:
            raise UsageError(
                f"{place.name!r} was changed by a step, a load or another edit() within edit(), whose values are "
                "older; they were dropped: let each edit() end before the next change"
            )
        self.stage(edit, place, values)

    def _place_of(self, parameter: torch.Tensor) -> Place | None:
        """The place of a parameter of this run; None where this rank has no rows of it."""
        known = getattr(parameter, "__dict__", {})
        place: Place | None = known.get("_memascend")
        if "_memascend" not in known or (place is not None and place.source is not self.run.residency):
            raise ConfigError(
                "edit() takes parameters of the offloaded model: pass one of them, or a list (within materialized() "
                "they are real already)"
            )
        return place

    @contextlib.contextmanager
    def load(self, position: str | None = None) -> Iterator[None]:
        """Calls of `load_state_dict()`, which commit all at the end, or change nothing.

        With a `position` of a trainer, that is committed with them.
        """
        metadata = self.run.metadata
        with self.together(changes_buffers=True) as edit:
            if position is not None:
                stored = self.run.resources.store.hyperparameters or {}
                edit.hyperparameters = {**stored, "position": position}
                edit.undo.callback(metadata.keep_position, metadata.position)
                metadata.keep_position(position)

            def load(place: Place, values: torch.Tensor) -> None:
                if place.name in edit.names:
                    # The state dict has another name of the same parameter, too.
                    edit.names.remove(place.name)
                    self.run.resources.engine.discard(place.name)
                self.stage(edit, place, values)

            with self.run.residency.loading(load):
                yield

    # --- one edit ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def edit(self, *, with_buffers: bool) -> Iterator[Edit]:
        """Begin an edit, which is committed inside. An exception before that drops it: all values are as before."""
        with contextlib.ExitStack() as undo:
            edit = Edit(with_buffers, undo)
            undo.callback(self._discard, edit)
            yield edit
            undo.pop_all()

    def _discard(self, edit: Edit) -> None:
        for name in edit.names:
            self.run.resources.engine.discard(name)

    def stage(self, edit: Edit, place: Place, values: torch.Tensor) -> None:
        """Stage other values of a parameter, and a master that equals them. Where no bit differs nothing is staged."""
        if tuple(values.shape) != place.shape:
            raise UsageError(
                f"{place.name!r} has shape {list(place.shape)}, and was given {list(values.shape)}: give its shape"
            )
        given = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu").copy_(values.detach())
        if not self.run.residency.read_into(place, lambda stored: _same_values(stored, given)):
            if not edit.names:
                self.run.gradients.catch_up()
            # The name first: values that an interrupt leaves half staged are dropped, too.
            edit.names.append(place.name)
            # A master that equals them, too; the moments stay.
            kept = self.run.gradients.by_name.get(place.name)
            self.run.resources.engine.apply(place.name, _rewritten, step=kept.step if kept else 0, gradient=given)

    def commit(self, edit: Edit, *, user_state: Any = None, hyperparameters: Any = None) -> None:
        """Make the staged values live, all at once.

        `user_state` is committed with them; None keeps the stored one. The same holds for `hyperparameters`, see
        `Metadata.hyperparameters`.
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
                # After a write that failed, the engine takes nothing until all is discarded.
                edit.undo.callback(run.resources.engine.discard)
                edit.undo.callback(buffers.unstage, run.resources.engine)
                buffers.stage(run.resources.engine, step)
            run.resources.engine.commit(step, user_state=user_state, hyperparameters=hyperparameters)


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values of a parameter, which may be on a device, have the bits of other ones."""
    parts = zip(bytes_of(one).split(_PART_BYTES), bytes_of(other).split(_PART_BYTES), strict=True)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in parts)


def _rewritten(chunk: Chunk) -> None:
    assert chunk.gradient is not None
    chunk.values.copy_(chunk.gradient)
    if "master" in chunk.state:
        chunk.state["master"].copy_(chunk.gradient)
    # The master is the values, nothing was rounded: no rest, and no bit or sign that says so.
    for of in ("rest", "rounded_up"):
        if of in chunk.state:
            chunk.state[of].zero_()
    second = chunk.state.get("exp_avg_sq")
    if "rest" in chunk.state and second is not None and second.is_floating_point():
        second.abs_()


def switch_mode(edits: Edits, mode: str) -> None:
    """Run the optimizer's `train` or `eval`, and commit its changes as a part of the committed step.

    Raises:
        UsageError: a step is staged.
        StorageError: storage failed; the last commit stands.
    """
    run, metadata, engine = edits.run, edits.run.metadata, edits.run.resources.engine
    with run.resources.store.preparing():
        run.require_quiet()
        run.gradients.catch_up()
        changed = metadata.arithmetic.switched(mode)
        if not changed:
            # The optimizer is in that mode.
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
                # The next step commits the mode.
                edit.undo.pop_all()
                return
            edit.names.extend(names)
            edits.commit(edit, user_state=metadata.user_state, hyperparameters=metadata.hyperparameters())
