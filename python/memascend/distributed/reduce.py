"""Gathers rows and reduces gradients among all ranks, in the order of ranks or by the backend."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.distributed.fsdp import AllGather, ReduceScatter
from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.distributed.collectives import Collectives
    from memascend.distributed.fsdp import FsdpGroup, FsdpParameter

    # Called with `.grad` of earlier rounds, and whether its values are needed: these, in a tensor with memory.
    Earlier = Callable[[torch.Tensor | None, bool], torch.Tensor | None]


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
        # The parts of the present round, of the ranks of this replica.
        self._parts: torch.Tensor | None = None
        # The memory that torch reduces from.
        self._from: torch.Tensor | None = None
        self._at = 0
        self._before: dict[int, torch.Tensor] = {}

    def forward_begins(self) -> None:
        """Forget what a round that failed has left."""
        self._from = None

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
        """Write the first rank's part to the output; `take` adds up all parts."""
        del op, async_op
        parts = torch.empty_like(input_tensor)
        self._collectives.meet(
            f"in the reduction of {self._name}",
            group,
            lambda group: distributed.all_to_all_single(parts, input_tensor, group=group),
        )
        # FSDP2 divides this as if it were the sum.
        output_tensor.copy_(parts.view(group.size(), -1)[0])
        self._begin(parts)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory to send from or to receive into: torch asks first for the former, and then for the latter."""
        made = super().allocate(size, dtype=dtype, device=device)
        if self._collectives.layout.shards == 1 and self._from is None:
            self._from = made
        return made

    def reduced_alone(self, output_tensor: torch.Tensor) -> None:
        """Torch has reduced among the ranks of a replica, which is one rank: it has copied its gradients."""
        del output_tensor
        assert self._from is not None
        given, self._from = self._from, None
        if given.is_cuda:
            # torch frees it after its own copy of it, and this stream reads it later.
            given.record_stream(torch.cuda.current_stream(given.device))
        self._begin(given)

    def _begin(self, parts: torch.Tensor) -> None:
        """Divide the parts of this replica, and put gradients of earlier rounds aside."""
        factor = self.exact_factor(parts.dtype)
        self._parts = parts.view(self._collectives.layout.shards, -1)
        # Dividing each part equals dividing the sum of all rounds: by a power of two nothing is rounded.
        self._parts.div_(factor)
        self._at = 0
        for one in self._group.parameters:
            if one.leaf.grad is not None:
                self._before[id(one)] = one.leaf.grad
                one.set_grad(None)

    def take(self, one: FsdpParameter, earlier: Earlier) -> torch.Tensor | None:
        """Put this round's sum into a parameter's gradient; where it has one of earlier rounds, return the sum of both.

        Parts are divided by FSDP2's divisor of the sum. `earlier` reads the sum of earlier rounds.
        """
        before = self._before.pop(id(one), None)
        if self._parts is None:
            # FSDP2 has reduced nothing.
            return None
        end = self._at + one.padded_shape.numel()
        parts = [row[self._at : self._at + one.shape.numel()].view(one.shape) for row in self._parts]
        self._at = end
        if end == self._parts.shape[1]:
            self._end()
        if before is not None:
            one.set_grad(before)
        # What torch made, or the sum of earlier rounds.
        values, total = one.grad, None
        if self._collectives.layout.replicas > 1 and one.shape.numel():
            total = self._passed_on(one, parts, values, partial(earlier, None if before is None else values))
            if before is None:
                values.copy_(total)
        elif before is not None:
            total = earlier(values, True)
            assert total is not None
            _sum_up(total, parts, is_empty=False)
        else:
            _sum_up(values, parts)
        return None if before is None else total

    def _passed_on(
        self,
        one: FsdpParameter,
        parts: Sequence[torch.Tensor],
        like: torch.Tensor,
        earlier: Callable[[bool], torch.Tensor | None],
    ) -> torch.Tensor:
        """The sum of all replicas: each adds its parts to the sum of those before it, and the last one's is final.

        So a gradient is added in the order of ranks, and moves once from each replica to the next.
        """
        layout = self._collectives.layout
        peers, at = layout.peers, layout.replica
        # All ranks alike reject more of a gradient that was used, before one waits for another.
        begun = earlier(not at)
        total = torch.empty_like(like, memory_format=torch.contiguous_format)

        def pass_on(group: Any) -> None:
            if at:
                distributed.recv(total, peers[at - 1], group)
            elif begun is not None:
                total.copy_(begun)
            _sum_up(total, parts, is_empty=not at and begun is None)
            if at + 1 < layout.replicas:
                distributed.send(total, peers[at + 1], group)
            distributed.broadcast(total, peers[-1], group)

        mesh: Any = one.leaf.device_mesh  # type: ignore[attr-defined]
        self._collectives.meet(f"in the sum of {one.name} over replicas", mesh.get_group(0), pass_on, peers=True)
        return total

    def _end(self) -> None:
        """All gradients of this round were taken: other parameters get their previous `.grad` back."""
        self._parts = None
        for one in self._group.parameters:
            before = self._before.pop(id(one), None)
            if before is not None:
                one.set_grad(before)


def _sum_up(total: torch.Tensor, parts: Sequence[torch.Tensor], *, is_empty: bool = True) -> None:
    """Add parts to a sum one by one, in its own type; `is_empty`: the first one begins it."""
    for number, part in enumerate(parts):
        if is_empty and not number:
            total.copy_(part)
        else:
            total.add_(part.to(total.dtype))
