"""Keeps exact sums of squares on a device, each as a row of digits.

Kernels add to the digits. `found_in` reads the total of each row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from memascend.tensors import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.tensors import Squares


# The number of bits of a digit. A digit is stored as int64, and may exceed 28 bits for a while: kernels add to a digit
# without a carry, and readers propagate the carries.
DIGIT = 28
# The number of digits of a sum. A sum counts units of 2^-298. The digits can hold the sum of 2^40 squares, each below
# 2^554 units.
DIGITS = 22
# The columns of a row that have the number of infinities and the number of NaNs.
INFINITE, NAN = DIGITS, DIGITS + 1
# The number of int64 values in a row. A row has 256 bytes, so that two rows share no cache line.
SUMS = 32

# `_add_piece` splits a square of 48 bits into halves of this many bits.
_LOWER_BITS = 24
# The number of elements that `add_reference` processes at a time. The temporary tensors take about 50 bytes per
# element.
_PIECE_ELEMENTS = 1 << 20


def new_sums(count: int, device: torch.device) -> torch.Tensor:
    """Makes `count` rows. Each row is a sum of zero."""
    return torch.zeros(count, SUMS, dtype=torch.int64, device=device)


def found_in(sums: torch.Tensor) -> list[tuple[bool, Squares]]:
    """Returns for each row whether an element was not finite, and the exact sum of squares. Waits for the device.

    If an element was not finite, returns inf or NaN instead of the sum.
    """
    return [_found(row) for row in sums.tolist()]


def _found(row: list[int]) -> tuple[bool, Squares]:
    if row[NAN]:
        return True, math.nan
    if row[INFINITE]:
        return True, math.inf
    return False, sum(value << DIGIT * place for place, value in enumerate(row[:DIGITS]) if value)


def add_reference(placed: Sequence[tuple[int, torch.Tensor]], sums: torch.Tensor) -> None:
    """Adds squares with plain torch operations.

    The digits may differ from the kernel's digits, but the totals are equal.
    """
    for row, tensor in placed:
        for piece in torch.split(flat(tensor.detach()), _PIECE_ELEMENTS):
            _add_piece(piece.float().view(torch.int32).long(), sums[row])


def _add_piece(bits: torch.Tensor, row: torch.Tensor) -> None:
    magnitudes = bits & 0x7FFFFFFF
    exponents = magnitudes >> 23
    row[INFINITE] += (magnitudes == 0x7F800000).sum()
    row[NAN] += (magnitudes > 0x7F800000).sum()
    squares = ((magnitudes & 0x7FFFFF) | ((exponents > 0).long() << 23)).square()
    squares = torch.where(exponents < 0xFF, squares, 0)
    places = exponents.clamp(1, 0xFE) - 1
    for half in range(2):
        powers = 2 * places + _LOWER_BITS * half
        part = (squares >> _LOWER_BITS * half) & ((1 << _LOWER_BITS) - 1)
        part = part << powers % DIGIT
        row.index_add_(0, powers // DIGIT, part & ((1 << DIGIT) - 1))
        row.index_add_(0, powers // DIGIT + 1, part >> DIGIT)
