"""Measures gradients, and reads their norms and flags in one device sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Measure", "measure", "read"]

# Whether a gradient has a value that is not finite, and its squared norm: numbers, or tensors without dimensions.
Measure = tuple[torch.Tensor, torch.Tensor] | tuple[bool, float]

# What the kernels compute with.
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def measure(gradient: torch.Tensor, check: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Measure:
    """Take the measure of a gradient in memory, in whatever order it lies there, by `kernels.check_and_unscale`.

    Numbers where it lies in host memory: two tensors for each parameter would be kept otherwise.
    """
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if values.dtype in _FLOATS and torch.ops.aten.is_non_overlapping_and_dense(values):
        # Neither the flag nor the norm knows an order of dimensions, and the kernel takes few of them.
        found, squared = check(values.detach().as_strided((values.numel(),), (1,)))
    else:
        found = ~torch.isfinite(values).all()
        squared = values.detach().abs().double().square_().sum()
    return (bool(found), float(squared)) if values.device.type == "cpu" else (found, squared)


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
