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


# What is told of a step that is refused by name.
_NAMES_MAX = 4096
# The part of the time that is waited for rows; in the rest the ranks say where they are.
_PART = 0.9
_SECONDS_MIN = 0.5


class Collectives:
    """Where the ranks of a run meet in a forward and in a backward.

    On the CPU over a group of gloo of its own, with the run's own time to wait. A rank that fails cuts it, so that the
    others wait no longer for what does not come, and all say what happened. Elsewhere it is the mesh's group.
    """

    def __init__(self, exchange: Exchange, ranks: Sequence[int], device: torch.device) -> None:
        """Make the group; all ranks do so together, with the `ranks` of the mesh in its order."""
        self._exchange = exchange
        # What was gathered and reduced since the ranks compared it last: the first ones by name, and a sum of all.
        self._done: list[str] = []
        self._last: list[str] = []
        self._sum = Checksum()
        self._met: Callable[[], Callable[[], object] | None] = lambda: None
        self._group: Any = None
        if device.type == "cpu":
            self._group = make_group(max(_SECONDS_MIN, exchange.timeout * _PART), ranks)

    def note(self, done: str) -> None:
        """This rank has taken part in something, which it takes for what all others do."""
        if len(self._done) < _NAMES_MAX:
            self._done.append(done)
        self._sum.update(torch.frombuffer(bytearray(done.encode() + b"\0"), dtype=torch.uint8))

    def told(self) -> str:
        """Tells whether ranks gathered and reduced the same since this was asked last."""
        found, self._sum = str(self._sum), Checksum()
        self._last, self._done = self._done, []
        return found

    def require_same(self, told: Sequence[str]) -> None:
        """Refuse a step whose ranks took rows or gradients of one module for those of another; `told` is by all ranks.

        Raises:
            UsageError: they did, in silence: FSDP2 compares shapes alone.
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

    def hear_of_gathers(self, met: Callable[[], Callable[[], object] | None]) -> None:
        """Let what `met` refers to, as long as it lives, hear of each gather."""
        self._met = met

    def gather(self, what: str, given: Any, do: Callable[[Any], _Done]) -> _Done:
        """Have all ranks meet in a gather."""
        self.note(what.removeprefix("in "))
        met = self._met()
        if met is not None and self._exchange.broken is None:
            with self.alone():
                met()
        return self.meet(what, given, do)

    def meet(self, what: str, given: Any, do: Callable[[Any], _Done]) -> _Done:
        """Have all ranks `do` something in a group; `given` is the mesh's.

        Raises:
            RankError: a rank failed, is gone, or did not come in time; the run has ended.
        """
        if self._exchange.broken is not None:
            raise self._exchange.broken
        try:
            return do(given if self._group is None else self._group)
        except RuntimeError as error:
            # Whoever waits for this one hears of it: connections close with the last of who knows the group.
            traceback.clear_frames(error.__traceback__)
            self.close()
            within = max(_SECONDS_MIN, self._exchange.timeout * (1 - _PART))
            raise self._exchange.lost(f"{what} ({str(error).splitlines()[0][:200]})", within) from error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What this rank does by itself before or after it meets the others: where it fails, they wait no longer."""
        try:
            yield
        except BaseException as error:
            if self._exchange.broken is None:
                self.close()
                self._exchange.fail(error)
                self._exchange.end("a rank failed in a forward or a backward")
            raise

    def close(self) -> None:
        """Let the group go; who waits in it for this rank waits no longer."""
        group, self._group = self._group, None
        let_go(group)


class _Met:
    """A collective of FSDP2's that is done by `Collectives`."""

    def __init__(self, collectives: Collectives, name: str) -> None:
        self._collectives = collectives
        self._name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is sent, or for what comes."""
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

    before: torch.Tensor | None  # what stood in its `.grad`
    parts: list[torch.Tensor]  # of all ranks, in their order, divided by what FSDP2 divides their sum by

    def sum_into(self, values: torch.Tensor) -> None:
        """Leave the sum of all parts."""
        first, *others = self.parts
        values.copy_(first)
        for part in others:
            values.add_(part.to(values.dtype))


class OrderedReduction(_Met, ReduceScatter):
    """Exchanges the parts of one group's gradients, and lets each parameter have those of all ranks.

    FSDP2 takes what the call leaves for the whole gradient, and calls the hooks of one parameter after the other. Those
    ask for the parts. What a round before has left in `.grad` is put aside meanwhile: FSDP2 would add the first part.
    """

    def __init__(self, group: FsdpGroup, collectives: Collectives) -> None:
        super().__init__(collectives, group.name)
        self._group = group
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
            f"FSDP2 divides the gradients of {self._name} by {factor:g}, which rounds each round by itself, and "
            "reduction='ordered' has the bits of one process: divide the loss yourself, by the micro-batches of all "
            "ranks, and call set_gradient_divide_factor(1.0) on each module that fully_shard() was applied to (each "
            "FSDPModule in model.modules()), or pass reduction='native' to offload()"
        )

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Leave the first rank's part; the others' are handed out by `take`."""
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
