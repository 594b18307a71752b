"""Reduces gradients in the order of ranks, so that their bits do not depend on how many there are.

A backend adds the parts of all ranks in an order of its own. One process that accumulates adds micro-batch by
micro-batch. Here each rank gets every part of its rows and adds them as that process would: in the order of ranks, onto
what the rounds before have left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.ranks.fsdp import ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.ranks.collectives import Collectives
    from memascend.ranks.fsdp import FsdpGroup, FsdpParameter

__all__ = ["OrderedReduction"]


class OrderedReduction(ReduceScatter):
    """Exchanges the parts of one group's gradients, and lets each parameter have those of the other ranks.

    FSDP2 takes what the call leaves for the whole gradient, and calls the hooks of one parameter after the other. Those
    ask for the rest. What a round before has left in `.grad` is put aside meanwhile: FSDP2 would add the first part.
    """

    def __init__(self, group: FsdpGroup, collectives: Collectives) -> None:
        self._group = group
        self._collectives = collectives
        # Of the round that is being reduced: by rank, but for the first one.
        self._rest: torch.Tensor | None = None
        self._at = 0
        self._before: dict[int, torch.Tensor] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is sent, or for what is left."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Leave the first rank's part; the others' are handed out by `take`."""
        del op, async_op
        parts = torch.empty_like(input_tensor)
        self._collectives.meet(
            f"in the reduction of {self._group.name}",
            group,
            lambda group: distributed.all_to_all_single(parts, input_tensor, group=group),
        )
        parts = parts.view(group.size(), -1)
        output_tensor.copy_(parts[0])
        self._rest = parts[1:]
        factor = self._group.factor_after(parts.dtype, parts.device)
        if factor is not None and factor != 1.0:
            # As FSDP2 divides what it takes for the sum.
            self._rest.div_(factor)
        self._at = 0
        for one in self._group.parameters:
            if one.leaf.grad is not None:
                self._before[id(one)] = one.leaf.grad
                one.leaf.grad = None

    def take(self, one: FsdpParameter) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """What stood in a parameter's `.grad` before this round, and the other ranks' parts of it, in their order."""
        before = self._before.pop(id(one), None)
        if self._rest is None:
            return before, []
        end = self._at + one.padded_shape.numel()
        parts = [row[self._at : self._at + one.shape.numel()].view(one.shape) for row in self._rest]
        self._at = end
        if end == self._rest.shape[1]:
            self._end()
        return before, parts

    def _end(self) -> None:
        """All parameters that this round has gradients of were asked for: others keep what they had."""
        self._rest = None
        for one in self._group.parameters:
            before = self._before.pop(id(one), None)
            if before is not None:
                one.leaf.grad = before
