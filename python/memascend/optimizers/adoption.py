"""Gives the user's optimizer the options and attributes that a step changed, once the step is committed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from memascend.errors import UsageError
from memascend.optimizers.clone import attributes_of, cloned, named, run
from memascend.optimizers.option_values import copied, same
from memascend.optimizers.shared_values import (
    GONE,
    Disagreement,
    SharedName,
    SharedValues,
    common_end,
    plain,
    put,
    restored,
    storable,
)
from memascend.optimizers.support import known

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Mapping

    import torch


class Adoption:
    """What the runs of a step changed beside their parameters, until all of them have ended."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, examples: Mapping[SharedName, Any], *, runs: bool = True
    ) -> None:
        """`examples`: values that steps are known to change, as a step leaves them; `runs`: its own code does run."""
        self._optimizer = optimizer
        self._changes = runs and not known(optimizer)
        self.examples = dict(examples)
        # By the parameter: the number of its group, and what its last run changed.
        self._ends: dict[str, tuple[int, Mapping[SharedName, Any]]] = {}

    def ended(self, name: str, group: int) -> Callable[[dict[SharedName, Any]], None]:
        """What hears of the end of a parameter's run, on the engine's thread."""
        self._ends.pop(name, None)
        return functools.partial(self._ended, name, group)

    def _ended(self, name: str, group: int, changes: dict[SharedName, Any]) -> None:
        lost = next((place for place, value in changes.items() if not storable(value)), None)
        if lost is not None:
            raise UsageError(
                f"{named(self._optimizer)} changed {lost} to a {type(changes[lost]).__qualname__}, which cannot be "
                "committed with the step: only numbers and text can"
            )
        _, before = self._ends.get(name, (group, changes))
        if not same(dict(before), changes):
            raise UsageError(
                f"{named(self._optimizer)} changed its options in another way when its update of {name!r} ran again, "
                "after a trial on a copy: an update has to do the same with the same state and gradient"
            )
        self._ends[name] = group, changes

    def adopt(
        self, names: Iterable[str], finish: Callable[[], None], changed: Mapping[SharedName, Any] | None = None
    ) -> Callable[[], None]:
        """Set what the runs of these parameters changed; what gives the old values back.

        Args:
            names: of the parameters.
            finish: waits until all runs have ended.
            changed: what has to be changed by each of them, and is also where there are none.

        Raises:
            UsageError: they did not end alike; nothing was set.
        """
        if not self._changes:
            # It changes nothing, and nobody waits.
            return functools.partial(self._give_back, [])
        finish()
        ends = [self._ends[name] for name in names if name in self._ends]
        if changed is not None:
            ends += [(number, changed) for number in range(len(self._optimizer.param_groups))]
        try:
            changes = common_end(ends)
        except Disagreement as error:
            raise UsageError(
                f"{named(self._optimizer)} changed {error.place} in another way for each parameter, so that this step "
                "would not be torch's: call zero_grad(), and use an optimizer that does not"
            ) from None
        before = [(place, copied(self._home(place).get(place.name, GONE))) for place in changes]
        for place, value in changes.items():
            self.examples.setdefault(place, value)
            put(self._home(place), place.name, value)
        return functools.partial(self._give_back, before)

    def switched(self, mode: str) -> dict[SharedName, Any]:
        """What `train()` or `eval()` changes for all parameters alike, beside what it does to each; nothing is set."""
        begin = SharedValues.of(self._optimizer).copy()
        given = begin.copy()
        groups = [{**group, "params": []} for group in given.groups]
        copy = cloned(self._optimizer, given.attributes, groups, {})
        run(copy, mode)
        return begin.changes(SharedValues.of(copy))

    def _home(self, place: SharedName) -> dict[str, Any]:
        """Where a value stands."""
        return vars(self._optimizer) if place.group is None else self._optimizer.param_groups[place.group]

    def _give_back(self, before: list[tuple[SharedName, Any]]) -> None:
        for place, value in before:
            put(self._home(place), place.name, value)

    def attributes(self) -> dict[str, Any]:
        """The attributes that steps change, as JSON; options of groups are stored with the others."""
        now = attributes_of(self._optimizer)
        names = [place.name for place in self.examples if place.group is None]
        return {name: plain(now[name]) for name in names if name in now and storable(now[name])}

    def restore(self, attributes: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        """Set attributes that were stored; `undo` gives the optimizer back its own."""
        for name, value in attributes.items():
            place = SharedName(None, name)
            own = attributes_of(self._optimizer).get(name, GONE)
            undo.callback(put, self._home(place), name, copied(own))
            example = self.examples.setdefault(place, None if own is GONE else own)
            put(self._home(place), name, restored(value, example))
