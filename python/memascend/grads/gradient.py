"""Holds the gradient of one parameter from its arrival until its update, and begins that update."""

from __future__ import annotations

import math
import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from memascend.errors import ConfigError, UsageError
from memascend.grads.lazy_grad import GradientHandle
from memascend.params.weight_access import Outlived
from memascend.tensors import laid_out, rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.grads.gradients import Gradients
    from memascend.grads.norms import Measure, Numbers
    from memascend.grads.operations import Operation
    from memascend.optim.rules import Rule
    from memascend.params.offloaded_param import Place


# Kinds of norms that are taken of one gradient as it arrives; loops ask for one or two.
_NORMS_MAX = 4
# How often a gradient's memory is counted that no other tensor has: its own use, and that of what asks.
_STORAGE_USES = 2
# How often a gradient that only autograd has is counted while it is being accumulated: by autograd's buffer and call,
# by the dispatcher and by Python.
_TENSOR_USES = 4


class GradientState(Enum):
    """Where a gradient is, and whether an update by it is staged."""

    # There is none, or one in memory that no staged update uses. Here and in the next state `p.grad` has no handle.
    NONE = (0, "")
    # In memory; step() staged an update by it, and has not committed.
    MEMORY_STAGED = (1, "staged")
    # On storage, for step() to use.
    STORED = (2, "stored")
    # On storage; an update by it is staged.
    STORED_STAGED = (3, "stored staged")
    # On storage; an update by it has begun early, as if step() changed nothing of it. That is no part of a step before
    # step() lets it stand: it is discarded, and the gradient is as in `STORED`, where anything else happens.
    EARLY = (4, "stored early")
    # Gone into an update that is staged.
    TAKEN = (5, "staged")
    # Gone into an update of a step that is over: committed, or skipped for an overflow.
    SPENT = (6, "")

    # Asked for each parameter many times in a step: Enum's own is a call of Python, and so would properties be.
    __hash__ = object.__hash__

    def __init__(self, _: int, is_so: str) -> None:
        self.staged = "staged" in is_so
        """Whether an update is staged and not committed."""
        self.begun = self.staged or "early" in is_so
        """Whether the engine has an update that is not committed."""
        self.stored = "stored" in is_so
        """Whether the gradient lies on storage."""


Move = Literal["store", "change", "take", "begin", "stage", "unstage", "end", "drop"]
_MOVES: dict[Move, dict[GradientState, GradientState]] = {
    "store": {GradientState.NONE: GradientState.STORED},
    # More of it came, or it was replaced.
    "change": {GradientState.STORED: GradientState.STORED},
    "take": {GradientState.NONE: GradientState.TAKEN},
    "begin": {GradientState.NONE: GradientState.EARLY, GradientState.STORED: GradientState.EARLY},
    "stage": {
        GradientState.NONE: GradientState.MEMORY_STAGED,
        GradientState.STORED: GradientState.STORED_STAGED,
        GradientState.EARLY: GradientState.STORED_STAGED,
    },
    # The staged update was discarded, and its gradient is still there.
    "unstage": {
        GradientState.MEMORY_STAGED: GradientState.NONE,
        GradientState.STORED_STAGED: GradientState.STORED,
        GradientState.EARLY: GradientState.STORED,
    },
    # The step was committed, or skipped.
    "end": {
        GradientState.MEMORY_STAGED: GradientState.NONE,
        GradientState.STORED_STAGED: GradientState.STORED,
        GradientState.EARLY: GradientState.STORED,
        GradientState.TAKEN: GradientState.SPENT,
    },
    "drop": dict.fromkeys(GradientState, GradientState.NONE),
}


def shares_memory(values: torch.Tensor) -> bool:
    """Whether another tensor has the memory."""
    return bool(torch._C._storage_Use_Count(values.untyped_storage()._cdata) > _STORAGE_USES)  # noqa: SLF001


def _is_shared(values: torch.Tensor) -> bool:
    """Whether user code may have a gradient that reached a handle, and may write to it while it is being stored.

    `backward(gradient=mine)` passes on such a tensor where no operation in between makes a new one.
    """
    if torch._C._current_graph_task_id() == -1:  # noqa: SLF001
        return True
    return shares_memory(values) or bool(values._use_count() > _TENSOR_USES)  # noqa: SLF001


def was_there(values: torch.Tensor, *, shared: bool) -> bool:
    """Whether a gradient is on memory that was in `p.grad` before the backward, and is the user's.

    A gradient that autograd makes is no view of another tensor, and on memory that can be resized. Accumulation into
    an existing gradient raises its version; shared memory is seldom written to otherwise.
    """
    return values._is_view() or not values.untyped_storage().resizable() or (shared and values._version > 0)  # noqa: SLF001


class Gradient:
    """The gradient of one parameter: where it is, the update that it makes, what stands in `p.grad` for it."""

    def __init__(self, gradients: Gradients, place: Place, rule: Rule, step: int) -> None:
        """`rule` makes the updates; `step` counts those that are committed."""
        self._gradients = gradients
        self.place = place
        self.rule = rule
        self.name = place.name
        self.step = step
        self.state = GradientState.NONE
        self.handle: GradientHandle | None = None
        # Counts those that were dropped: a handle of one of them never shows the present one.
        self.dropped = 0
        # Arithmetic on the gradient that its stored bytes do not contain yet.
        self.operations: list[Operation] = []
        # Of the update that is staged, and whether it is left to the next step.
        self.options: Any = None
        self.deferred = False
        # What the gradient of an update that has begun early is multiplied by.
        self._scale = 1.0
        # The measure of a gradient that is gone into an update.
        self.found: Measure | None = None
        # Norms that user code took of it since the last step, those to take of the next one as it arrives, and those
        # that were taken of the present one.
        self._asked: list[Operation] = []
        self.expected: tuple[Operation, ...] = ()
        self._norms: list[tuple[Operation, torch.Tensor]] = []
        # It comes in several pieces in one backward (nested graph tasks), so it is never updated as it appears.
        self.in_pieces = False
        # The gradient in memory that a step has used (which may be gone, and another be where it was), and its version.
        self._used: tuple[weakref.ref[torch.Tensor], int] | None = None
        # The memory that it came on, which others have, too; in memory it would be on it still.
        self._given: Outlived | None = None

    def expect_pieces(self) -> None:
        """Note that it comes in several pieces in one backward."""
        self.in_pieces = True

    @property
    def values(self) -> torch.Tensor | None:
        """What stands in `p.grad`: the handle, or values in memory."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return self.place.parameter.grad

    def put(self, values: torch.Tensor | None) -> None:
        """Have these values stand in `p.grad`, or nothing."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self.place.parameter.grad = values

    # --- what becomes of it ---------------------------------------------------------

    def store(self, gradient: torch.Tensor) -> None:
        """Write one that came where there was none to storage."""
        self._spill("store", gradient)
        self._stand_in()

    def change(self, gradient: torch.Tensor, *, add: bool) -> None:
        """Replace the gradient on storage, or add to it."""
        self.take_back()
        self._norms.clear()
        self._spill("change", gradient, add=add)

    def _spill(self, move: Move, gradient: torch.Tensor, *, add: bool = False) -> None:
        after, engine = self._after(move), self._gradients.engine
        engine.spill(self.name, gradient, add=add)
        # What the last step left of the parameter's update is made now, if it was not yet.
        engine.settle_later(self.name)
        self.state = after

    def use(self, values: torch.Tensor, *, whole: bool, shared: bool = False) -> None:
        """Update by one that came where there was none, or store it; `whole`: no more of it comes.

        `shared`: others have its memory.
        """
        gradients = self._gradients
        mode, whole = gradients.loop.mode, whole and not self.in_pieces
        # As it would lie in `p.grad`: autograd lays gradients out as their parameters.
        values = self.laid_out(values)
        if whole and mode != "fused" and not gradients.loop.adds_up:
            # Before the copy: on a GPU the bits of a norm depend on the address.
            self._take_norms(values)
        if shared:
            values = values.clone()
        if whole and mode == "fused":
            # Nothing is left of it but its measure.
            self.found = gradients.norms.measure(values)
            self._begin("take", values, 1.0)
            self._stand_in()
        elif not (whole and self.begin(values)):
            self.store(values)

    def use_stored(self) -> None:
        """Update by one on storage that is whole, unless it waits for step()."""
        if self._gradients.loop.mode == "fused":
            self.stage(1.0)
        else:
            self.begin()

    def stage(self, factor: float, gradient: torch.Tensor | None = None, *, factors: Sequence[float] = ()) -> None:
        """Begin the update by its value in memory, multiplied by `factor`.

        Without one, by the gradient on storage, multiplied by each of `factors` in turn before.
        """
        if not self._defer(gradient, factor, factors):
            self._begin("stage", gradient, factor, factors)

    def _defer(self, gradient: torch.Tensor | None, factor: float, factors: Sequence[float]) -> bool:
        """Leave the update to the next step, where this one does so; the gradient lies on storage then."""
        if not self._gradients.defers(self) or (gradient is not None and gradient.is_sparse):
            return False
        after, engine = self._after("stage"), self._gradients.engine
        options = self.rule.options()
        numbers = self.rule.numbers(options, self.step, self._gradients.scale.inverse * factor)
        if numbers is None:
            return False
        if gradient is not None:
            engine.spill(self.name, gradient)
        if not engine.defer(self.name, numbers, factors=factors):
            return False
        self.options, self.deferred, self.state = options, True, after
        return True

    def begin(self, gradient: torch.Tensor | None = None) -> bool:
        """Begin the update early, by the stored gradient or by a new one, which is stored with it.

        False: it is not begun, and nothing is stored. Where that is due to a user's error, step() raises it, unless it
        is corrected before.
        """
        if self.name in self._gradients.behind or not self._gradients.speculation.may_begin(self.name):
            return False
        try:
            if not self._begin("begin", gradient, 1.0):
                return False
        except (ConfigError, UsageError):
            return False
        self._scale = self._gradients.scale.inverse
        self._gradients.speculation.begun()
        if gradient is not None:
            self._stand_in()
        return True

    @property
    def is_changed(self) -> bool:
        """Whether something was done to one on storage that the update has to do to it, too."""
        factors = self.factors()
        return factors is None or any(one != 1.0 for one in factors)

    def stands(self, factor: float) -> bool:
        """Whether the update that began early is the one that the step makes, but for the options of its group."""
        return self._scale == self._gradients.scale.inverse * factor and not self.is_changed

    def let_stand(self) -> None:
        """Make the update that began early a part of the step."""
        self._move("stage")

    def take_back(self) -> None:
        """Discard an update that began early, if there is one; the gradient is still there."""
        if self.state is not GradientState.EARLY:
            return
        self._gradients.engine.take_back(self.name)
        self._move("unstage")
        self._gradients.speculation.taken_back()

    def unstage(self) -> None:
        """Discard the update that is staged; the gradient is still there."""
        if self.state is GradientState.STORED_STAGED:
            # It may be one that writes the gradient.
            self._gradients.engine.take_back(self.name)
        else:
            self._gradients.engine.discard(self.name)
        self._move("unstage")

    def commit(self) -> None:
        """The step that has its update is committed."""
        self._move("end")
        self.step += 1
        self.expected = tuple(self._asked)
        self._asked.clear()

    def skip(self) -> None:
        """The step that had its update is skipped."""
        if self.state is GradientState.EARLY:
            self._gradients.speculation.taken_back()
        self._move("end")

    def drop(self, *, discarded: bool = False) -> None:
        """Forget it, and the update that is staged; `discarded`: all updates of the step were."""
        if self.state.begun and not discarded:
            self._gradients.engine.discard(self.name)
        if self.state.stored:
            self._gradients.engine.drop_spilled(self.name)
        self.dropped += 1
        self.handle = self._given = None
        self.operations.clear()
        self._norms.clear()
        self._move("drop")

    def _begin(self, move: Move, gradient: torch.Tensor | None, factor: float, factors: Sequence[float] = ()) -> bool:
        """Begin an update; False: the optimizer's own code would run, which does not begin early."""
        after = self._after(move)
        engine, units, scale = self._gradients.engine, self._gradients.units, self._gradients.scale.inverse * factor
        values = None if units is None or gradient is None else units.values_of(self.place)
        early = move == "begin"
        options = self.rule.update(engine, self.step, scale, gradient, factors=factors, values=values, early=early)
        if options is None:
            return False
        # Only now: an update that could not begin is no part of the step.
        self.options, self.deferred, self.state = options, False, after
        return True

    def _after(self, move: Move) -> GradientState:
        """The state after a move, which has to be one that this state allows."""
        after = _MOVES[move].get(self.state)
        assert after is not None, f"{move!r} of the gradient of {self.name!r}, which is {self.state.name}"
        return after

    def _move(self, move: Move) -> None:
        self.state = self._after(move)

    # --- what stands in p.grad ------------------------------------------------------

    def _stand_in(self) -> None:
        place = self.place
        # torch's `grad` is an edge that Python's collector does not see: what stands in it must not lead back here.
        of = (weakref.ref(self), self.dropped, self.name)
        self.handle = GradientHandle(place.shape, place.stride, place.dtype, place.device, of)
        self.put(self.handle)

    def stands_in(self, values: torch.Tensor | None) -> bool:
        """Whether p.grad is the handle, or another tensor of the same gradient, which then is the handle."""
        if values is not self.handle and isinstance(values, GradientHandle) and values.is_of(self):
            self.handle = values
        return values is self.handle

    def note_used(self, gradient: torch.Tensor) -> None:
        """A step has used this gradient in memory."""
        self._used = (weakref.ref(gradient), gradient._version)  # noqa: SLF001

    def is_used(self, gradient: torch.Tensor) -> bool:
        """Whether a step has used this gradient in memory, which was not written to since."""
        return self._used is not None and self._used[0]() is gradient and self._used[1] == gradient._version  # noqa: SLF001

    def laid_out(self, values: torch.Tensor) -> torch.Tensor:
        """Values laid out as the parameter is stored, nothing lazy about them; on their memory where they are so."""
        if isinstance(values, GradientHandle):
            values = values.gradient.materialize()
        values = values.detach()
        return values if values.is_sparse else laid_out(values.resolve_conj().resolve_neg(), self.place.stride)

    def note_given(self, values: torch.Tensor) -> None:
        """Note that it came on memory that other code may have, too."""
        self._given = Outlived(self.place, values)

    def require_own(self) -> None:
        """Reject a change where other code has the memory that it came on, which would change with it."""
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

    # --- its value --------------------------------------------------------------------

    @property
    def fused(self) -> bool:
        """Whether an update used it already: nothing but its norm is left, or a change would come too late."""
        return self.state.staged or not self.state.stored

    def empty(self) -> torch.Tensor:
        """Memory for one where results appear, its values undefined."""
        place = self.place
        return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.device)

    def factors(self) -> tuple[float, ...] | None:
        """The operations as fp32 numbers: multiply in fp32 by each, in order, and round to the gradient's dtype.

        None where torch would compute another result: then the update takes materialize().
        """
        place, factors = self.place, []
        for operation in self.operations:
            factor = operation.factor(place.dtype, len(place.shape), place.device)
            if factor is None:
                return None
            factors.append(factor)
        return tuple(factors)

    def materialize(self) -> torch.Tensor:
        """It as it is now, in new memory. Not reported to noticed()."""
        if self.fused:
            raise UsageError(
                f"the gradient of {self.name} is gone, the update already used it: "
                "pass gradients='ssd' to offload() to read gradients before step()"
            )
        if self.operations and self.operations[0].overwrites:
            values = self.empty()
        else:
            place = self.place
            stored = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu")
            self._gradients.engine.read_spilled(self.name, stored)
            values = stored.to(place.device)
        with torch.no_grad():
            for operation in self.operations:
                operation.apply(values)
        return values

    def read(self, what: str = "a read of gradients") -> torch.Tensor:
        """Materialize it for user code, which the loop's habits have as `what`."""
        self.noticed(what)
        return self.materialize()

    def noticed(self, what: str) -> None:
        """User code read or changed it before step()."""
        self._gradients.loop.notice(what)

    def assign(self, values: torch.Tensor) -> None:
        """Replace it by a tensor to which no other code writes."""
        self.change(self.laid_out(values), add=False)
        self._gradients.note_change()
        self.operations.clear()

    def require_open(self) -> None:
        """Reject another gradient where an update used this one, or its sum is complete."""
        self._gradients.require_in_order(self)
        if self.fused:
            raise UsageError(
                f"a second gradient for {self.name}, whose update already used the first: call step() and "
                "zero_grad() after each backward, or pass accumulation_steps= or gradients='ssd' to offload()"
            )

    def accumulate(self, operation: Operation, values: torch.Tensor) -> None:
        """Add a gradient of the same shape and dtype; `operation` is the addition as torch was asked for it."""
        self.require_open()
        if self.operations:
            total = self.materialize()
            operation.apply(total)
            self.assign(total)
        else:
            self._gradients.add(self, values.clone() if _is_shared(values) else values, summed=False)

    def replace_by_sum(self, total: torch.Tensor) -> None:
        """Replace it by its sum with another gradient, which was computed elsewhere."""
        self.require_open()
        if self.operations:
            self.assign(total)
        else:
            self._gradients.add(self, total, summed=True)

    # --- its norm ---------------------------------------------------------------------

    def measure(self) -> Measure:
        """Whether a gradient that has a handle has a value that is not finite, and its squared norm; nothing is read.

        Scalar arithmetic on a gradient on storage, as of clipping, counts as factors.
        """
        if not self.state.stored:
            return self._measured()
        factors = self.factors()
        assert factors is not None, "a gradient that was changed in another way is measured in memory"
        bad, squared = self._gradients.engine.spilled(self.name)
        return bad, rounded(squared) * math.prod((*factors, *factors)) if factors else squared

    def numbers(self) -> Numbers:
        """Whether it has a value that is not finite, and its squared norm, as it is stored or was used."""
        return self._gradients.norms.read([self._measured()])[0]

    def _measured(self) -> Measure:
        if self.state.stored:
            return self._gradients.engine.spilled(self.name)
        return (False, 0) if self.found is None else self.found

    def _take_norms(self, gradient: torch.Tensor) -> None:
        """Take the expected norms by torch of one that arrives whole, so that clipping need not read it again."""
        if not self.expected:
            return
        kind = gradient.device.type
        autocast = torch.is_autocast_enabled(kind)
        # The loop takes its norms outside of the backward, where autocast is off: it would change their dtype.
        torch.set_autocast_enabled(kind, False)
        try:
            self._norms = [(operation, operation.apply(gradient)) for operation in self.expected]
        finally:
            torch.set_autocast_enabled(kind, autocast)

    def norm_by(self, operation: Operation) -> torch.Tensor | None:
        """The norm by this operation, if it was taken as the gradient arrived; from now on it is."""
        if operation not in self._asked and len(self._asked) < _NORMS_MAX:
            self._asked.append(operation)
        return next((norm.clone() for taken, norm in self._norms if taken == operation), None)
