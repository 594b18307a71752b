"""Gathers rows and reduces gradients among all ranks, in the order of ranks or by the backend."""

from __future__ import annotations

import contextlib
import math
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import distributed

from memascend.distributed.fsdp import AllGather, ReduceScatter
from memascend.distributed.groups import let_go, make_group
from memascend.errors import UsageError
from memascend.storage import Checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.fsdp import FsdpGroup, FsdpParameter

    _Done = TypeVar("_Done")


# Names that are kept for the error about a step in which ranks computed different modules.
_NAMES_MAX = 4096
# The share of the timeout for a collective. In the rest, ranks exchange what each was doing.
_PART = 0.9
_SECONDS_MIN = 0.5


class Collectives:
    """Runs the collectives of a forward and a backward.

    On the CPU they use a gloo group of the run's own, with its timeout. A rank that fails leaves the group, so that the
    others stop waiting and all ranks raise the reason. On other devices they use the mesh's group.
    """

    def __init__(self, exchange: Exchange, ranks: Sequence[int], device: torch.device) -> None:
        """Make the group; all ranks do so together, with the `ranks` of the mesh in its order."""
        self._exchange = exchange
        # Gathers and reductions since the ranks last compared them: the first names, and a checksum of all.
        self._done: list[str] = []
        self._last: list[str] = []
        self._sum = Checksum()
        self._group: Any = None
        if device.type == "cpu":
            self._group = make_group(max(_SECONDS_MIN, exchange.timeout * _PART), ranks)

    def note(self, done: str) -> None:
        """Record a gather or a reduction of this rank."""
        if len(self._done) < _NAMES_MAX:
            self._done.append(done)
        self._sum.update(torch.frombuffer(bytearray(done.encode() + b"\0"), dtype=torch.uint8))

    def told(self) -> str:
        """A checksum of gathers and reductions since the last call, which must be equal on all ranks."""
        found, self._sum = str(self._sum), Checksum()
        self._last, self._done = self._done, []
        return found

    def require_same(self, told: Sequence[str]) -> None:
        """Reject a step in which ranks mixed rows or gradients of different modules; `told`: checksums by rank.

        Raises:
            UsageError: they did. FSDP2 does not notice, since it compares only shapes.
        """
        if len(set(told)) == 1:
            return
        names = self._exchange.tell("what was gathered and reduced", self._last)
        other = next((rank for rank, one in enumerate(names) if one != names[0]), 1)
        lengths = range(min(len(names[0]), len(names[other])))
        at = next((index for index in lengths if names[0][index] != names[other][index]), len(lengths))
        of = [one[at] if at < len(one) else "nothing more" for one in (names[0], names[other])]
        raise UsageError(
            f"the ranks reached different parts of the model: where rank 0 has {of[0]}, rank {other} has {of[1]}, and "
            "FSDP2 takes the one for the other where their shapes are equal, so that losses and gradients of this step "
            "are wrong, in memory too. Call zero_grad(); let every rank compute every module (an expert that no token "
            "reaches: with no rows), or divide experts with what is around them, and call "
            "model.set_reduce_scatter_unused_params(True), where torch has it"
        )

    def gather(self, what: str, given: Any, do: Callable[[Any], _Done]) -> _Done:
        """Run a gather on all ranks."""
        self.note(what.removeprefix("in "))
        return self.meet(what, given, do)

    def meet(self, what: str, given: Any, do: Callable[[Any], _Done]) -> _Done:
        """Run a collective on all ranks, by `do` with a group; `given` is the mesh's.

        Raises:
            RankError: a rank failed, is gone, or did not come in time; the run has ended.
        """
        if self._exchange.broken is not None:
            raise self._exchange.broken
        try:
            return do(given if self._group is None else self._group)
        except RuntimeError as error:
            # Ranks that wait for this one notice when its connections close, with the last reference to the group.
            traceback.clear_frames(error.__traceback__)
            self.close()
            within = max(_SECONDS_MIN, self._exchange.timeout * (1 - _PART))
            raise self._exchange.lost(f"{what} ({str(error).splitlines()[0][:200]})", within) from error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Around work of this rank before or after a collective: if it fails, the others stop waiting."""
        try:
            yield
        except BaseException as error:
            if self._exchange.broken is None:
                self.close()
                self._exchange.fail(error)
                self._exchange.end("a rank failed in a forward or a backward")
            raise

    def close(self) -> None:
        """Leave the group, which ends the waits of other ranks for this one."""
        group, self._group = self._group, None
        let_go(group)


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
        return self._collectives.gather(
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


class Taken(NamedTuple):
    """A parameter's gradient in one round."""

    before: torch.Tensor | None  # the previous value of its `.grad`
    parts: list[torch.Tensor]  # of all ranks, in their order, divided by FSDP2's divisor of the sum

    def sum_into(self, values: torch.Tensor) -> None:
        """Write the sum of all parts to `values`."""
        first, *others = self.parts
        values.copy_(first)
        for part in others:
            values.add_(part.to(values.dtype))


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
                one.leaf.grad = None

    def take(self, one: FsdpParameter) -> Taken | None:
        """A parameter's parts of this round; None if FSDP2 has reduced nothing."""
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
        """All gradients of this round were taken: other parameters get their previous `.grad` back."""
        self._parts = None
        for one in self._group.parameters:
            before = self._before.pop(id(one), None)
            if before is not None:
                one.leaf.grad = before
