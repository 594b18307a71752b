"""Measures gradients, and reads their norms and flags in one device sync."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

from memascend.squares import Squares, rounded, total
from memascend.tensors import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend.gradients.gradient import Gradient
    from memascend.ranks.figures import Figures

    Check = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    Checked = Callable[[torch.Tensor], tuple[bool, Squares]]

# Whether a gradient has a value that is not finite, and its squared norm: numbers, or tensors without dimensions.
Measure = tuple[torch.Tensor, torch.Tensor] | tuple[bool, Squares]

# What the kernels compute with.
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Norms:
    """The norm of all gradients of a step, from a measure that was taken once of each."""

    def __init__(self, check: Check, checked: Checked, figures: Figures | None = None) -> None:
        """Measure by the kernels; `figures` is what ranks tell each other, where there are several.

        Args:
            check: `kernels.check_and_unscale`.
            checked: `kernels.checked`.
            figures: of all ranks.
        """
        self._check = check
        self._checked = checked
        self._figures = figures
        # Of gradients that were measured in memory for this step, by name.
        self._measures: dict[str, Measure] = {}

    def begin_step(self) -> None:
        """Forget what the step before has measured."""
        self._measures.clear()

    def measure(self, values: torch.Tensor) -> Measure:
        """The measure of a gradient in memory."""
        return measure(values, self._check, self._checked)

    def measure_once(self, gradient: Gradient, values: torch.Tensor) -> None:
        """Take the measure that this gradient has for this step, of its values in memory."""
        if gradient.name not in self._measures:
            self._measures[gradient.name] = self.measure(values)

    def of(self, gradients: Iterable[tuple[Gradient, torch.Tensor]]) -> tuple[bool, float]:
        """Whether all of these are finite, and the norm of them all, in double precision.

        Where all were measured in host memory, the sum of all ranks is rounded once: neither order nor the number of
        ranks changes the norm. Nothing is read for it: each was measured as it was handed on, written or used. What
        was done by scalars to one on storage, as clipping does, counts as a factor.
        """
        numbers = read([self._measures.get(gradient.name) or gradient.measure() for gradient, _ in gradients])
        # In the order of the parameters, whichever gradient came first.
        bad, squares = any(bad for bad, _ in numbers), total(squared for _, squared in numbers)
        if self._figures is not None:
            # Each rank has measured its rows.
            told = self._figures.everyone([bad, squares])
            bad, squares = any(bad for bad, _ in told), total(squares for _, squares in told)
        return not bad, math.sqrt(rounded(squares))


def measure(gradient: torch.Tensor, check: Check, checked: Checked) -> Measure:
    """Take the measure of a gradient in memory, in whatever order it lies there, by the kernels.

    Numbers where it lies in host memory: two tensors for each parameter would be held otherwise.
    """
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype not in _FLOATS:
        found = ~torch.isfinite(values).all()
        squared = values.abs().double().square_().sum()
        return (bool(found), float(squared)) if values.device.type == "cpu" else (found, squared)
    if not torch.ops.aten.is_non_overlapping_and_dense(values):
        values = values.contiguous()
    # Neither the flag nor the norm knows an order of dimensions, and the kernel takes few of them.
    return checked(flat(values)) if values.device.type == "cpu" else check(flat(values))


def read(measures: Sequence[Measure]) -> list[tuple[bool, Squares]]:
    """All of them as numbers."""
    away = [index for index, (_, square) in enumerate(measures) if isinstance(square, torch.Tensor)]
    if not away:
        return [(bool(bad), _number(square)) for bad, square in measures]
    # A flag is exact as a number.
    pairs = [torch.stack([cast("torch.Tensor", part).double() for part in measures[index]]) for index in away]
    numbers = torch.stack(pairs).tolist()
    found = {index: (bool(bad), square) for index, (bad, square) in zip(away, numbers, strict=True)}
    return [found.get(index) or (bool(bad), _number(square)) for index, (bad, square) in enumerate(measures)]


def _number(square: torch.Tensor | Squares) -> Squares:
    return float(square) if isinstance(square, torch.Tensor) else square
