"""Holds the gradient of one parameter from its arrival until its update, and begins that update."""

from __future__ import annotations

import math
import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import torch

from memascend.errors import ConfigError, UsageError
from memascend.grads.lazy_grad import DeferredGradient, GradientHandle
from memascend.optim import generic
from memascend.optim.shared import group_options
from memascend.params.weight_access import Outlived
from memascend.storage import decode_state, master_of
from memascend.tensors import Squares, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from memascend.grads.lazy_grad import Notice
    from memascend.grads.loop import Loop, LossScale
    from memascend.grads.speculation import Speculation
    from memascend.optim.rules import Arithmetic, MemberArithmetic
    from memascend.optim.state import StateLayout
    from memascend.params.offloaded_param import Place
    from memascend.params.resident_units import ResidentUnits
    from memascend.storage import Adam, Chunk, Engine, Momentum, Store


# Whether a gradient has a value that is not finite, and its squared norm.
Numbers = tuple[bool, Squares]
# The same as it was measured: numbers; on a device a row of sums, or, of dtypes without kernels, two tensors.
Measure = Numbers | torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class State(Enum):
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
_MOVES: dict[Move, dict[State, State]] = {
    "store": {State.NONE: State.STORED},
    # More of it came, or it was replaced.
    "change": {State.STORED: State.STORED},
    "take": {State.NONE: State.TAKEN},
    "begin": {State.NONE: State.EARLY, State.STORED: State.EARLY},
    "stage": {
        State.NONE: State.MEMORY_STAGED,
        State.STORED: State.STORED_STAGED,
        State.EARLY: State.STORED_STAGED,
    },
    # The staged update was discarded, and its gradient is still there.
    "unstage": {
        State.MEMORY_STAGED: State.NONE,
        State.STORED_STAGED: State.STORED,
        State.EARLY: State.STORED,
    },
    # The step was committed, or skipped.
    "end": {
        State.MEMORY_STAGED: State.NONE,
        State.STORED_STAGED: State.STORED,
        State.EARLY: State.STORED,
        State.TAKEN: State.SPENT,
    },
    "drop": dict.fromkeys(State, State.NONE),
}


def moved(name: str, state: State, move: Move) -> State:
    """The state after a move, which has to be one that this state allows."""
    after = _MOVES[move].get(state)
    assert after is not None, f"{move!r} of the gradient of {name!r}, which is {state.name}"
    return after


class Receiver(Protocol):
    """Receives gradients, and has what their updates need."""

    engine: Engine
    rule: Updates
    scale: LossScale
    loop: Loop
    speculation: Speculation

    def add(self, gradient: Gradient, values: torch.Tensor, *, first: bool, last: bool) -> None:
        """A gradient came where there is one."""

    def note_change(self) -> None:
        """A gradient became another one, which no step has used."""

    def numbers(self, measure: Measure) -> Numbers:
        """The numbers of a measure; waits for them."""

    def require_in_order(self, gradient: Gradient) -> None:
        """Refuse more of a gradient whose sum a call took for complete."""


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
        "_scale",
        "_used",
        "dtype",
        "found",
        "group",
        "handle",
        "in_pieces",
        "name",
        "options",
        "place",
        "shape",
        "state",
        "step",
    )

    def __init__(self, arrivals: Receiver, place: Place, group: int, step: int) -> None:
        """`group` is the parameter's place in `param_groups`; `step` counts the updates that are committed."""
        self._arrivals = arrivals
        self.place = place
        # As its handle asks for them.
        self.name, self.shape, self.dtype = place.name, place.shape, place.dtype
        self.group = group
        self.step = step
        self.state = State.NONE
        self.handle: GradientHandle | None = None
        # Of the update that is staged.
        self.options: Any = None
        # What the gradient of an update that has begun early is multiplied by.
        self._scale = 1.0
        # The measure of a gradient that is gone into an update.
        self.found: Measure | None = None
        # It comes in several pieces in one backward (nested graph tasks), so it is never updated as it appears.
        self.in_pieces = False
        # The gradient in memory that a step has used (which may be gone, and another be where it was), and its version.
        self._used: tuple[weakref.ref[torch.Tensor], int] | None = None
        # The memory that it came on, which others have, too; in memory it would be on it still.
        self._given: Outlived | None = None

    def expect_pieces(self) -> None:
        """Note that it comes in several pieces in one backward."""
        self.in_pieces = True

    def put(self, values: torch.Tensor | None) -> None:
        """Have these values stand in `p.grad`, or nothing."""
        self.place.parameter.grad = values

    # --- what becomes of it ---------------------------------------------------------

    def store(self, gradient: torch.Tensor) -> None:
        """Write one that came where there was none to storage."""
        self._arrivals.engine.spill(self.name, gradient)
        self._move("store")
        self._stand_in()

    def change(self, gradient: torch.Tensor, *, add: bool) -> None:
        """Replace the gradient on storage, or add to it."""
        self.take_back()
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
        """Begin the update by the gradient on storage, multiplied by each of `factors` in turn."""
        after = moved(self.name, self.state, "stage")
        self.options = self._arrivals.rule.options(self)
        self._arrivals.rule.update_spilled(self, factors, self._arrivals.scale.inverse * factor)
        self.state = after

    def begin(self, gradient: torch.Tensor | None = None) -> bool:
        """Begin the update early, by the stored gradient or by a new one, which is stored with it.

        False: it is not begun, and nothing is stored. Where that is due to a user's error, step() raises it, unless it
        is corrected before.
        """
        arrivals, rule = self._arrivals, self._arrivals.rule
        if not arrivals.speculation.may_begin(self.name):
            return False
        after = moved(self.name, self.state, "begin")
        scale = arrivals.scale.inverse
        try:
            if not rule.is_engines(self):
                return False
            self.options = rule.options(self)
        except UsageError:
            return False
        try:
            if gradient is None:
                rule.update_spilled(self, (), scale)
            else:
                rule.update(self, gradient, scale, spilling=True)
        except ConfigError:
            return False
        self._scale, self.state = scale, after
        arrivals.speculation.begun()
        if gradient is not None:
            self._stand_in()
        return True

    @property
    def is_changed(self) -> bool:
        """Whether something was done to one on storage that the update has to do to it, too."""
        assert self.handle is not None, "a gradient on storage has one"
        factors = self.handle.gradient.factors()
        return factors is None or any(one != 1.0 for one in factors)

    def stands(self, factor: float) -> bool:
        """Whether the update that began early is the one that the step makes, but for the options of its group."""
        return self._scale == self._arrivals.scale.inverse * factor and not self.is_changed

    def let_stand(self) -> None:
        """Make the update that began early a part of the step."""
        self._move("stage")

    def take_back(self) -> None:
        """Discard an update that began early, if there is one; the gradient is still there."""
        if self.state is not State.EARLY:
            return
        self._arrivals.engine.take_back(self.name)
        self._move("unstage")
        self._arrivals.speculation.taken_back()

    def unstage(self) -> None:
        """Discard the update that is staged; the gradient is still there."""
        if self.state is State.STORED_STAGED:
            # It may be one that writes the gradient.
            self._arrivals.engine.take_back(self.name)
        else:
            self._arrivals.engine.discard(self.name)
        self._move("unstage")

    def commit(self) -> None:
        """The step that has its update is committed."""
        self._move("end")
        self.step += 1

    def restart_at(self, step: int) -> None:
        """Storage has the parameter as so many updates made it."""
        self.step = step

    def skip(self) -> None:
        """The step that had its update is skipped."""
        if self.state is State.EARLY:
            self._arrivals.speculation.taken_back()
        self._move("end")

    def drop(self, *, discarded: bool = False) -> None:
        """Forget it, and the update that is staged; `discarded`: all updates of the step were."""
        if self.state.begun and not discarded:
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
        self.handle = GradientHandle(DeferredGradient(weakref.proxy(self), self.place.stride, self.place.device))
        self.put(self.handle)

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
        """Whether a step has used this gradient in memory, which was not written to since."""
        return self._used is not None and self._used[0]() is gradient and self._used[1] == gradient._version  # noqa: SLF001

    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient laid out as the parameter is stored."""
        if isinstance(gradient, GradientHandle):
            gradient = gradient.gradient.materialize()
        gradient = gradient.detach()
        if gradient.is_sparse:
            return gradient
        if tuple(gradient.stride()) != self.place.stride and gradient.numel() > 1:
            gradient = torch.empty_strided(
                self.place.shape, self.place.stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        return gradient

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

    # --- what its handle asks ---------------------------------------------------------

    @property
    def fused(self) -> bool:
        """Whether an update used it already: it is gone, or a change would come too late."""
        return self.state.staged or not self.state.stored

    def read(self) -> torch.Tensor:
        """A copy of it, in host memory."""
        into = torch.empty_strided(self.place.shape, self.place.stride, dtype=self.dtype, device="cpu")
        self._arrivals.engine.read_spilled(self.name, into)
        return into

    def add(self, gradient: torch.Tensor, *, first: bool = True, last: bool = True) -> None:
        """Add another gradient of the parameter."""
        self._arrivals.add(self, gradient, first=first, last=last)

    def assign(self, gradient: torch.Tensor) -> None:
        """Replace it by another gradient."""
        self.change(gradient, add=False)
        self._arrivals.note_change()

    def measure(self) -> Measure:
        """Whether a gradient that has a handle has a value that is not finite, and its squared norm; nothing is read.

        Scalar arithmetic on a gradient on storage, as of clipping, counts as factors.
        """
        assert self.handle is not None, "a gradient in memory is measured there"
        if not self.state.stored:
            return self._measured()
        factors = self.handle.gradient.factors()
        assert factors is not None, "a gradient that was changed in another way is measured in memory"
        bad, squared = self._arrivals.engine.spilled(self.name)
        return bad, rounded(squared) * math.prod((*factors, *factors)) if factors else squared

    def norm(self) -> float:
        """Its 2-norm, in double precision."""
        return math.sqrt(rounded(self._arrivals.numbers(self._measured())[1]))

    def nonfinite(self) -> bool:
        """Whether it has a value that is not finite."""
        return self._arrivals.numbers(self._measured())[0]

    def _measured(self) -> Measure:
        """As it was taken, or as it is stored."""
        if self.state.stored:
            return self._arrivals.engine.spilled(self.name)
        return (False, 0) if self.found is None else self.found

    def noticed(self, what: Notice) -> None:
        """User code read or changed it. Whether a second piece is accumulation is decided where it is added."""
        if what == "add":
            self._arrivals.require_in_order(self)
        else:
            self._arrivals.loop.notice(_WORDS[what])


_AS_IT_COMES = generic.Given()


class Updates:
    """The arithmetic of a run's optimizer at work, on an engine."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        engine: Engine,
        store: Store,
        units: ResidentUnits | None,
    ) -> None:
        """Updates begin from the values of `units` that are in memory; None: they are read, and hold no unit."""
        self._arithmetic = arithmetic
        self.engine = engine
        self._store = store
        self._units = units
        self._groups = arithmetic.optimizer.param_groups
        # The last ones of each group: parameters whose options are equal share them.
        self._options: dict[int, dict[str, Any]] = {}

    def _layout(self, kept: Gradient) -> StateLayout | None:
        return self._arithmetic.layouts[id(kept.place.parameter)]

    def _member(self, kept: Gradient) -> MemberArithmetic:
        return self._arithmetic.of(kept.place.parameter)

    def _group(self, kept: Gradient) -> dict[str, Any]:
        if kept.group >= len(self._groups):
            raise UsageError(
                f"optimizer.param_groups has lost the group of {kept.name!r}, which it had at offload(): put it back "
                "and call zero_grad(); freeze parameters with requires_grad_(False)"
            )
        return self._groups[kept.group]

    def _run(
        self, kept: Gradient, layout: StateLayout, given: generic.Given = _AS_IT_COMES, method: str = "step"
    ) -> tuple[Callable[[Chunk], None], bool]:
        """A run of the optimizer's own code on one parameter, and whether it may be called after the commit."""
        own, group, is_first = self._member(kept), self._group(kept), kept.step == 0
        function = generic.Update(
            own.optimizer,
            group,
            layout,
            given,
            first=is_first,
            method=method,
            ended=own.runs.ended(kept.name, kept.group - own.first_group),
        )
        return own.runs.followed(function, group, kept.dtype, is_first, given.gradient is not None)

    def _numbers(self, kept: Gradient, scale: float) -> Adam | Momentum | None:
        """The numbers of an update on the engine; None where the optimizer's own code runs."""
        options = kept.options
        if self._layout(kept) is not None:
            first = kept.step == 0
            options = self._member(kept).own_options(self._group(kept), kept.place.parameter, first=first)
        return None if options is None else self._arithmetic.numbers(options, kept.step + 1, scale)

    def options(self, kept: Gradient) -> dict[str, Any]:
        """The options that an update of this parameter would use now."""
        group = self._group(kept)
        if self._layout(kept) is not None:
            return group_options(group)
        options = self._member(kept).rust_options(group, kept.place.parameter)
        if options is None:
            raise UsageError(
                f"the options of {kept.name!r} now need other state than it has (amsgrad, say): set them before "
                "offload()"
            )
        if self._options.get(kept.group) != options:
            self._options[kept.group] = options
        return self._options[kept.group]

    def is_engines(self, kept: Gradient) -> bool:
        """Whether the engine's own arithmetic updates this parameter, with the options that its group has now."""
        return self._layout(kept) is None or self._numbers(kept, 1.0) is not None

    def _resident(self, kept: Gradient) -> torch.Tensor | None:
        return None if self._units is None else self._units.values_of(kept.place)

    def update(self, kept: Gradient, gradient: torch.Tensor, scale: float, *, spilling: bool = False) -> None:
        """Begin the update by a gradient in memory, multiplied by `scale`.

        `spilling`: what the engine's own arithmetic uses is spilled with it.
        """
        by_engine = self.engine.update_spilling if spilling else self.engine.update
        layout = self._layout(kept)
        if layout is None and gradient.is_sparse:
            raise UsageError(
                f"{type(self._member(kept).optimizer).__name__} does not support sparse gradients, and "
                f"{kept.name!r} has one; use SparseAdam or SGD, or an embedding without sparse=True"
            )
        numbers = None if gradient.is_sparse else self._numbers(kept, scale)
        if numbers is not None:
            by_engine(kept.name, gradient, numbers, values=self._resident(kept))
            return
        assert layout is not None, "the engine has numbers for state without a layout"
        # Its rows are few, and looked up by the engine's thread.
        sparse = gradient.cpu() if gradient.is_sparse else None
        function, after_commit = self._run(kept, layout, generic.Given(gradient=sparse, grad_scale=scale))
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        whole, values = layout.whole or sparse is not None, self._resident(kept)
        self.engine.apply(
            kept.name,
            function,
            step=kept.step + 1,
            gradient=dense,
            whole=whole,
            values=values,
            after_commit=after_commit,
        )

    def update_spilled(self, kept: Gradient, factors: Sequence[float], scale: float) -> None:
        """Begin the update by the gradient that was spilled."""
        numbers = self._numbers(kept, scale)
        if numbers is not None:
            self.engine.update_spilled(kept.name, numbers, factors=factors)
            return
        layout = self._layout(kept)
        assert layout is not None, "the engine has numbers for state without a layout"
        function, after_commit = self._run(kept, layout, generic.Given(factors=tuple(factors), grad_scale=scale))
        self.engine.apply(kept.name, function, step=kept.step + 1, whole=layout.whole, after_commit=after_commit)

    def switch(self, mode: str, parameters: Iterable[Gradient], switched: Container[int]) -> list[str]:
        """Stage what `train()` or `eval()` does to the parameters of the optimizers of these numbers; their names."""
        owners = [own for number, own in enumerate(self._arithmetic.members) if number in switched]
        begun = []
        for kept in parameters:
            layout = self._layout(kept)
            if kept.step == 0 or layout is None or self._member(kept) not in owners:
                # Before its first step there is nothing to do, which offload() has tried.
                continue
            # The engine takes a gradient. Nothing reads this one, and pages that are never written take no memory.
            unread = torch.empty_strided(kept.place.shape, kept.place.stride, dtype=kept.dtype, device="cpu")
            function, _ = self._run(kept, layout, method=mode)
            self.engine.apply(kept.name, function, step=kept.step, gradient=unread, whole=layout.whole)
            begun.append(kept.name)
        return begun

    def takes_zeros(self, kept: Gradient) -> bool:
        """Whether a step updates this parameter also without a gradient, as by zeros."""
        return self._member(kept).manner.zeros

    def rewrite(self, name: str, values: torch.Tensor, step: int) -> None:
        """Stage other values, and a master that equals them; the moments stay."""

        def function(chunk: Chunk) -> None:
            given = chunk.gradient
            assert given is not None
            chunk.values.copy_(given)
            if "master" in chunk.state:
                chunk.state["master"].copy_(given)
            # The master is the values, nothing was rounded: no rest, and no bit or sign that says so.
            for of in ("rest", "rounded_up"):
                if of in chunk.state:
                    chunk.state[of].zero_()
            second = chunk.state.get("exp_avg_sq")
            if "rest" in chunk.state and second is not None and second.is_floating_point():
                second.abs_()

        self.engine.apply(name, function, step=step, gradient=values)

    def state(self, kept: Gradient) -> dict[str, torch.Tensor]:
        """A copy of the state, by torch's names, and the master."""
        values, state = self._store.read(kept.name)
        layout, given = self._layout(kept), self._arithmetic.format_of(kept.place.parameter)
        if layout is not None:
            if given is not None:
                state = decode_state(values, state, given)
            master = {"master": state.pop("master", values)}
            if kept.step == 0:
                return master
            return {**generic.export_state(layout, state), **master}
        whole = master_of(values, state) if given is None else decode_state(values, state, given)
        master = {"master": whole.pop("master")}
        if kept.step == 0:
            return master
        if "momentum_buffer" in whole:
            # SGD counts no steps.
            return {**whole, **master}
        return {"step": torch.tensor(float(kept.step), dtype=torch.float32, device="cpu"), **whole, **master}
