"""Reduces gradients in the order of ranks, so that their bits do not depend on how many there are.

A backend adds the parts of all ranks in an order of its own. One process that accumulates adds micro-batch by
micro-batch. Here each rank gets every part of its rows and adds them as that process would: in the order of ranks, onto
what the rounds before have left.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from memascend.errors import UsageError
from memascend.ranks.fsdp import ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.ranks.collectives import Collectives
    from memascend.ranks.fsdp import FsdpGroup, FsdpParameter


class Taken(NamedTuple):
    """A parameter's gradient in one round."""

    before: torch.Tensor | None  # what stood in its `.grad`
    parts: list[torch.Tensor]  # of all ranks, in their order, divided by what FSDP2 divides their sum by

    def sum_into(self, values: torch.Tensor) -> None:
        """Leave the sum of all parts."""
        first, *others = self.parts
        values.copy_(first)
        for part in others:
            values.add_(part.to(values.dtype))


class OrderedReduction(ReduceScatter):
    """Exchanges the parts of one group's gradients, and lets each parameter have those of all ranks.

    FSDP2 takes what the call leaves for the whole gradient, and calls the hooks of one parameter after the other. Those
    ask for the parts. What a round before has left in `.grad` is put aside meanwhile: FSDP2 would add the first part.
    """

    def __init__(self, group: FsdpGroup, collectives: Collectives) -> None:
        self._group = group
        self._collectives = collectives
        # Of the round that is being reduced, by rank.
        self._parts: torch.Tensor | None = None
        self._at = 0
        self._before: dict[int, torch.Tensor] = {}

    def exact_factor(self, dtype: torch.dtype) -> float:
        """What FSDP2 divides a sum of this dtype by.

        Raises:
            UsageError: it is no power of two. The sum of all rounds would have to be divided once, after the last
                round, and nobody says which round that is.
        """
        factor = self._group.factor_after(dtype)
        if factor is None:
            return 1.0
        if abs(math.frexp(factor)[0]) == 0.5:
            return factor
        raise UsageError(
            f"FSDP2 divides the gradients of {self._group.name} by {factor:g}, which rounds each round by itself, and "
            "reduction='ordered' has the bits of one process: divide the loss yourself, by the micro-batches of all "
            "ranks, and call set_gradient_divide_factor(1.0) on each module that fully_shard() was applied to (each "
            "FSDPModule in model.modules()), or pass reduction='native' to offload()"
        )

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is sent, or for what is left."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Leave the first rank's part; the others' are handed out by `take`."""
        del op, async_op
        factor = self.exact_factor(input_tensor.dtype)
        parts = torch.empty_like(input_tensor)
        self._collectives.meet(
            f"in the reduction of {self._group.name}",
            group,
            lambda group: distributed.all_to_all_single(parts, input_tensor, group=group),
        )
        self._parts = parts.view(group.size(), -1)
        # FSDP2 divides this as if it were the sum.
        output_tensor.copy_(self._parts[0])
        # Each part as well as the sum of all rounds: nothing is rounded.
        self._parts.div_(factor)
        self._at = 0
        for one in self._group.parameters:
            if one.leaf.grad is not None:
                self._before[id(one)] = one.leaf.grad
                one.leaf.grad = None

    def take(self, one: FsdpParameter) -> Taken | None:
        """What came of a parameter in this round; None where FSDP2 has reduced nothing."""
        before = self._before.pop(id(one), None)
        if self._parts is None:
            return None
        end = self._at + one.padded_shape.numel()
        parts = [row[self._at : self._at + one.shape.numel()].view(one.shape) for row in self._parts]
        self._at = end
        if end == self._parts.shape[1]:
            self._end()
        return Taken(before, parts)

    def _end(self) -> None:
        """All parameters that this round has gradients of were asked for: others keep what they had."""
        self._parts = None
        for one in self._group.parameters:
            before = self._before.pop(id(one), None)
            if before is not None:
                one.leaf.grad = before
