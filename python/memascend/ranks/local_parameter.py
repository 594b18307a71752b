"""Represents this rank's rows of a parameter as a plain parameter, whose gradient is the DTensor's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from memascend.ranks.undivided import UndividedSum

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.ranks.fsdp import FsdpParameter


class LocalParameter(torch.nn.Parameter):
    """This rank's rows of a parameter that `fully_shard` divides.

    What stands in its `grad` is what the DTensor's `grad` has of this rank. So there is one record of which gradients
    there are, and everything that users do to the model's parameters is seen.
    """

    _sharded: FsdpParameter

    @classmethod
    def of(cls, sharded: FsdpParameter) -> Self:
        """The rows that a parameter has now, on the same memory."""
        found: Self = torch.Tensor._make_subclass(cls, sharded.local.detach(), sharded.leaf.requires_grad)  # noqa: SLF001
        found._sharded = sharded
        return found

    @property
    def sharded(self) -> FsdpParameter:
        """The parameter whose rows these are."""
        return self._sharded

    @property
    def grad(self) -> Any:
        """This rank's rows of the gradient, divided."""
        found: Any = self._sharded.leaf.grad
        if found is None:
            return None
        if isinstance(found._local_tensor, UndividedSum):  # noqa: SLF001
            found._local_tensor = found._local_tensor.divided()  # noqa: SLF001
        return found._local_tensor  # noqa: SLF001

    @grad.setter
    def grad(self, values: torch.Tensor | None) -> None:
        self._sharded.leaf.grad = None if values is None else self._sharded.as_sharded(values)

    @grad.deleter
    def grad(self) -> None:
        self._sharded.leaf.grad = None

    @property
    def untouched_grad(self) -> Any:
        """The same, for who only asks what stands there: a sum stays one."""
        found: Any = self._sharded.leaf.grad
        standing = None if found is None else found._local_tensor  # noqa: SLF001
        return standing.rows if isinstance(standing, UndividedSum) else standing

    def take_sum(self, divisor: float) -> torch.Tensor | None:
        """Let the sum that is to be divided by this stand in `grad` as it is; None where it is divided already."""
        found: Any = self._sharded.leaf.grad
        standing = found._local_tensor  # noqa: SLF001
        if not isinstance(standing, UndividedSum) or not standing.is_to_be_divided_by(divisor):
            return None
        found._local_tensor = standing.rows  # noqa: SLF001
        return standing.rows

    def divide_later(self, divisor: float, divide: Callable[[float], object]) -> None:
        """What stands in `grad` is a sum: whoever touches it first has it divided, in its place, by `divide`."""
        found: Any = self._sharded.leaf.grad
        found._local_tensor = UndividedSum(found._local_tensor, divisor, divide)  # noqa: SLF001
