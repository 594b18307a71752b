"""Holds the gradient of one parameter from its arrival until its update, and begins the update.

See [Note: Gradient states] in `memascend.grads`.
"""

from __future__ import annotations

import math
import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from memascend.errors import ConfigError, UsageError
from memascend.grads.lazy_grad import GradientHandle
from memascend.params.weight_access import WeakValues
from memascend.tensors import laid_out, rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.grads.gradients import Gradients
    from memascend.grads.norms import Measure, Numbers
    from memascend.grads.operations import Operation
    from memascend.optim.rules import Rule
    from memascend.params.offloaded_param import Place


# The maximum number of norms that `Gradient` takes of an arriving gradient. Training loops use one or two kinds of
# norms.
_NORMS_MAX = 4
# torch's use count of memory that only one tensor uses: one for the tensor, and one for the query of the count.
_STORAGE_USES = 2
# torch's use count of a gradient that only autograd owns during accumulation: one each for autograd's buffer,
# autograd's call, the dispatcher and Python.
_TENSOR_USES = 4


class GradientState(Enum):
    """Where a gradient is, and whether an update that uses it is staged."""

    # There is no gradient, or the gradient is in memory and no staged update uses it. In NONE and MEMORY_STAGED,
    # `p.grad` is not a handle of this gradient.
    NONE = (0, "")
    # The gradient is in memory. step() has staged the update, but has not committed it.
    MEMORY_STAGED = (1, "staged")
    # The gradient is on storage. No staged or early update uses it.
    STORED = (2, "stored")
    # The gradient is on storage. The update that uses it is staged.
    STORED_STAGED = (3, "stored staged")
    # The gradient is on storage, and its update has begun before step(). The update is valid only if step() uses the
    # same options and does not change the gradient. `confirm()` makes the update a part of the step. All other moves
    # discard the update. The move "drop" also drops the gradient; after any other move the gradient is still on
    # storage.
    EARLY = (4, "stored early")
    # A staged update has used up the gradient. Only the measure is left: the squared norm, and whether all values are
    # finite.
    TAKEN = (5, "staged")
    # An update has used up the gradient, and the step was committed or skipped.
    SPENT = (6, "")

    # The code hashes states and reads their flags many times per parameter and step. Enum's own `__hash__` is a slow
    # Python function. Properties would be slow, too, so the flags are attributes.
    __hash__ = object.__hash__

    def __init__(self, _: int, is_so: str) -> None:
        self.staged = "staged" in is_so
        """True while an update is staged and not committed."""
        self.begun = self.staged or "early" in is_so
        """True while the engine has an update that is not committed."""
        self.stored = "stored" in is_so
        """True while the gradient is on storage."""


Move = Literal["store", "change", "take", "begin", "stage", "unstage", "end", "drop"]
_MOVES: dict[Move, dict[GradientState, GradientState]] = {
    "store": {GradientState.NONE: GradientState.STORED},
    # More of the gradient arrived, or `assign()` replaced it.
    "change": {GradientState.STORED: GradientState.STORED},
    "take": {GradientState.NONE: GradientState.TAKEN},
    "begin": {GradientState.NONE: GradientState.EARLY, GradientState.STORED: GradientState.EARLY},
    "stage": {
        GradientState.NONE: GradientState.MEMORY_STAGED,
        GradientState.STORED: GradientState.STORED_STAGED,
        GradientState.EARLY: GradientState.STORED_STAGED,
    },
    # The staged or early update is discarded; its gradient remains.
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
    """True if another tensor uses the memory of `values`."""
    return bool(torch._C._storage_Use_Count(values.untyped_storage()._cdata) > _STORAGE_USES)  # noqa: SLF001


def _is_shared(values: torch.Tensor) -> bool:
    """True if user code may hold `values`, and may write to `values` while they are added to a stored gradient.

    For example, `backward(gradient=mine)` delivers `mine` itself as a gradient if no operation makes a new tensor.
    """
    if torch._C._current_graph_task_id() == -1:  # noqa: SLF001
        return True
    return shares_memory(values) or bool(values._use_count() > _TENSOR_USES)  # noqa: SLF001


def is_user_memory(values: torch.Tensor, *, shared: bool) -> bool:
    """True if `values` uses the memory of a tensor that the user put into `p.grad` before the backward.

    A gradient that autograd makes is not a view, and its memory can be resized. Accumulation into an existing gradient
    raises the version counter of that gradient. Other code seldom writes to shared memory, so a raised counter of
    shared memory is taken as a sign that autograd has accumulated into the user's tensor.
    """
    return values._is_view() or not values.untyped_storage().resizable() or (shared and values._version > 0)  # noqa: SLF001


class Gradient:
    """The gradient of one parameter: its state, its update, and its handle in `p.grad`."""

    def __init__(self, gradients: Gradients, place: Place, rule: Rule, step: int) -> None:
        """`rule` makes the updates; `step` is the number of committed updates of the parameter."""
        self._gradients = gradients
        self.place = place
        self.rule = rule
        self.name = place.name
        self.step = step
        self.state = GradientState.NONE
        self.handle: GradientHandle | None = None
        # The number of dropped gradients of the parameter. A handle of a dropped gradient has a lower number.
        self.dropped = 0
        # Recorded operations that are not applied to the stored bytes yet.
        self.operations: list[Operation] = []
        # `options`: the parameter group's options when the update began. `deferred`: True if the next step makes this
        # update.
        self.options: Any = None
        self.deferred = False
        # The factor by which an update that began early multiplies the gradient.
        self._scale = 1.0
        # The measure of a gradient that an update has used up.
        self.found: Measure | None = None
        # `_asked`: the norms that user code took since the last committed update. `expected`: the norms to take of the
        # next gradient as it arrives. `_norms`: the norms taken of the present gradient.
        self._asked: list[Operation] = []
        self.expected: tuple[Operation, ...] = ()
        self._norms: list[tuple[Operation, torch.Tensor]] = []
        # True if one backward may deliver the gradient in several pieces, because a backward runs inside another
        # backward. The update then waits for step().
        self.in_pieces = False
        # The gradient in memory that a step used, and its version. The reference is weak: user code may free the
        # tensor.
        self._used: tuple[weakref.ref[torch.Tensor], int] | None = None
        # The memory that held the gradient when it arrived, if other code holds that memory, too. Without offloading,
        # `p.grad` would still use that memory.
        self._given: WeakValues | None = None

    def expect_pieces(self) -> None:
        """Records that one backward may deliver the gradient in several pieces."""
        self.in_pieces = True

    @property
    def values(self) -> torch.Tensor | None:
        """The value of `p.grad`: the handle, a gradient in memory, or None."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return self.place.parameter.grad

    def put(self, values: torch.Tensor | None) -> None:
        """Sets `p.grad`."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self.place.parameter.grad = values

    # --- changes of state -----------------------------------------------------------

    def store(self, gradient: torch.Tensor) -> None:
        """Writes the parameter's first gradient of a step to storage and puts a handle into `p.grad`."""
        self._spill("store", gradient)
        self._install_handle()

    def change(self, gradient: torch.Tensor, *, add: bool) -> None:
        """Replaces the gradient on storage by `gradient`. If `add`, adds `gradient` to the stored gradient instead."""
        self.take_back()
        self._norms.clear()
        self._spill("change", gradient, add=add)

    def _spill(self, move: Move, gradient: torch.Tensor, *, add: bool = False) -> None:
        after, engine = self._after(move), self._gradients.engine
        engine.spill(self.name, gradient, add=add)
        # Queues the update that the last step deferred for this parameter, unless the engine has already made it.
        engine.settle_later(self.name)
        self.state = after

    def use(self, values: torch.Tensor, *, whole: bool, shared: bool = False) -> None:
        """Updates the parameter by an arriving gradient, or stores the gradient.

        `whole`: no more of the gradient is expected in this step. `shared`: other tensors use the gradient's memory.
        """
        gradients = self._gradients
        mode, whole = gradients.loop.mode, whole and not self.in_pieces
        # Give `values` the strides that `p.grad` would have: autograd gives a gradient the strides of its parameter.
        values = self.laid_out(values)
        if whole and mode != "fused" and not gradients.loop.adds_up:
            # Take the norms before the copy below: on a GPU the bits of a norm depend on the gradient's address.
            self._take_norms(values)
        if shared:
            values = values.clone()
        if whole and mode == "fused":
            # The update uses the gradient up; only the measure is left.
            self.found = gradients.norms.measure(values)
            self._begin("take", values, 1.0)
            self._install_handle()
        elif not (whole and self.begin(values)):
            self.store(values)

    def use_stored(self) -> None:
        """Begins the update by the whole gradient on storage, unless this update must wait for step()."""
        if self._gradients.loop.mode == "fused":
            self.stage(1.0)
        else:
            self.begin()

    def stage(self, factor: float, gradient: torch.Tensor | None = None, *, factors: Sequence[float] = ()) -> None:
        """Stages the update, or defers it to the next step.

        The update multiplies `gradient` by `factor`. If `gradient` is None, the update uses the gradient on storage,
        and first multiplies this gradient by each of `factors`, in order.
        """
        if not self._defer(gradient, factor, factors):
            self._begin("stage", gradient, factor, factors)

    def _defer(self, gradient: torch.Tensor | None, factor: float, factors: Sequence[float]) -> bool:
        """Defers the update to the next step, and stores `gradient`, if any; returns False if it cannot be deferred."""
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
        """Begins the update before step().

        The update uses `gradient`, and also stores it. If `gradient` is None, the update uses the stored gradient.
        Returns False if no update begins; then `gradient` is not stored. If a mistake of the user is the reason, step()
        raises the error, unless the user corrects the mistake before step().
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
            self._install_handle()
        return True

    @property
    def is_changed(self) -> bool:
        """True if the update has to apply recorded operations to the stored gradient."""
        factors = self.factors()
        return factors is None or any(one != 1.0 for one in factors)

    def stands(self, factor: float) -> bool:
        """True if the early update is valid for a step with this `factor`; the caller compares the options."""
        return self._scale == self._gradients.scale.inverse * factor and not self.is_changed

    def confirm(self) -> None:
        """Makes the update that began early a part of the step."""
        self._move("stage")

    def take_back(self) -> None:
        """Discards the update that began early, if any; the gradient remains on storage."""
        if self.state is not GradientState.EARLY:
            return
        self._gradients.engine.take_back(self.name)
        self._move("unstage")
        self._gradients.speculation.taken_back()

    def unstage(self) -> None:
        """Discards the staged update; the gradient remains."""
        if self.state is GradientState.STORED_STAGED:
            # The update's job may also write the gradient: `take_back` lets the job end, so that the gradient is kept.
            self._gradients.engine.take_back(self.name)
        else:
            self._gradients.engine.discard(self.name)
        self._move("unstage")

    def commit(self) -> None:
        """Ends the staged update, because the session has committed the step."""
        self._move("end")
        self.step += 1
        self.expected = tuple(self._asked)
        self._asked.clear()

    def skip(self) -> None:
        """Ends the update, because the step is skipped."""
        if self.state is GradientState.EARLY:
            self._gradients.speculation.taken_back()
        self._move("end")

    def drop(self, *, discarded: bool = False) -> None:
        """Drops the gradient and its update; `discarded`: the caller has discarded all updates of the step."""
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
        """Begins an update; returns False if the optimizer's own code would have to begin before step()."""
        after = self._after(move)
        engine, units, scale = self._gradients.engine, self._gradients.units, self._gradients.scale.inverse * factor
        values = None if units is None or gradient is None else units.values_of(self.place)
        early = move == "begin"
        options = self.rule.update(engine, self.step, scale, gradient, factors=factors, values=values, early=early)
        if options is None:
            return False
        # Set the state only after `update()`: if `update()` raises, the update is not a part of the step.
        self.options, self.deferred, self.state = options, False, after
        return True

    def _after(self, move: Move) -> GradientState:
        """Returns the state after `move`, which must be allowed in the present state."""
        after = _MOVES[move].get(self.state)
        assert after is not None, f"{move!r} of the gradient of {self.name!r}, which is {self.state.name}"
        return after

    def _move(self, move: Move) -> None:
        self.state = self._after(move)

    # --- the value of p.grad --------------------------------------------------------

    def _install_handle(self) -> None:
        place = self.place
        # The handle has only a weak reference to this object. A strong reference would be a leak, because Python's
        # garbage collector does not see torch's reference from the parameter to `grad`.
        of = (weakref.ref(self), self.dropped, self.name)
        self.handle = GradientHandle(place.shape, place.stride, place.dtype, place.device, of)
        self.put(self.handle)

    def is_handle(self, values: torch.Tensor | None) -> bool:
        """True if `values` is a handle of this gradient; `values` then becomes `self.handle`."""
        if values is not self.handle and isinstance(values, GradientHandle) and values.is_of(self):
            self.handle = values
        return values is self.handle

    def note_used(self, gradient: torch.Tensor) -> None:
        """Records that a step used `gradient`, which is in memory."""
        self._used = (weakref.ref(gradient), gradient._version)  # noqa: SLF001

    def is_used(self, gradient: torch.Tensor) -> bool:
        """True if a step used `gradient` in memory, and no code has written to it since."""
        return self._used is not None and self._used[0]() is gradient and self._used[1] == gradient._version  # noqa: SLF001

    def laid_out(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `values` in memory, in the parameter's strides; makes a copy only if necessary.

        Reads the gradient if `values` is a handle of another gradient. Keeps the layout of a sparse gradient.
        """
        if isinstance(values, GradientHandle):
            values = values.gradient.materialize()
        values = values.detach()
        return values if values.is_sparse else laid_out(values.resolve_conj().resolve_neg(), self.place.stride)

    def note_given(self, values: torch.Tensor) -> None:
        """Records that the gradient arrived in memory that other code may hold, too."""
        self._given = WeakValues(self.place, values)

    def require_own(self) -> None:
        """Raises UsageError if other code still holds the memory in which the gradient arrived.

        The caller adds to the gradient, and the sum would not reach that memory.
        """
        if self._given is not None and self._given.checksum() is not None:
            self._refuse_given(
                "In-memory training would add further gradients to that memory, too, but offload() cannot"
            )

    def require_unwritten(self) -> None:
        """Raises UsageError if other code wrote to the memory that held the gradient when it arrived."""
        if self._given is None:
            return
        now = self._given.checksum()
        if now is None:
            self._given = None
        elif now != self._given.seen:
            self._refuse_given(
                "That memory was written to after the gradient arrived, but the gradient on storage did not change"
            )

    def _refuse_given(self, what: str) -> NoReturn:
        raise UsageError(
            f"the gradient of {self.name!r} is a view of memory that another object keeps, such as a tensor that your "
            f"code gave to backward(). {what}: call zero_grad(), and give backward() a clone(), "
            'or pass gradients="ram" to offload()'
        )

    # --- its value --------------------------------------------------------------------

    @property
    def fused(self) -> bool:
        """True if a staged update uses the gradient, or an update has used it up.

        Then only the 2-norm is left; other reads raise UsageError.
        """
        return self.state.staged or not self.state.stored

    def empty(self) -> torch.Tensor:
        """Returns uninitialised memory of the gradient's shape, strides, dtype and device."""
        place = self.place
        return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.device)

    def factors(self) -> tuple[float, ...] | None:
        """Returns the recorded operations as fp32 factors; None if they would not give torch's bits.

        The update multiplies the gradient in fp32 by each factor, in order, and then rounds to the dtype. If
        `factors()` returns None, the update uses the result of `materialize()`.
        """
        place, factors = self.place, []
        for operation in self.operations:
            factor = operation.factor(place.dtype, len(place.shape), place.device)
            if factor is None:
                return None
            factors.append(factor)
        return tuple(factors)

    def materialize(self) -> torch.Tensor:
        """Returns the present value of the gradient in new memory, without a call of `noticed()`."""
        if self.fused:
            raise UsageError(
                f"the gradient of {self.name} is gone, because the update already used it: "
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
        """Returns the value for user code; `loop` notes the read as `what`."""
        self.noticed(what)
        return self.materialize()

    def noticed(self, what: str) -> None:
        """Notes in `loop`, as `what`, that user code read or changed the gradient before step()."""
        self._gradients.loop.notice(what)

    def assign(self, values: torch.Tensor) -> None:
        """Replaces the gradient by `values`, to which no other code may write."""
        self.change(self.laid_out(values), add=False)
        self._gradients.note_change()
        self.operations.clear()

    def require_open(self) -> None:
        """Raises UsageError if nothing may be added to this gradient: its sum is complete, or an update has used it."""
        self._gradients.require_in_order(self)
        if self.fused:
            raise UsageError(
                f"a second gradient arrived for {self.name}, but the update already used the first: call step() and "
                "zero_grad() after each backward, or pass accumulation_steps= or gradients='ssd' to offload()"
            )

    def accumulate(self, operation: Operation, values: torch.Tensor) -> None:
        """Adds a gradient of the same shape and dtype; `operation` is the addition that user code called."""
        self.require_open()
        if self.operations:
            total = self.materialize()
            operation.apply(total)
            self.assign(total)
        else:
            self._gradients.add(self, values.clone() if _is_shared(values) else values, summed=False)

    def replace_by_sum(self, total: torch.Tensor) -> None:
        """Replaces the gradient by `total`. The caller has added another gradient to this gradient to get `total`."""
        self.require_open()
        if self.operations:
            self.assign(total)
        else:
            self._gradients.add(self, total, summed=True)

    # --- its norm ---------------------------------------------------------------------

    def measure(self) -> Measure:
        """Returns whether the gradient has a non-finite value, and its squared norm; does not read the gradient.

        `p.grad` must be a handle. Recorded scalar arithmetic, such as clipping, multiplies the squared norm.
        """
        if not self.state.stored:
            return self._measured()
        factors = self.factors()
        assert factors is not None, "a gradient that was changed in another way is measured in memory"
        bad, squared = self._gradients.engine.spilled(self.name)
        return bad, rounded(squared) * math.prod((*factors, *factors)) if factors else squared

    def numbers(self) -> Numbers:
        """Returns whether the gradient has a non-finite value, and its squared norm; ignores recorded operations."""
        return self._gradients.norms.read([self._measured()])[0]

    def _measured(self) -> Measure:
        if self.state.stored:
            return self._gradients.engine.spilled(self.name)
        return (False, 0) if self.found is None else self.found

    def _take_norms(self, gradient: torch.Tensor) -> None:
        """Takes the expected norms of a whole arriving gradient, so that clipping need not read it from storage."""
        if not self.expected:
            return
        kind = gradient.device.type
        autocast = torch.is_autocast_enabled(kind)
        # torch applies autocast before an operation reaches the handle, so `expected` has the operations after
        # autocast. Turn autocast off here, because it would change the dtype of the norms.
        torch.set_autocast_enabled(kind, False)
        try:
            self._norms = [(operation, operation.apply(gradient)) for operation in self.expected]
        finally:
            torch.set_autocast_enabled(kind, autocast)

    def norm_by(self, operation: Operation) -> torch.Tensor | None:
        """Returns the norm that `operation` computes if this norm was taken as the gradient arrived; None otherwise.

        Records the request, so that `_take_norms` takes this norm in the next step.
        """
        if operation not in self._asked and len(self._asked) < _NORMS_MAX:
            self._asked.append(operation)
        return next((norm.clone() for taken, norm in self._norms if taken == operation), None)
