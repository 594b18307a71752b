"""Stages and commits other values of parameters outside of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.errors import UsageError
from memascend.residency.copies import bytes_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from memascend.gradients.gradients import Gradients
    from memascend.residency.placeholder import Place
    from memascend.residency.residency import Residency
    from memascend.run.record import Record
    from memascend.run.resources import Resources

__all__ = ["Rewrites"]

_PIECE_BYTES = 8 << 20


class Rewrites:
    """Other values of parameters, which belong to no step."""

    def __init__(self, resources: Resources, residency: Residency, gradients: Gradients, record: Record) -> None:
        self._resources = resources
        self._residency = residency
        self._gradients = gradients
        self._record = record

    def stage(self, place: Place, values: torch.Tensor) -> bool:
        """Stage other values of a parameter and its master; moments stay. False where no bit differs: nothing is."""
        given = _as_stored(place, values)
        reached = self._residency.reached
        there = reached.is_stored(place, given)
        if self._is_there(place, given) if there is None else there:
            # What user code wrote there is overwritten; memory that has the same values stays the parameter's.
            if not reached.has_values(place, given):
                reached.forget([place.name])
            return False
        kept = self._gradients.by_name.get(place.name)
        self._gradients.rule.rewrite(place.name, given, kept.step if kept else 0)
        return True

    def discard(self, names: Iterable[str]) -> None:
        """Forget what was staged of these, and nothing else."""
        for name in names:
            self._resources.engine.discard(name)

    def commit(self, names: Collection[str]) -> None:
        """Make what was staged of these live, as a part of the step that is committed."""
        record, store = self._record, self._resources.store
        with self._residency.turns.alone():
            self._residency.require_idle("this")
            try:
                # Both are of one moment: new weights never stand beside old statistics.
                record.buffers.stage(store, record.position.step)
                self._resources.engine.commit(record.position.step)
                record.buffers.committed()
            finally:
                # Also where Ctrl-C is heard once the commit has returned; to read a unit again is never wrong.
                self._residency.units.changed(names)
                self._residency.reached.forget(names)

    def _is_there(self, place: Place, given: torch.Tensor) -> bool:
        home = self._residency.units.home_of[place.name]
        if home.by_rows:
            return self._same_parts(place, bytes_of(given))
        self._residency.bind(home)
        try:
            return _same_bits(place.parameter.detach(), given)
        finally:
            self._residency.unbind(home)

    def _same_parts(self, place: Place, given: torch.Tensor) -> bool:
        differ = False

        def compare(start: int, part: torch.Tensor) -> None:
            nonlocal differ
            there = part[: given.nbytes - start]
            differ = differ or not torch.equal(there, given[start : start + there.nbytes])

        self._residency.units.each_part(place, compare)
        return not differ


def _as_stored(place: Place, values: torch.Tensor) -> torch.Tensor:
    """A copy of values, laid out and of the dtype in which the parameter is stored."""
    if tuple(values.shape) != place.shape:
        raise UsageError(f"{place.name!r} has shape {list(place.shape)}, and was given {list(values.shape)}")
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu").copy_(values.detach())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    whole = torch.int16 if one.element_size() == 2 else torch.uint8
    left, right = (tensor.as_strided((tensor.numel(),), (1,)).view(whole) for tensor in (one, other))
    if left.device == right.device:
        return torch.equal(left, right)
    pieces = zip(left.split(_PIECE_BYTES), right.split(_PIECE_BYTES), strict=True)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pieces)
