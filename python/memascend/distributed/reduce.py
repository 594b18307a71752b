"""Gathers rows and reduces gradients among all ranks, either in the order of ranks or by the backend."""

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

    # Called with the `.grad` of earlier rounds, and with whether its values are needed; returns the
    # values in memory, or None if they are not needed.
    Earlier = Callable[[torch.Tensor | None, bool], torch.Tensor | None]


class _Collective:
    """A collective of FSDP2 for one unit, which `Collectives` runs."""

    def __init__(self, collectives: Collectives, name: str) -> None:
        self._collectives = collectives
        self._name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory to send from or to receive into."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Collective, AllGather):
    """Gathers the rows of one unit."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Runs the gather, with the signature of torch's `AllGather`."""
        self._collectives.note(f"the gather of {self._name}")
        return self._collectives.meet(
            f"in the gather of {self._name}",
            group,
            lambda group: distributed.all_gather_into_tensor(output_tensor, input_tensor, group, async_op),
        )


class NativeReduction(_Collective, ReduceScatter):
    """Reduces the gradients of one unit by torch's backend, in the backend's order."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Runs the reduction, with the signature of torch's `ReduceScatter`."""
        return self._collectives.meet(
            f"in the reduction of {self._name}",
            group,
            lambda group: distributed.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op),
        )


class OrderedReduction(_Collective, ReduceScatter):
    """Exchanges the parts of one group's gradients, so that each rank can add the parts of its rows in order of ranks.

    FSDP2 treats the output of the call as the whole gradient, and then calls the hooks of each parameter in turn. These
    hooks call `take`, which adds up the parts. Until then `.grad` of earlier rounds is set aside, because FSDP2 would
    add the first part to it.
    """

    def __init__(self, group: FsdpGroup, collectives: Collectives) -> None:
        super().__init__(collectives, group.name)
        self._group = group
        # The parts of the present round, from all ranks of this replica; None once all were taken.
        self._parts: torch.Tensor | None = None
        # The memory that torch reduces from, if a replica is a single rank.
        self._from: torch.Tensor | None = None
        # The offset in `_parts` of the next parameter.
        self._at = 0
        # By `id()` of the parameter: the `.grad` of earlier rounds that was set aside.
        self._before: dict[int, torch.Tensor] = {}

    def forward_begins(self) -> None:
        """Forgets the memory of a round that failed."""
        self._from = None

    def exact_factor(self, dtype: torch.dtype) -> float:
        """Returns FSDP2's divisor of a sum of this dtype.

        Raises:
            UsageError: the divisor is not a power of two. The sum of all rounds would then have to be divided once,
                after the last round, and FSDP2 does not tell which round is the last.
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
        """Writes the first rank's part to the output; `take` adds up all parts."""
        del op, async_op
        parts = torch.empty_like(input_tensor)
        self._collectives.meet(
            f"in the reduction of {self._name}",
            group,
            lambda group: distributed.all_to_all_single(parts, input_tensor, group=group),
        )
        # FSDP2 divides the output as if it were the sum; `take` then overwrites it.
        output_tensor.copy_(parts.view(group.size(), -1)[0])
        self._begin(parts)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory to send from or to receive into: torch first asks for memory to send from."""
        made = super().allocate(size, dtype=dtype, device=device)
        if self._collectives.layout.shards == 1 and self._from is None:
            self._from = made
        return made

    def reduced_alone(self, output_tensor: torch.Tensor) -> None:
        """Begins the round if a replica is one rank: FSDP2 calls this all-reduce hook after it copied the gradients."""
        del output_tensor
        assert self._from is not None
        given, self._from = self._from, None
        if given.is_cuda:
            # torch frees the memory after copying from it, and this stream reads it later.
            given.record_stream(torch.cuda.current_stream(given.device))
        self._begin(given)

    def _begin(self, parts: torch.Tensor) -> None:
        """Divides the parts of this replica, and sets gradients of earlier rounds aside."""
        factor = self.exact_factor(parts.dtype)
        self._parts = parts.view(self._collectives.layout.shards, -1)
        # Divides each part instead of the sum of all rounds. The bits are equal, because division by a power of two
        # does not round.
        self._parts.div_(factor)
        self._at = 0
        for one in self._group.parameters:
            if one.leaf.grad is not None:
                self._before[id(one)] = one.leaf.grad
                one.set_grad(None)

    def take(self, one: FsdpParameter, earlier: Earlier) -> torch.Tensor | None:
        """Returns the sum of earlier rounds and this one; in a first round, puts the sum into `.grad` and returns None.

        Parts are divided by FSDP2's divisor of the sum. `earlier` reads the sum of earlier rounds.
        """
        before = self._before.pop(id(one), None)
        if self._parts is None:
            # FSDP2 has reduced no gradient in this round.
            return None
        end = self._at + one.padded_shape.numel()
        parts = [row[self._at : self._at + one.shape.numel()].view(one.shape) for row in self._parts]
        self._at = end
        if end == self._parts.shape[1]:
            self._end()
        if before is not None:
            one.set_grad(before)
        # `values` is torch's output, or the sum of earlier rounds.
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
        """Returns the sum over all replicas: each adds its parts to the sum of the replicas before it.

        So a gradient is added in the order of ranks, and moves once from each replica to the next.
        """
        layout = self._collectives.layout
        peers, at = layout.peers, layout.replica
        # `earlier` raises an error if the gradient was used already. All ranks raise it before any waits for another.
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
        """Ends the round: parameters for which `take` was not called get back their `.grad` of earlier rounds."""
        self._parts = None
        for one in self._group.parameters:
            before = self._before.pop(id(one), None)
            if before is not None:
                one.set_grad(before)


def _sum_up(total: torch.Tensor, parts: Sequence[torch.Tensor], *, is_empty: bool = True) -> None:
    """Adds parts to `total` one by one, in its dtype; with `is_empty`, the first part replaces its values."""
    for number, part in enumerate(parts):
        if is_empty and not number:
            total.copy_(part)
        else:
            total.add_(part.to(total.dtype))
