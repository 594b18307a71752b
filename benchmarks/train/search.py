"""Searches by trial for the smallest value that works, and for the largest value that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["least", "most"]

# `least` returns None if this number of sizes, each twice the previous size, do not work.
_DOUBLINGS_MAX = 6


def least(works: Callable[[int], bool], start: int, *, precision: float = 0.04) -> int | None:
    """Returns approximately the smallest size that works; None if no tried size works.

    Args:
        works: tries a size. If a size works, all larger sizes must work, too.
        start: the first size to try. The search doubles it until a size works, or `_DOUBLINGS_MAX` sizes have failed.
        precision: the largest relative error of the result.
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
    """Returns the largest size that works; None if the first size does not work.

    `sizes` must be ascending. The search ends at the first size that does not work.
    """
    best = None
    for size in sizes:
        if not works(size):
            break
        best = size
    return best
