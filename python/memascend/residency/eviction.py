"""Chooses which unit leaves memory to make room for another; says who holds what where none can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import BudgetError
from memascend.residency.unit_slot import alive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memascend.residency.environment import Limits
    from memascend.residency.unit_slot import Home
    from memascend.residency.use_order import Order


def victim_for(home: Home, homes: Iterable[Home], order: Order, current: Home | None, *, must: bool) -> Home | None:
    """The unit in the same class whose next use is farthest; one that is used before `home` only if it must be.

    `current` is the unit that is asked for right now, which stays.
    """
    best: Home | None = None
    best_key = (-1, 0)
    for other in homes:
        if other.slot_bytes != home.slot_bytes or other.bound or other.pinned or other in (home, current):
            continue
        if other.base is None and (other.fetch is None or not must):
            continue
        key = (order.next_use(other.index), -other.used)
        if key > best_key:
            best, best_key = other, key
    if best is not None and not must and best_key[0] <= order.next_use(home.index):
        return None
    return best


def is_leaving(home: Home, homes: Iterable[Home]) -> bool:
    """Whether the bytes of an evicted unit of the same class are still held by somebody."""
    return any(
        other.slot_bytes == home.slot_bytes
        and other is not home
        and other.base is None
        and other.fetch is None
        and other.weak is not None
        and not other.weak[0].expired()
        for other in homes
    )


def holders_beside(home: Home, homes: Iterable[Home]) -> list[str]:
    """The names of units of the same class whose bytes somebody holds."""
    return [
        other.name
        for other in homes
        if other.slot_bytes == home.slot_bytes and other.weak is not None and alive(other.weak[0]) is not None
    ]


def is_useless(home: Home, order: Order) -> bool:
    """Whether what is left of the step does not use a unit, and its commit makes the unit's values old."""
    return home.trained and not order.is_used_again(home.index)


def has_useless(home: Home, homes: Iterable[Home], order: Order) -> bool:
    """Whether a resident of the same class may go without being read again."""
    return any(
        other.slot_bytes == home.slot_bytes
        and other.base is not None
        and not (other.bound or other.pinned)
        and is_useless(other, order)
        for other in homes
    )


def crowded(home: Home, homes: Iterable[Home], limits: Limits) -> BudgetError:
    """The error where nothing can leave for a unit, with a budget that has room."""
    holders = holders_beside(home, homes)
    smallest = limits.larger(home.slot_bytes)
    return BudgetError(
        f"no room for unit {home.name!r} ({home.nbytes} bytes): all places of its size are held by views of "
        f"{', '.join(holders) or 'units in use'}, which a checkpoint segment of several blocks, or your "
        f"code, keeps; {limits.option}={smallest} has a place for every unit",
        smallest=smallest,
    )
