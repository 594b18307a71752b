"""Searches by trial: the smallest value that works, the largest value that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["least", "most"]

# A growth that never works ends here.
_DOUBLINGS_MAX = 6


def least(works: Callable[[int], bool], start: int, *, precision: float = 0.04) -> int | None:
    """The smallest size that works, to a precision: it is at most so much, relatively, above one that does not.

    Args:
        works: tries a size. Where one works, larger ones do.
        start: a first guess, from which it doubles until it works.
        precision: of the answer.

    Returns:
        None where nothing works.
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
    """The last of ascending sizes that works, the first that does not being the end; None where the first does not."""
    best = None
    for size in sizes:
        if not works(size):
            break
        best = size
    return best
