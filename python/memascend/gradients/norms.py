"""Reads gradient norms and overflow flags in one device sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Measure", "read"]

# Whether a gradient has a value that is not finite, and its squared norm: numbers, or tensors without dimensions.
Measure = tuple[torch.Tensor, torch.Tensor] | tuple[bool, float]


def read(measures: Sequence[Measure]) -> list[tuple[bool, float]]:
    """All of them as numbers."""
    away = [index for index, (_, square) in enumerate(measures) if isinstance(square, torch.Tensor)]
    if not away:
        return [(bool(bad), float(square)) for bad, square in measures]
    # A flag is exact as a number.
    pairs = [torch.stack([cast("torch.Tensor", part).double() for part in measures[index]]) for index in away]
    numbers = torch.stack(pairs).tolist()
    found = {index: (bool(bad), square) for index, (bad, square) in zip(away, numbers, strict=True)}
    return [found.get(index) or (bool(bad), float(square)) for index, (bad, square) in enumerate(measures)]
