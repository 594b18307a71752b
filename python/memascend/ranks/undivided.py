"""Stands in a DTensor's gradient for a sum that is still to be divided, which whoever touches it gets divided."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def divides_exactly(divisor: float) -> bool:
    """Whether nothing is rounded: then each part may be divided as well as their sum."""
    return abs(math.frexp(divisor)[0]) == 0.5


class UndividedSum(torch.Tensor):
    """This rank's rows of the gradients of all rounds so far, to be divided once, after the last.

    Nobody says which round is the last. So the first who does anything with the gradient has it divided, in its place,
    and from then on this is another name of what stands there. Only the next round takes it as it is.
    """

    @staticmethod
    def __new__(cls: type[Self], rows: torch.Tensor, divisor: float, divide: Callable[[float], object]) -> Self:
        """`rows` are the sum: a tensor, or what stands for one that is on storage; `divide` divides it in its place."""
        del divisor, divide
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, rows.shape, strides=rows.stride(), dtype=rows.dtype, device=rows.device
        )
        return made

    def __init__(self, rows: torch.Tensor, divisor: float, divide: Callable[[float], object]) -> None:
        self._rows = rows
        self._divisor = divisor
        self._divide = divide

    @property
    def rows(self) -> torch.Tensor:
        """What stands there, divided or not."""
        return self._rows

    def is_to_be_divided_by(self, divisor: float) -> bool:
        """Whether it is still a sum, to which another may be added that is to be divided by the same."""
        return self._divisor == divisor

    def divided(self) -> torch.Tensor:
        """What stands there once it is divided."""
        divisor, self._divisor = self._divisor, 1.0
        if divisor != 1.0:
            with torch.no_grad():
                self._divide(divisor)
        return self._rows

    # --- whatever is done with it, is done with the quotient -----------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Methods and attributes, those too that no operation of torch stands for."""
        del types
        return func(*tree_map(_divided, args), **tree_map(_divided, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch does below Python, as with the local tensor of a DTensor."""
        del types
        return func(*tree_map(_divided, args), **tree_map(_divided, kwargs or {}))


def _divided(leaf: Any) -> Any:
    return leaf.divided() if isinstance(leaf, UndividedSum) else leaf
