"""Adds squares of floats as integers in Triton.

Each lane of a program adds squares on a grid. Each program then adds the results of its lanes to the digits of a sum.

A magnitude has the bits of an fp32 number without the sign.

[Note: grids] An exponent field `top` defines a narrow grid and a wide grid for values below 2^(top - 126). The narrow
grid has 28 bits and consists of the multiples of 2^(top - 154). The wide grid has 51 bits (23 upper and 28 lower bits)
and consists of the multiples of 2^(top - 177). If a value is on a grid, its square is an integer in units that depend
only on `top`, so that lanes can add squares exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sums import DIGIT, INFINITE, NAN

INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
NARROW: tl.constexpr = tl.constexpr(28)
WIDE: tl.constexpr = tl.constexpr(51)
# A lane may add this number of squares on the narrow grid or on the wide grid without an overflow of int64.
NARROW_COUNT, WIDE_COUNT = 128, 256
# The smallest `top` for which the scale of `squares_of` is finite and the grid is not finer than 2^-149.
NARROW_TOP: tl.constexpr = tl.constexpr(27)
WIDE_TOP: tl.constexpr = tl.constexpr(28)

_INFINITE: tl.constexpr = tl.constexpr(INFINITE)
_NAN: tl.constexpr = tl.constexpr(NAN)
_DIGIT: tl.constexpr = tl.constexpr(DIGIT)
_DIGIT_MASK: tl.constexpr = tl.constexpr((1 << DIGIT) - 1)


@triton.jit
def largest_of(tile):  # type: ignore[no-untyped-def]
    """Returns the largest element of a tile."""
    return tl.max(tl.max(tile, 0), 0)


@triton.jit
def smallest_of(tile):  # type: ignore[no-untyped-def]
    """Returns the smallest element of a tile."""
    return tl.min(tl.min(tile, 0), 0)


@triton.jit
def floor_of(top, GRID: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the smallest magnitude M such that all values of magnitude M or more are on the grid. See [Note: grids].

    Returns 0 if the grid contains the last bit of values with the exponent LEAST, because no value has a smaller last
    bit.
    """
    smallest = top - (GRID - BITS)
    return tl.where(smallest > LEAST, smallest << 23, 0)


@triton.jit
def squares_of(magnitudes, top, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sum of the squares of each column, as three integers. All values must be on the grid.

    On the narrow grid, the three integers are one sum, in units of 2^(2 top - 308), and two zeros. On the wide grid,
    they are three sums: the first in units of u = 2^(2 top - 354), the second in units of 2^29 u, the third in units of
    2^56 u.
    """
    values = magnitudes.to(tl.float32, bitcast=True)
    if GRID == NARROW:
        # Multiplying by 2^(154 - top) makes the values integers.
        whole = (values * ((281 - top) << 23).to(tl.float32, bitcast=True)).to(tl.int32).to(tl.int64)
        low = tl.sum(whole * whole, 0)
        middle = tl.zeros_like(low)
        high = middle
    else:
        # After a multiplication by 2^(149 - top), values are below 2^23. Adding 2^23 then rounds a value to an integer:
        # the bits of the result, minus the bits of 2^23 (0x4B000000).
        values = values * ((276 - top) << 23).to(tl.float32, bitcast=True)
        shifted = values + 8388608.0
        upper = (shifted.to(tl.int32, bitcast=True) - 0x4B000000).to(tl.int64)
        # `lower` is the part that this rounding dropped, in units of 2^-28: an exact integer from -2^27 to 2^27.
        lower = ((values - (shifted - 8388608.0)) * 268435456.0).to(tl.int32).to(tl.int64)
        low = tl.sum(lower * lower, 0)
        middle = tl.sum(lower * upper, 0)
        high = tl.sum(upper * upper, 0)
    return low, middle, high


@triton.jit
def add_columns(sums, top, low, middle, high, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the sums of all lanes to the digits in `sums`. All programs share `sums`."""
    # Sum the 32-bit halves of the integers separately, so that no sum overflows. Then convert the sums to digits of 28
    # bits, with carries.
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
        # Each call adds less than 2^29 to a digit, so that a digit does not overflow for a tensor of any size.
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
    """Returns the result of `squares_of` for those values of a tile that are on the grid.

    Adds the squares of values that are too small for the grid, and the numbers of infinities and NaNs, to `sums`. Reads
    the tile again row by row, so that `check_kernel` needs no additional registers.
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
    # Each iteration takes a wide grid for the largest value that is left, and adds the squares of the values on this
    # grid. Values that are too small for this grid are left for the next iteration.
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
