"""Adds squares of floats as whole numbers in Triton: by lane on a grid, and by program to the digits of a sum.

Magnitudes are the bits of an fp32 without its sign. An exponent `top` gives a grid: values below 2^(top - 126) that are
not far smaller are whole numbers on it. The grid is narrow or wide: of 28 bits, or of 23 bits and 28 below these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sums import DIGIT, INFINITE, NAN

INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
NARROW: tl.constexpr = tl.constexpr(28)
WIDE: tl.constexpr = tl.constexpr(51)
# How many squares a lane may add in int64.
NARROW_COUNT, WIDE_COUNT = 128, 256
# The smallest `top` of which the scale is finite and the grid not finer than 2^-149.
NARROW_TOP: tl.constexpr = tl.constexpr(27)
WIDE_TOP: tl.constexpr = tl.constexpr(28)

_INFINITE: tl.constexpr = tl.constexpr(INFINITE)
_NAN: tl.constexpr = tl.constexpr(NAN)
_DIGIT: tl.constexpr = tl.constexpr(DIGIT)
_DIGIT_MASK: tl.constexpr = tl.constexpr((1 << DIGIT) - 1)


@triton.jit
def largest_of(tile):  # type: ignore[no-untyped-def]
    """Of all elements."""
    return tl.max(tl.max(tile, 0), 0)


@triton.jit
def smallest_of(tile):  # type: ignore[no-untyped-def]
    """Of all elements."""
    return tl.min(tl.min(tile, 0), 0)


@triton.jit
def floor_of(top, GRID: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest magnitude of which all bits are on the grid.

    That is 0 where the grid has the last bit of values of the exponent LEAST, as no others have a smaller one.
    """
    smallest = top - (GRID - BITS)
    return tl.where(smallest > LEAST, smallest << 23, 0)


@triton.jit
def squares_of(magnitudes, top, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of the squares in each column.

    Of the narrow grid, one, in units of 2^(2 top - 308), and two zeros. Of the wide grid, three, in units of
    2^(2 top - 354), of 2^29 of these, and of 2^56.
    """
    values = magnitudes.to(tl.float32, bitcast=True)
    if GRID == NARROW:
        # By 2^(154 - top).
        whole = (values * ((281 - top) << 23).to(tl.float32, bitcast=True)).to(tl.int32).to(tl.int64)
        low = tl.sum(whole * whole, 0)
        middle = tl.zeros_like(low)
        high = middle
    else:
        # By 2^(149 - top): below 2^23, so that adding 2^23 rounds to whole numbers, which the lower bits then are.
        values = values * ((276 - top) << 23).to(tl.float32, bitcast=True)
        shifted = values + 8388608.0
        upper = (shifted.to(tl.int32, bitcast=True) - 0x4B000000).to(tl.int64)
        # What was rounded away, exactly: from -2^27 to 2^27.
        lower = ((values - (shifted - 8388608.0)) * 268435456.0).to(tl.int32).to(tl.int64)
        low = tl.sum(lower * lower, 0)
        middle = tl.sum(lower * upper, 0)
        high = tl.sum(upper * upper, 0)
    return low, middle, high


@triton.jit
def add_columns(sums, top, low, middle, high, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds what the lanes have to the digits, which all programs share."""
    # Halves of 32 bits, so that no sum of them overflows. They become digits of 28 bits, and carry.
    first = tl.sum(low & 0xFFFFFFFF, 0)
    second = tl.sum(low >> 32, 0) << 4
    third = tl.zeros((), tl.int64)
    fourth = third
    power = 2 * top - 10
    if GRID == WIDE:
        second += tl.sum(middle & 0xFFFFFFFF, 0) << 1
        third = (tl.sum(middle >> 32, 0) << 5) + tl.sum(high & 0xFFFFFFFF, 0)
        fourth = tl.sum(high >> 32, 0) << 4
        power = 2 * top - 56
    into = sums + power // _DIGIT
    shift = (power % _DIGIT).to(tl.int64)
    carry = first
    above = tl.zeros((), tl.int64)
    for place in tl.static_range(5):
        if place == 1:
            carry += second
        if place == 2:
            carry += third
        if place == 3:
            carry += fourth
        part = (carry & _DIGIT_MASK) << shift
        carry = carry >> _DIGIT
        # Less than 2^29 at a time, so that a digit overflows for no tensor.
        above += part & _DIGIT_MASK
        tl.atomic_add(into + place, above, mask=above != 0, sem="relaxed")
        above = part >> _DIGIT
    tl.atomic_add(into + 5, above, mask=above != 0, sem="relaxed")


@triton.jit
def _row(data, start, numel, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = start + tl.arange(0, COLUMNS)[None, :]
    stored = tl.load(data + offsets, mask=offsets < numel, other=0.0)
    return stored.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def squares_by_row(  # type: ignore[no-untyped-def]
    data, start, numel, top, floor, sums,
    GRID: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same of a tile of any values; what is not on the grid is added to `sums`.

    Reads the tile again row by row, so that no program needs more registers because of it.
    """
    low = tl.zeros((COLUMNS,), tl.int64)
    middle = low
    high = low
    infinite = tl.zeros((), tl.int64)
    nan = infinite
    below = tl.zeros((), tl.int32)
    for row in range(ROWS):
        magnitudes = _row(data, start + row * COLUMNS, numel, COLUMNS)
        infinite += tl.sum(tl.sum((magnitudes == INFINITY).to(tl.int64), 0), 0)
        nan += tl.sum(tl.sum((magnitudes > INFINITY).to(tl.int64), 0), 0)
        below = tl.maximum(below, largest_of(tl.where(magnitudes < floor, magnitudes, 0)))
        on_grid = (magnitudes >= floor) & (magnitudes < INFINITY)
        more_low, more_middle, more_high = squares_of(tl.where(on_grid, magnitudes, 0), top, GRID)
        low += more_low
        middle += more_middle
        high += more_high
    tl.atomic_add(sums + _INFINITE, infinite, mask=infinite > 0, sem="relaxed")
    tl.atomic_add(sums + _NAN, nan, mask=nan > 0, sem="relaxed")
    # On a wide grid beneath the first, and then beneath that one.
    while below > 0:
        limit = floor
        top = tl.maximum(below >> 23, WIDE_TOP)
        floor = floor_of(top, WIDE, BITS, LEAST)
        below = tl.zeros((), tl.int32)
        small_low = tl.zeros((COLUMNS,), tl.int64)
        small_middle = small_low
        small_high = small_low
        for row in range(ROWS):
            magnitudes = _row(data, start + row * COLUMNS, numel, COLUMNS)
            below = tl.maximum(below, largest_of(tl.where(magnitudes < floor, magnitudes, 0)))
            on_grid = (magnitudes >= floor) & (magnitudes < limit)
            more_low, more_middle, more_high = squares_of(tl.where(on_grid, magnitudes, 0), top, WIDE)
            small_low += more_low
            small_middle += more_middle
            small_high += more_high
        add_columns(sums, top, small_low, small_middle, small_high, WIDE)
    return low, middle, high
