"""Chooses the entries that are held in memory: those of the first units, as far as the room reaches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.planning.requirements import Requirements


@dataclass(frozen=True)
class Held:
    """Entries whose values and state stay in host memory: they are read once, and their gradients wait there."""

    names: tuple[str, ...] = ()  # of the entries
    nbytes: int = 0  # what their values and state take
    gradients: int = 0  # what their gradients take that wait for `step()`
    # Those of which all values are held: they are computed with where they lie, and need no slot.
    units: frozenset[str] = frozenset()
    # By unit, bytes of values that are not read to compute with.
    values: Mapping[str, int] = field(default_factory=dict)
    update: int = 0  # bytes of values that are not read for an update
    state: int = 0  # bytes of state that are not read for one
    # Names of those whose gradients go to the log; beside it bytes of their values, state and gradients.
    logged: tuple[str, ...] = ()
    logged_bytes: tuple[int, int, int] = (0, 0, 0)

    @property
    def room(self) -> int:
        """All of it."""
        return self.nbytes + self.gradients


NOTHING = Held()


def choose_held(run: Requirements, room: int | None) -> Held:
    """Hold whole entries within so many bytes, the first units' first; None: all of them."""
    names: list[str] = []
    by_unit: dict[str, int] = {}
    nbytes = gradients = update = state = 0
    logged: dict[str, tuple[int, int, int]] = {}
    for unit in run.units:
        for name in unit.parameters:
            own_values, own_state = run.sizes.entry_bytes.get(name, (0, 0))
            own = own_values + own_state
            # Where all gradients are held anyway, they have their room.
            waits = 0 if run.gradients == "ram" else run.gradient_bytes.get(name, 0)
            if not own or (room is not None and nbytes + gradients + own + waits > room):
                continue
            names.append(name)
            nbytes += own
            gradients += waits
            by_unit[unit.name] = by_unit.get(unit.name, 0) + own_values
            if name in run.trained:
                update += own_values
                state += own_state
            if run.log is not None and name in run.log.names:
                logged[name] = (own_values, own_state, run.gradient_bytes.get(name, 0))
    # On a device units are computed with there.
    here = [] if run.staging is not None else run.units
    whole = frozenset(unit.name for unit in here if run.bytes_of(unit) <= by_unit.get(unit.name, 0))
    values, states, waiting = (sum(part) for part in zip(*logged.values(), strict=True)) if logged else (0, 0, 0)
    return Held(
        tuple(names),
        nbytes,
        gradients,
        whole,
        by_unit,
        update,
        state,
        logged=tuple(logged),
        logged_bytes=(values, states, waiting),
    )
