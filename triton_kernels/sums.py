"""Holds exact sums of squares on a device, as whole numbers that kernels add to, and reads the totals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from memascend.tensors import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.tensors import Squares


# Bits of a digit. Each is an int64 to which parts are added; a part may be wider, so that totals carry.
DIGIT = 28
# The largest squares, of 556 bits, and what 2^40 of them take.
DIGITS = 22
INFINITE, NAN = DIGITS, DIGITS + 1
# Numbers (int64) in a row: rows begin at multiples of 128 bytes.
SUMS = 32

# A square is split after its lower 24 bits.
_LOWER_BITS = 24
# Elements that the reference computes at a time. Its temporaries take about 50 bytes an element.
_PIECE_ELEMENTS = 1 << 20


def new_sums(count: int, device: torch.device) -> torch.Tensor:
    """`count` sums of zero, each in a row."""
    return torch.zeros(count, SUMS, dtype=torch.int64, device=device)


def found_in(sums: torch.Tensor) -> list[tuple[bool, Squares]]:
    """For each row, whether an element was not finite, and the exact sum of squares; waits for the device."""
    return [_found(row) for row in sums.tolist()]


def _found(row: list[int]) -> tuple[bool, Squares]:
    if row[NAN]:
        return True, math.nan
    if row[INFINITE]:
        return True, math.inf
    return False, sum(value << DIGIT * place for place, value in enumerate(row[:DIGITS]) if value)


def add_reference(placed: Sequence[tuple[int, torch.Tensor]], sums: torch.Tensor) -> None:
    """Add as the kernel does, in plain torch operations. Parts may differ from the kernel's; totals are equal."""
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
