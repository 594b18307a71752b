"""Represents this rank's rows of a parameter as a plain parameter, whose gradient is the DTensor's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
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
        """This rank's rows of the gradient."""
        found: Any = self._sharded.leaf.grad
        return None if found is None else found._local_tensor  # noqa: SLF001

    @grad.setter
    def grad(self, values: torch.Tensor | None) -> None:
        self._sharded.leaf.grad = None if values is None else self._sharded.as_sharded(values)

    @grad.deleter
    def grad(self) -> None:
        self._sharded.leaf.grad = None
