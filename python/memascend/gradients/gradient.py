"""Holds the gradient of one parameter from its arrival until it is dropped."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memascend.errors import UsageError
from memascend.gradients.handle import GradientHandle
from memascend.gradients.state import State, moved
from memascend.residency.reached_memory import Outlived
from memascend.squares import rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.gradients.arrivals import Arrivals
    from memascend.gradients.deferred_gradient import Notice
    from memascend.gradients.norms import Measure
    from memascend.gradients.state import Move
    from memascend.residency.placeholder import Place

_WORDS: dict[Notice, str] = {
    "add": "accumulation",
    "change": "a change of gradients, as by clipping",
    "norm": "a norm of gradients",
    "read": "a read of gradients",
    "scaler": "a GradScaler",
    "zero": "zero_grad(set_to_none=False)",
}


class Gradient:
    """The gradient of one parameter: where it is, the update that it makes, what stands in `p.grad` for it."""

    __slots__ = (
        "__weakref__",
        "_arrivals",
        "_given",
        "_used",
        "arrived_in",
        "found",
        "group",
        "handle",
        "in_pieces",
        "name",
        "options",
        "place",
        "state",
        "step",
    )

    def __init__(self, arrivals: Arrivals, place: Place, group: int, step: int) -> None:
        """`group` is the parameter's place in `param_groups`; `step` counts the updates that are committed."""
        self._arrivals = arrivals
        self.place = place
        self.name = place.name
        self.group = group
        self.step = step
        self.state = State.NONE
        self.handle: GradientHandle | None = None
        # Of the update that is staged.
        self.options: Any = None
        # The measure of a gradient that is gone into an update.
        self.found: Measure | None = None
        # The backward of the step that brought it last.
        self.arrived_in = -1
        # It comes in several pieces in one backward (nested graph tasks), so it is never updated as it appears.
        self.in_pieces = False
        # The gradient in memory that a step has used (which may be gone, and another be where it was), and its version.
        self._used: tuple[weakref.ref[torch.Tensor], int] | None = None
        # The memory that it came on, which others have, too; in memory it would be on it still.
        self._given: Outlived | None = None

    # --- what becomes of it ---------------------------------------------------------

    def store(self, gradient: torch.Tensor) -> None:
        """Write one that came where there was none to storage."""
        self._arrivals.engine.spill(self.name, gradient)
        self._move("store")
        self._stand_in()

    def change(self, gradient: torch.Tensor, *, add: bool) -> None:
        """Replace what is on storage, or add to it."""
        after = moved(self.name, self.state, "change")
        self._arrivals.engine.spill(self.name, gradient, add=add)
        self.state = after

    def take(self, gradient: torch.Tensor, found: Measure) -> None:
        """Use one that came where there was none: nothing is left of it but its measure."""
        self.found = found
        self._begin("take", gradient, 1.0)
        self._stand_in()

    def stage(self, gradient: torch.Tensor, factor: float) -> None:
        """Begin the update by its value in memory, multiplied by `factor`."""
        self._begin("stage", gradient, factor)

    def stage_stored(self, factors: Sequence[float], factor: float) -> None:
        """Begin the update by what is on storage, multiplied by each of `factors` in turn."""
        after = moved(self.name, self.state, "stage")
        self.options = self._arrivals.rule.options(self)
        self._arrivals.rule.update_spilled(self, factors, self._arrivals.scale.inverse * factor)
        self.state = after

    def unstage(self) -> None:
        """Discard the update that is staged; the gradient is still there."""
        self._arrivals.engine.discard(self.name)
        self._move("unstage")

    def commit(self) -> None:
        """The step that has its update is committed."""
        self._move("end")
        self.step += 1

    def skip(self) -> None:
        """The step that had its update is skipped."""
        self._move("end")

    def drop(self, *, discarded: bool = False) -> None:
        """Forget it, and the update that is staged; `discarded`: all updates of the step were."""
        if self.state.staged and not discarded:
            self._arrivals.engine.discard(self.name)
        if self.state.stored:
            self._arrivals.engine.drop_spilled(self.name)
        if self.handle is not None:
            self.handle.gradient.drop()
        self.handle = self._given = None
        self._move("drop")

    def _begin(self, move: Move, gradient: torch.Tensor, factor: float) -> None:
        after = moved(self.name, self.state, move)
        self.options = self._arrivals.rule.options(self)
        self._arrivals.rule.update(self, gradient, self._arrivals.scale.inverse * factor)
        # Only now: an update that could not begin is no part of the step.
        self.state = after

    def _move(self, move: Move) -> None:
        self.state = moved(self.name, self.state, move)

    # --- what stands in p.grad ------------------------------------------------------

    def _stand_in(self) -> None:
        # torch's `grad` is an edge that Python's collector does not see: what stands in it must not lead back here.
        self.handle = GradientHandle(weakref.proxy(self), strides=self.place.stride, device=self.place.device)
        self.place.parameter.grad = self.handle

    def stands_in(self, gradient: torch.Tensor | None) -> bool:
        """Whether p.grad is the handle, or another tensor of the same gradient, which then is the handle."""
        if gradient is self.handle:
            return True
        if (
            self.handle is None
            or not isinstance(gradient, GradientHandle)
            or gradient.gradient is not self.handle.gradient
        ):
            return False
        self.handle = gradient
        return True

    def note_used(self, gradient: torch.Tensor) -> None:
        """A step has used this gradient in memory."""
        self._used = (weakref.ref(gradient), gradient._version)  # noqa: SLF001

    def is_used(self, gradient: torch.Tensor) -> bool:
        """Whether a step has used this gradient in memory, which nobody wrote to since."""
        return self._used is not None and self._used[0]() is gradient and self._used[1] == gradient._version  # noqa: SLF001

    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient laid out as the parameter is stored."""
        if isinstance(gradient, GradientHandle):
            gradient = gradient.materialize()
        gradient = gradient.detach()
        if gradient.is_sparse:
            return gradient
        if tuple(gradient.stride()) != self.place.stride and gradient.numel() > 1:
            gradient = torch.empty_strided(
                self.place.shape, self.place.stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        return gradient

    def note_given(self, values: torch.Tensor) -> None:
        """It came on memory that somebody else may have."""
        self._given = Outlived(self.place, values)

    def require_own(self) -> None:
        """Refuse to change it where somebody has the memory that it came on, which would change with it."""
        if self._given is not None and self._given.checksum() is not None:
            self._refuse_given("would be changed with it")

    def require_unwritten(self) -> None:
        """Refuse a step where the memory that it came on was written to."""
        if self._given is None:
            return
        now = self._given.checksum()
        if now is None:
            self._given = None
        elif now != self._given.seen:
            self._refuse_given("was written to since")

    def _refuse_given(self, what: str) -> NoReturn:
        raise UsageError(
            f"the gradient of {self.name!r} is a view of memory that your code keeps, such as a tensor that was given "
            f"to backward(), and which {what}, where storage has its own: call zero_grad(), and give backward() a "
            'clone(), or pass gradients="ram" to offload()'
        )

    # --- what its handle asks ---------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The parameter's."""
        return torch.Size(self.place.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The gradient's."""
        return self.place.dtype

    @property
    def fused(self) -> bool:
        """Whether an update used it already: it is gone, or a change would come too late."""
        return self.state.staged or not self.state.stored

    def read(self) -> torch.Tensor:
        """A copy of it, in host memory."""
        into = torch.empty_strided(self.place.shape, self.place.stride, dtype=self.dtype, device="cpu")
        self._arrivals.engine.read_spilled(self.name, into)
        return into

    def add(self, gradient: torch.Tensor) -> None:
        """More of it came."""
        self._arrivals.add(self, gradient)

    def assign(self, gradient: torch.Tensor) -> None:
        """It is another one now."""
        self.change(gradient, add=False)
        self._arrivals.fresh = True

    def measure(self) -> Measure:
        """Whether a gradient that has a handle has a value that is not finite, and its squared norm; nothing is read.

        What was done by scalars to one on storage, as clipping does, counts as a factor.
        """
        assert self.handle is not None, "a gradient in memory is measured there"
        if not self.state.stored:
            return self._measured()
        factors = self.handle.factors()
        assert factors is not None, "a gradient that was changed in another way is measured in memory"
        bad, squared = self._arrivals.engine.spilled(self.name)
        return bad, rounded(squared) * math.prod((*factors, *factors)) if factors else squared

    def norm(self) -> float:
        """Its 2-norm, in double precision."""
        squares = self._measured()[1]
        return math.sqrt(float(squares) if isinstance(squares, torch.Tensor) else rounded(squares))

    def nonfinite(self) -> bool:
        """Whether it has a value that is not finite."""
        return bool(self._measured()[0])

    def _measured(self) -> Measure:
        """As it was taken, or as it is stored."""
        return self._arrivals.engine.spilled(self.name) if self.state.stored else self.found or (False, 0)

    def noticed(self, what: Notice) -> None:
        """Somebody looked at it, or changed it. A second piece of it is told from accumulation where it is added."""
        if what != "add":
            self._arrivals.loop.notice(_WORDS[what])
