"""Gathers rows, and reduces gradients in the order of ranks or in the order of torch's backend."""

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

    # A function of two arguments: the `.grad` of earlier rounds (None in the first round), and whether the caller needs
    # the values of this `.grad`. The function returns these values in memory, or None if there are none or the caller
    # does not need them.
    Earlier = Callable[[torch.Tensor | None, bool], torch.Tensor | None]


class _Collective:
    """One collective of FSDP2 for one unit. `Collectives` runs the collective."""

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
    """Exchanges the gradients of one group, so that each rank can add the gradients of its rows in the order of ranks.

    A part is the gradient of one rank for some rows. A round is one reduction; a step with several backwards may have
    several rounds. FSDP2 treats the output of the call as the whole gradient, and then calls each parameter's hooks.
    These hooks call `take`, which adds the parts. Before the hooks run, `_begin` sets `.grad` of earlier rounds aside,
    because FSDP2 would add the first part to this `.grad`.
    """

    def __init__(self, group: FsdpGroup, collectives: Collectives) -> None:
        super().__init__(collectives, group.name)
        self._group = group
        # The parts of the present round, from all ranks of this replica. None between two rounds.
        self._parts: torch.Tensor | None = None
        # If a replica is a single rank: the memory into which torch copies the gradients of a round.
        self._from: torch.Tensor | None = None
        # The offset in `_parts` of the next parameter.
        self._at = 0
        # By `id()` of the parameter: the `.grad` of earlier rounds that was set aside.
        self._before: dict[int, torch.Tensor] = {}

    def forward_begins(self) -> None:
        """Drops the memory that a failed round has left in `_from`."""
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
            f"FSDP2 divides the gradients of {self._name} by {factor:g}, which rounds them in each backward. "
            "So reduction='ordered' cannot be bit-identical to one process: divide the loss by the number of "
            "micro-batches on all ranks, and call set_gradient_divide_factor(1.0) on each FSDPModule in "
            "model.modules(), or pass reduction='native' to offload()"
        )

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Receives the parts of this rank's rows, and writes the first rank's part to the output."""
        del op, async_op
        parts = torch.empty_like(input_tensor)
        self._collectives.meet(
            f"in the reduction of {self._name}",
            group,
            lambda group: distributed.all_to_all_single(parts, input_tensor, group=group),
        )
        # FSDP2 divides the output as if the output were the sum. `take` then overwrites or drops the output.
        output_tensor.copy_(parts.view(group.size(), -1)[0])
        self._begin(parts)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory to send from or to receive into. In each round, torch first asks for memory to send from."""
        made = super().allocate(size, dtype=dtype, device=device)
        if self._collectives.layout.shards == 1 and self._from is None:
            self._from = made
        return made

    def reduced_alone(self, output_tensor: torch.Tensor) -> None:
        """Begins the round in place of `__call__`, which FSDP2 does not call if a replica is a single rank.

        FSDP2 calls this function as its all-reduce hook, after FSDP2 has copied the gradients into `_from`.
        """
        del output_tensor
        assert self._from is not None
        given, self._from = self._from, None
        if given.is_cuda:
            # The last reference to this memory may go before the current stream has read it. The allocator must not
            # reuse the memory until the stream has read it.
            given.record_stream(torch.cuda.current_stream(given.device))
        self._begin(given)

    def _begin(self, parts: torch.Tensor) -> None:
        """Divides the parts of this replica, and sets gradients of earlier rounds aside."""
        factor = self.exact_factor(parts.dtype)
        self._parts = parts.view(self._collectives.layout.shards, -1)
        # Divides each part instead of the sum of all rounds. The bits are equal, because division by a power of two
        # does not round (except to subnormal numbers).
        self._parts.div_(factor)
        self._at = 0
        for one in self._group.parameters:
            if one.leaf.grad is not None:
                self._before[id(one)] = one.leaf.grad
                one.set_grad(None)

    def take(self, one: FsdpParameter, earlier: Earlier) -> torch.Tensor | None:
        """Adds the parts of one parameter in this round.

        In the first round, puts their sum into `.grad` and returns None. In a later round, returns the sum of all
        rounds. Returns None, too, if FSDP2 has reduced no gradient of the group in this round. `earlier` reads the sum
        of earlier rounds.
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
        """Returns the sum over all replicas and rounds. Each replica adds its parts to the sum of earlier replicas.

        The first replica adds its parts to the sum of earlier rounds, if any. So gradients of a round are added in the
        order of ranks. The last replica sends the result to all replicas.
        """
        layout = self._collectives.layout
        peers, at = layout.peers, layout.replica
        # `earlier` raises an error if an update already used the gradient. All ranks raise this error here, before any
        # rank waits for another rank.
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
    """Adds parts to `total` one by one, in the dtype of `total`. If `is_empty`, the first part replaces `total`."""
    for number, part in enumerate(parts):
        if is_empty and not number:
            total.copy_(part)
        else:
            total.add_(part.to(total.dtype))
