"""Chooses the entries that are held in memory: those of the first units, as far as the room reaches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.planning.requirements import Requirements

__all__ = ["Held", "choose_held"]


@dataclass(frozen=True)
class Held:
    """Entries whose values and state stay in host memory: they are written as ever, and not read from storage.

    Attributes:
        names: of the entries.
        nbytes: what they take.
        values: by unit, bytes of values that are not read to compute with.
        update: bytes of values that are not read for an update.
        state: bytes of state that are not read for one.
    """

    names: tuple[str, ...] = ()
    nbytes: int = 0
    values: Mapping[str, int] = field(default_factory=dict)
    update: int = 0
    state: int = 0


def choose_held(run: Requirements, room: int | None) -> Held:
    """Hold whole entries within so many bytes, the first units' first; None: all of them."""
    names: list[str] = []
    by_unit: dict[str, int] = {}
    nbytes = update = state = 0
    for unit in run.units:
        for name in unit.parameters:
            own_values, own_state = run.sizes.entry_bytes.get(name, (0, 0))
            own = own_values + own_state
            if not own or (room is not None and nbytes + own > room):
                continue
            names.append(name)
            nbytes += own
            by_unit[unit.name] = by_unit.get(unit.name, 0) + own_values
            if name in run.trained:
                update += own_values
                state += own_state
    return Held(tuple(names), nbytes, by_unit, update, state)
