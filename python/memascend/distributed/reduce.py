"""Gathers rows and reduces gradients among all ranks, in the order of ranks or by the backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.distributed.fsdp import AllGather, ReduceScatter
from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.distributed.collectives import Collectives
    from memascend.distributed.fsdp import FsdpGroup, FsdpParameter


class _Met:
    """A collective of FSDP2 that `Collectives` runs."""

    def __init__(self, collectives: Collectives, name: str) -> None:
        self._collectives = collectives
        self._name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory to send from or to receive into."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Met, AllGather):
    """Gathers the rows of one unit."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """As torch's own."""
        self._collectives.note(f"the gather of {self._name}")
        return self._collectives.meet(
            f"in the gather of {self._name}",
            group,
            lambda group: distributed.all_gather_into_tensor(output_tensor, input_tensor, group, async_op),
        )


class NativeReduction(_Met, ReduceScatter):
    """Reduces the gradients of one unit as torch's backend does."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """As torch's own."""
        return self._collectives.meet(
            f"in the reduction of {self._name}",
            group,
            lambda group: distributed.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op),
        )


class OrderedReduction(_Met, ReduceScatter):
    """Exchanges the parts of one group's gradients, so that each rank has its rows' parts from all ranks.

    FSDP2 uses the output of the call as the whole gradient, and then calls the hooks of each parameter in turn. The
    hooks take the parts. Meanwhile `.grad` of earlier rounds is put aside: FSDP2 would add the first part to it.
    """

    def __init__(self, group: FsdpGroup, collectives: Collectives) -> None:
        super().__init__(collectives, group.name)
        self._group = group
        # The parts of the present round, by rank.
        self._parts: torch.Tensor | None = None
        self._at = 0
        self._before: dict[int, torch.Tensor] = {}

    def exact_factor(self, dtype: torch.dtype) -> float:
        """FSDP2's divisor of a sum of this dtype.

        Raises:
            UsageError: it is no power of two. Then the sum of all rounds would have to be divided once, after the last
                round, and FSDP2 does not say which round is the last.
        """
        factor = self._group.factor_after(dtype)
        if factor is None:
            return 1.0
        if abs(math.frexp(factor)[0]) == 0.5:
            return factor
        raise UsageError(
            f"FSDP2 divides the gradients of {self._name} by {factor:g}, which rounds each round by itself, and "
            "reduction='ordered' has the bits of one process: divide the loss yourself, by the micro-batches of all "
            "ranks, and call set_gradient_divide_factor(1.0) on each module that fully_shard() was applied to (each "
            "FSDPModule in model.modules()), or pass reduction='native' to offload()"
        )

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the first rank's part to the output; `take` returns all parts."""
        del op, async_op
        factor = self.exact_factor(input_tensor.dtype)
        parts = torch.empty_like(input_tensor)
        self._collectives.meet(
            f"in the reduction of {self._name}",
            group,
            lambda group: distributed.all_to_all_single(parts, input_tensor, group=group),
        )
        self._parts = parts.view(group.size(), -1)
        # FSDP2 divides this as if it were the sum.
        output_tensor.copy_(self._parts[0])
        # Dividing each part equals dividing the sum of all rounds: by a power of two nothing is rounded.
        self._parts.div_(factor)
        self._at = 0
        for one in self._group.parameters:
            if one.leaf.grad is not None:
                self._before[id(one)] = one.leaf.grad
                one.set_grad(None)

    def take(self, one: FsdpParameter) -> Sequence[torch.Tensor]:
        """Put this round's sum into a parameter's gradient, or return the parts to add to that of earlier rounds.

        The parts are of all ranks, in their order, divided by FSDP2's divisor of the sum.
        """
        before = self._before.pop(id(one), None)
        if self._parts is None:
            # FSDP2 has reduced nothing.
            return ()
        end = self._at + one.padded_shape.numel()
        parts = [row[self._at : self._at + one.shape.numel()].view(one.shape) for row in self._parts]
        self._at = end
        if end == self._parts.shape[1]:
            self._end()
        if before is not None:
            one.set_grad(before)
            return parts
        values = one.grad
        for number, part in enumerate(parts):
            values.add_(part.to(values.dtype)) if number else values.copy_(part)
        return ()

    def _end(self) -> None:
        """All gradients of this round were taken: other parameters get their previous `.grad` back."""
        self._parts = None
        for one in self._group.parameters:
            before = self._before.pop(id(one), None)
            if before is not None:
                one.set_grad(before)
