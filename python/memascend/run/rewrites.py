"""Stages and commits other values of parameters outside of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.errors import UsageError
from memascend.tensors import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from memascend.residency.placeholder import Place
    from memascend.run.run import Run

_PIECE_BYTES = 8 << 20


class Rewrites:
    """Other values of parameters, which belong to no step."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def stage(self, place: Place, values: torch.Tensor) -> bool:
        """Stage other values of a parameter and its master; moments stay. False where no bit differs: nothing is."""
        given = _as_stored(place, values)
        reached = self._run.residency.reached
        there = reached.is_stored(place, given)
        if self._is_there(place, given) if there is None else there:
            # What user code wrote there is overwritten; memory that has the same values stays the parameter's.
            if not reached.has_values(place, given):
                reached.forget([place.name])
            return False
        kept = self._run.gradients.by_name.get(place.name)
        self._run.gradients.rule.rewrite(place.name, given, kept.step if kept else 0)
        return True

    def commit(self, names: Collection[str], failed: Callable[[], None] = lambda: None) -> None:
        """Make what was staged of these live, as a part of the step that is committed; or call `failed`."""
        run, buffers = self._run, self._run.record.buffers

        def stands() -> None:
            buffers.committed()
            run.changed(names)

        with run.residency.turns.alone(), run.committing(stands, failed):
            run.residency.require_idle("this")
            # Both are of one moment: new weights never stand beside old statistics.
            buffers.stage(run.resources.store, run.record.position.step)
            run.resources.engine.commit(run.record.position.step)

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
        raise UsageError(f"{place.name!r} has shape {list(place.shape)}, and was given {list(values.shape)}")
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
