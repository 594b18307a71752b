"""Changes values outside of a step: `edit()`, loads, `materialized(modify=True)`, modes of optimizers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError, UsageError
from memascend.params.weight_access import checksum
from memascend.tensors import flat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.params.offloaded_param import Place
    from memascend.session.run import Run


_EXTENT_BYTES = 8 << 20
# What to do after a change of values that failed on a rank.
_UNCHANGED = "no rank has changed anything: go on, or try it again on all of them"


@dataclass(eq=False)
class Edit:
    """One staged change of values."""

    # Persistent buffers are committed with the edit, so that new weights never stand beside old statistics.
    with_buffers: bool
    # The parameters that get other values.
    names: list[str] = field(default_factory=list)
    # Undoes the other changes, where the edit is dropped.
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    is_committed: bool = False


class Edits:
    """Changes of values outside of a step: each is staged, and becomes live in one commit, or is dropped whole.

    The commit of an edit belongs to the last committed step. So none may happen while a step is staged.
    """

    def __init__(self, run: Run, exchange: Exchange | None = None) -> None:
        """`exchange` is between the ranks, where there are several."""
        self.run = run
        self._exchange = exchange

    # --- the doors ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, *, changes_buffers: bool = False) -> Iterator[Edit]:
        """An edit of all ranks, committed at the end if one of them changed a value; an exception drops it on all."""
        with self._alike(), self.edit(with_buffers=True) as edit:
            self.run.require_quiet(loads=changes_buffers)
            before = self._buffers() if changes_buffers else {}
            edit.undo.callback(self._restore_buffers, before)
            yield edit
            targets = self.run.record.buffers.target
            changed = bool(edit.names) or not all(_same_bits(one, targets(name)) for name, one in before.items())
            if self.is_any(changed):
                with self.run.residency.turns.alone():
                    self.commit(edit)

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
        now: list[str] = []
        self.run.residency.read_into(place, lambda stored: now.append(checksum(stored, place)))
        if now != [begun]:
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
    def load(self) -> Iterator[None]:
        """One call of `load_state_dict()`, which commits all of it at its end, or changes nothing."""
        with self.together(changes_buffers=True) as edit:

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
        edit = Edit(with_buffers)
        try:
            yield edit
        except BaseException:
            if not edit.is_committed:
                for name in edit.names:
                    self.run.resources.engine.discard(name)
                if with_buffers:
                    self.run.record.buffers.unstage(self.run.resources.store)
                edit.undo.close()
            raise

    def stage(self, edit: Edit, place: Place, values: torch.Tensor) -> None:
        """Stage other values of a parameter, and a master that equals them. Where no bit differs nothing is staged."""
        if tuple(values.shape) != place.shape:
            raise UsageError(
                f"{place.name!r} has shape {list(place.shape)}, and was given {list(values.shape)}: give its shape"
            )
        given = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu").copy_(values.detach())
        is_same: list[bool] = []
        self.run.residency.read_into(place, lambda stored: is_same.append(_same_bits(stored, given)))
        if not is_same[0]:
            # The name first: values that an interrupt leaves half staged are dropped, too.
            edit.names.append(place.name)
            self.run.gradients.rewrite(place.name, given)

    def commit(self, edit: Edit, *, user_state: Any = None, hyperparameters: Any = None) -> None:
        """Make the staged values live, all at once.

        `user_state` is committed with them; None keeps the stored one. The same holds for `hyperparameters`, see
        `Record.hyperparameters`.
        """
        run, buffers = self.run, self.run.record.buffers
        step = run.record.step

        def stood() -> None:
            edit.is_committed = True
            edit.undo.pop_all()
            if edit.with_buffers:
                buffers.committed()
            run.changed(edit.names)

        with run.committing(stood, lambda: None):
            run.residency.require_idle("this")
            run.residency.copies.require_released(edit.names)
            if edit.with_buffers:
                buffers.stage(run.resources.store, step)
            run.resources.engine.commit(step, user_state=user_state, hyperparameters=hyperparameters)

    def _buffers(self) -> dict[str, torch.Tensor]:
        buffers = self.run.record.buffers
        return {name: buffers.target(name).clone() for name in buffers.names}

    def _restore_buffers(self, before: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, values in before.items():
                self.run.record.buffers.target(name).copy_(values)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    whole = torch.int16 if one.element_size() == 2 else torch.uint8
    left, right = (flat(tensor).view(whole) for tensor in (one, other))
    if left.device == right.device:
        return torch.equal(left, right)
    extents = zip(left.split(_EXTENT_BYTES), right.split(_EXTENT_BYTES), strict=True)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in extents)


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
            edit.names.extend(names)
            edits.commit(edit, user_state=record.user_state, hyperparameters=record.hyperparameters())
