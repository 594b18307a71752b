"""Sums squares without rounding: whole numbers, so that neither order nor division into parts changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# In units of 2^-298, the square of the smallest fp32; or a float that was rounded already, or infinity or NaN.
Squares = int | float

_UNITS = 1 << 298


def summed(units: bytes | None, value: float) -> Squares:
    """As rust/math gives it: in units, where it is a number of them."""
    return value if units is None else int.from_bytes(units, "little")


def total(squares: Iterable[Squares]) -> Squares:
    """The sum of them all. What was rounded is added in the order given."""
    whole, rest, exact = 0, 0.0, True
    for one in squares:
        if isinstance(one, int):
            whole += one
        else:
            rest, exact = rest + one, False
    return whole if exact else rounded(whole) + rest


def rounded(squares: Squares) -> float:
    """The nearest float."""
    # Python's division of two whole numbers rounds once.
    return squares / _UNITS if isinstance(squares, int) else squares
