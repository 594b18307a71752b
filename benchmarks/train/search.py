"""Searches by trial: the smallest value that works, the largest value that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["least", "most"]

# `least` gives up after this number of sizes, each twice the previous size.
_DOUBLINGS_MAX = 6


def least(works: Callable[[int], bool], start: int, *, precision: float = 0.04) -> int | None:
    """Returns the smallest size that works, to a precision; None if no size works.

    Args:
        works: tries a size. If a size works, larger ones must work, too.
        start: the first size to try. The search doubles it until it works.
        precision: the largest relative distance from the result to a size that does not work.
    """
    low, high = 0, start
    for _ in range(_DOUBLINGS_MAX):
        if works(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > precision * high:
        middle = (low + high) // 2
        if works(middle):
            high = middle
        else:
            low = middle
    return high


def most(works: Callable[[int], bool], sizes: Iterable[int]) -> int | None:
    """Returns the largest of ascending sizes up to which all sizes work; None if the first size does not work."""
    best = None
    for size in sizes:
        if not works(size):
            break
        best = size
    return best
