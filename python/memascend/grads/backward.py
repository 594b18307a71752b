"""Takes each gradient as autograd accumulates it: measures it, updates by it at once, or moves it to storage."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.checkpoint import CheckpointFunction

from memascend.distributed.fsdp import LocalParameter
from memascend.errors import UsageError
from memascend.grads.gradient import Gradient
from memascend.grads.lazy_grad import GradientHandle
from memascend.params import module_hooks
from memascend.params.threads import current, is_autograds, works_for_another
from memascend.params.unit import Stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from memascend.grads.gradient import Measure, Numbers, Updates
    from memascend.grads.loop import Loop, LossScale
    from memascend.grads.norms import Norms
    from memascend.grads.speculation import Speculation
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency
    from memascend.storage import Engine


# In the parameters' tables of hooks, where torch's own keys are numbers.
_KEY = "memascend"


class AccumulationHooks:
    """One function for all parameters, called with each whose gradient was accumulated."""

    def __init__(self, heard: Callable[[torch.Tensor], None]) -> None:
        """`heard` is a bound method. torch holds hooks where Python's collector does not look, so it is held weakly."""
        weak = weakref.WeakMethod(heard)

        def call(parameter: torch.Tensor) -> None:
            method = weak()
            if method is not None:
                method(parameter)

        self._call = call
        self._parameters: list[Any] = []

    def add(self, parameter: torch.Tensor) -> None:
        """Call the function for gradients of this parameter."""
        self._parameters.append(parameter)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            frozen = not parameter.requires_grad
            # One that is frozen now may thaw later, and torch takes no hook of it.
            parameter.requires_grad_(True)
            own: Any = parameter
            if own._post_accumulate_grad_hooks is None:  # noqa: SLF001
                own._post_accumulate_grad_hooks = _Hooks()  # noqa: SLF001
            own._post_accumulate_grad_hooks[_KEY] = self._call  # noqa: SLF001
            parameter.requires_grad_(not frozen)

    def remove(self) -> None:
        """Release all parameters."""
        for parameter in self._parameters:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
            if hooks is not None:
                hooks.pop(_KEY, None)
        self._parameters.clear()


class _Hooks(dict[Any, Any]):
    """A parameter's hooks, as torch's own table of them but smaller: a model has thousands of parameters."""

    __slots__ = ("__weakref__",)


# What runs a reentrant checkpoint's part of the model, without gradients, for the first time.
_CHECKPOINTED = CheckpointFunction.forward.__code__


class BackwardTasks:
    """The backwards since the last step, and the one that is open."""

    def __init__(self, declared: int, begins: Callable[[], None], fails: Callable[[], None]) -> None:
        """None yet.

        Args:
            declared: how many make a step.
            begins: called at the begin of each backward, which it may reject.
            fails: called after each failed backward, once the failure is seen.
        """
        self.declared: float = declared
        # Backwards before those that a call has said will follow; None outside of such a call.
        self.before: int | None = None
        # Backwards that ended and brought a gradient.
        self.count = 0
        # The one that is open brought a gradient.
        self.delivered = False
        self.failed = False
        self._begins = begins
        self._fails = fails
        self._task: int | None = None
        # The thread that began it, and the one that computed the model last, which begins it where autograd's runs it.
        self._thread = self._last = 0

    @staticmethod
    def inside() -> bool:
        """Whether autograd runs a backward in this thread now."""
        return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001

    def enter(self, *, delivers: bool = False) -> bool:
        """Note that a backward runs, and whether it brings a gradient; returns whether this is one inside another."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if task == -1:
            self.delivered = self.delivered or delivers
            return False
        if self._task is None:
            self._begins()
            module_hooks.note_thread()
            self._task = task
            self._thread = self._last if is_autograds() else current()
            self.delivered = False
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # noqa: SLF001
        self.delivered = self.delivered or delivers
        return bool(task != self._task)

    def _ended(self) -> None:
        self._task = None
        # One that asked for gradients of something else is none.
        self.count += self.delivered

    def entered(self) -> None:
        """The model is entered; by another thread than the one that has a backward open, this says nothing of it."""
        if works_for_another():
            # Another micro-batch of the call may be in its backward, and the call itself sees which fails.
            return
        here = current()
        if not self.inside():
            self._last = here
        if self._task is None or here == self._thread:
            self.seen_outside()

    def seen_outside(self) -> None:
        """A backward that is still open, seen from outside, failed."""
        if self.inside():
            self.enter()
        elif self._task is not None:
            self._task = None
            self.failed = True
            self._fails()
            module_hooks.let_go()

    def restart(self) -> None:
        """Count anew: a step was made, or all gradients were dropped."""
        self.count = 0

    def note_ended(self, more: int) -> None:
        """Count backwards that ended and brought gradients, and that this object did not follow."""
        self.count += more

    def forget_failure(self) -> None:
        """The gradients of a failed backward were dropped."""
        self.failed = False
        self.restart()

    @contextmanager
    def expecting(self, more: float) -> Iterator[None]:
        """So many backwards follow inside; where no number was declared, the last of them makes the step.

        Infinity: their number is not known, so `step()` makes it.
        """
        declared, self.before = self.declared, self.count
        if declared == 1:
            self.declared = self.count + more
        try:
            yield
        finally:
            self.declared, self.before = declared, None

    def is_last(self, more: int = 1) -> bool:
        """Whether the one that is open makes a step."""
        return (self.count + more) % self.declared == 0

    def require_declared(self, name: str) -> None:
        """Refuse more backwards than were declared: the step would be none of the loop's."""
        if 1 < self.declared <= self.count:
            raise UsageError(
                f"backward {self.count + 1} of a step of {self.declared}, for {name!r}: accumulation_steps= says "
                'how many make a step; pass another number, or gradients="ssd", which takes any'
            )


def in_reentrant_checkpoint() -> bool:
    """Whether this is the forward of a reentrant checkpoint: its backward is going to run inside of another."""
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code is _CHECKPOINTED:
            return True
        frame = frame.f_back
    return False


# The gradient's own, and the one that asks.
_STORAGE_USES = 2


class Parts(Stages, Protocol):
    """Takes the gradients of micro-batches, and is notified of the units that they use; see `microbatches`."""

    def take(self, gradient: Gradient) -> bool:
        """Take what stands in `p.grad`, which autograd has just accumulated; False: it is left there."""

    def require_open(self, gradient: Gradient) -> None:
        """Refuse a part of a gradient whose sum was complete."""


class GradientMeter(Protocol):
    """Measures memory: `Meter`, which is in a package above this."""

    def arrived(self, name: str, nbytes: int, began: float) -> None:
        """A gradient of so many bytes was handed on, which began at this time of `perf_counter`."""

    def count(self, sums: Any) -> None:
        """Count these partial sums as memory from now on; None: there are none."""


class Arrivals:
    """All gradients, and what becomes of each when it arrives.

    Attributes:
        by_name: the gradients, by the names of their parameters, in the order of the parameters.
        backwards: of this step.
        fresh: something arrived, or was changed, since the last step.
        parts: takes what micro-batches accumulate, while they are computed.
    """

    def __init__(
        self,
        rule: Updates,
        scale: LossScale,
        loop: Loop,
        speculation: Speculation,
        norms: Norms,
        meter: GradientMeter,
        residency: Residency,
    ) -> None:
        """Nothing has arrived.

        Args:
            rule: the arithmetic of an update, with the engine where gradients wait.
            scale: what losses are multiplied by; where it is on, every backward is begun within `Gradients.scaled()`.
            loop: what is known of the training loop.
            speculation: whether updates by gradients that are kept begin early.
            norms: of the gradients of a step.
            meter: measures each gradient that was handed on.
            residency: of the parameters; its listener is notified of each backward before its first gradient.
        """
        self.by_name: dict[str, Gradient] = {}
        self.engine: Engine = rule.engine
        self.rule = rule
        self.scale = scale
        self.loop = loop
        self.speculation = speculation
        self.backwards = BackwardTasks(loop.accumulation_steps, self.begin_backward, self._note_failure)
        self.fresh = False
        # A backward was begun by optimizer.backward().
        self._scaled = False
        self.norms = norms
        self.parts: Parts | None = None
        self._meter = meter
        self._residency = residency
        self._of: dict[int, Gradient] = {}
        # The backward of the step, by its number, that brought each gradient last.
        self._brought: dict[str, int] = {}
        self._hooks = AccumulationHooks(self._hear)
        # What stood in `p.grad` when a failed backward was seen.
        self._left: list[tuple[Gradient, weakref.ref[torch.Tensor]]] = []

    def watch(self, place: Place, group: int, step: int) -> None:
        """Take charge of a parameter's gradients."""
        self.by_name[place.name] = self._of[id(place.parameter)] = Gradient(self, place, group, step)
        self._hooks.add(place.parameter)

    def unwatch(self) -> None:
        """Release the parameters."""
        self._hooks.remove()
        self._of.clear()

    # --- one arrives -----------------------------------------------------------------

    def _hear(self, parameter: torch.Tensor, *, assigned: bool = False) -> None:
        """A gradient was accumulated; `assigned`: it was added to what the user had put there."""
        began = time.perf_counter()
        gradient = self._of.get(id(parameter))
        if gradient is None:
            # What a hook of the user's returned, which torch refuses after the last hook.
            return
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            values = parameter.grad
            if values is not None and self.parts is not None and self.parts.take(gradient):
                pass
            elif values is not None and not gradient.stands_in(values):
                # How ranks are handed theirs refers to it, too: there it is known.
                alone = isinstance(parameter, LocalParameter) or sys.getrefcount(values) <= _references_of_one()
                self._arrive(gradient, values, lasting=assigned or not alone)
            elif values is not None:
                self.backwards.enter()
        self._meter.arrived(gradient.name, gradient.place.nothing.nbytes, began)
        # Updates may have released units since the last one was used.
        self._residency.units.look_ahead()

    def heard_parts(self, parameter: torch.Tensor, before: torch.Tensor | None, parts: Sequence[torch.Tensor]) -> None:
        """A gradient came in parts, which are added one by one to `before`; None: `p.grad` has their sum already."""
        with torch.no_grad():
            for index, part in enumerate(parts):
                if isinstance(before, GradientHandle):
                    before.add_part(part, first=index == 0, last=index + 1 == len(parts))
                elif before is not None:
                    before.add_(part)
        self._hear(parameter, assigned=before is not None)

    def _arrive(self, gradient: Gradient, values: torch.Tensor, *, lasting: bool) -> None:
        """A gradient came where there was none; `lasting`: other code has the tensor, too."""
        nested = self.backwards.enter(delivers=True)
        self._note_arrival(gradient)
        self._require_declared(gradient)
        if self.loop.mode == "ram" or values.is_sparse:
            # A sparse one is small: it waits where it is.
            return
        if values.requires_grad:
            raise UsageError(
                f"backward(create_graph=True) leaves a graph on the gradient of {gradient.name!r}, which cannot be "
                'kept: take gradients by torch.autograd.grad(..., create_graph=True), or pass gradients="ram"'
            )
        shared = shares_memory(values)
        own_rows = isinstance(gradient.place.parameter, LocalParameter)
        if lasting or (not own_rows and _was_there(values, shared=shared)):
            # The user reads and writes it by another name: it stays where it is, as under "ram".
            return
        if shared:
            # On memory of other gradients, or of a tensor that was given to backward(gradient=) and may be written to.
            gradient.note_given(values)
            values = values.clone()
        if nested:
            gradient.expect_pieces()
        self._use(gradient, values, whole=self._is_whole(gradient, nested))

    def _use(self, gradient: Gradient, values: torch.Tensor, *, whole: bool) -> None:
        """Update by a gradient that came where there was none, or store it; `whole`: no more of it comes."""
        values = gradient.laid_out(values)
        if whole and self.loop.mode == "fused":
            gradient.take(values, self.norms.measure(values))
        elif not (whole and gradient.begin(values)):
            gradient.store(values)

    def use_stored(self, gradient: Gradient) -> None:
        """Update by a gradient on storage that is whole, unless it waits for step()."""
        if self.loop.mode == "fused":
            gradient.stage_stored((), 1.0)
        else:
            gradient.begin()

    def numbers(self, measure: Measure) -> Numbers:
        """The numbers of a measure; waits for them."""
        return self.norms.read([measure])[0]

    def deliver(self, gradient: Gradient, values: torch.Tensor, *, whole: bool) -> None:
        """The sum of what all micro-batches of a call have accumulated; `whole`: no more of it comes in this step."""
        self._note_arrival(gradient)
        if self.loop.mode == "ram":
            gradient.put(values)
        else:
            self._use(gradient, values, whole=whole and not gradient.in_pieces)

    def store(self, gradient: Gradient, values: torch.Tensor) -> None:
        """A sum, or the first part of one, which waits on storage."""
        self._note_arrival(gradient)
        gradient.store(gradient.laid_out(values))

    def _note_arrival(self, gradient: Gradient) -> None:
        if gradient.handle is not None:
            # The handle was taken away: what stood behind it is dropped.
            gradient.drop()
        self._brought[gradient.name] = self.backwards.count
        self.fresh = True

    def note_change(self) -> None:
        """A gradient became another one, which no step has used."""
        self.fresh = True

    def note_step(self, *, unchanged: bool) -> None:
        """A step has used all that arrived, or was skipped; see `Speculation.step_ended`."""
        self.speculation.step_ended(unchanged=unchanged)
        self.fresh = False
        self.backwards.restart()

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Around a backward from a scaled loss."""
        self._scaled = True
        try:
            yield
        finally:
            self._scaled = False

    @contextmanager
    def summed_by(self, parts: Parts) -> Iterator[None]:
        """Inside, `parts` takes the gradients that arrive, and is notified of each unit that is used."""
        self.parts = parts
        try:
            with self._residency.followed_by(parts):
                yield
        finally:
            self.parts = None

    def require_in_order(self, gradient: Gradient) -> None:
        """Refuse more of a gradient whose sum a call took for complete."""
        if self.parts is not None:
            self.parts.require_open(gradient)

    def add(self, gradient: Gradient, values: torch.Tensor, *, first: bool = True, last: bool = True) -> None:
        """A gradient came where there is one, which no update used: its handle refuses another.

        `first`, `last`: of the parts in which it comes, one after the other.
        """
        inside = self.backwards.inside()
        if inside:
            self.backwards.enter()
        brought = self._brought.get(gradient.name, -1)
        again = brought == self.backwards.count and inside and first
        if again:
            gradient.expect_pieces()
        else:
            # A call that has said how many backwards follow is detected as any loop where it is one of several.
            if self.backwards.before is None or brought < self.backwards.before:
                self.loop.notice("accumulation")
            self._require_declared(gradient)
        gradient.require_own()
        self._brought[gradient.name] = self.backwards.count
        self.fresh = True
        self.backwards.enter(delivers=inside)
        gradient.change(gradient.laid_out(values), add=True)
        if last and self._is_whole(gradient, again):
            self.use_stored(gradient)

    def _is_whole(self, gradient: Gradient, nested: bool) -> bool:
        """Whether nothing more will come of it in this step, so that it can be used at once."""
        return not (nested or gradient.in_pieces) and self.backwards.is_last()

    def _require_declared(self, gradient: Gradient) -> None:
        if self.loop.mode == "fused":
            self.backwards.require_declared(gradient.name)

    # --- around a backward --------------------------------------------------------------

    def _note_failure(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            left = ((gradient, gradient.place.parameter.grad) for gradient in self.by_name.values())
            self._left = [(gradient, weakref.ref(values)) for gradient, values in left if values is not None]

    def require_no_failure(self) -> None:
        """After a failed backward, continue if all gradients that it left in `p.grad` were dropped, by any means.

        Raises:
            UsageError: one of them is still there.
        """
        if not self.backwards.failed:
            return
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for gradient, left in self._left:
                values = gradient.place.parameter.grad
                if values is not None and (values is left() or gradient.stands_in(values)):
                    raise UsageError(
                        f"the last backward failed, and {gradient.name!r} still has the gradient of a part of it: call "
                        "zero_grad()"
                    )
        self.drop_all()

    def drop_all(self) -> None:
        """Forget all that arrived, and the updates that are staged. What stands in `p.grad` is left alone."""
        if self.fresh or self.backwards.failed or any(gradient.state.begun for gradient in self.by_name.values()):
            self.engine.discard()
        for gradient in self.by_name.values():
            gradient.drop(discarded=True)
        self.fresh = False
        self._left.clear()
        self.speculation.restart()
        self.backwards.forget_failure()

    def begin_backward(self) -> None:
        """A backward begins, or a call that makes several at once."""
        self.require_no_failure()
        if self.scale.enabled and not self._scaled:
            raise UsageError(
                "there is a loss scale, which loss.backward() leaves out: begin the backward by "
                "optimizer.backward(loss)"
            )
        if self.backwards.count and self.loop.mode == "fused" and self._all_dropped():
            # By p.grad = None, as model.zero_grad() does: the count begins again.
            self.backwards.restart()

    def _all_dropped(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return not any(
                gradient.handle is not None and gradient.stands_in(gradient.place.parameter.grad)
                for gradient in self.by_name.values()
            )

    def entered(self, module: torch.nn.Module) -> None:
        """A module of the model is entered."""
        self.backwards.entered()
        if in_reentrant_checkpoint():
            self._expect_pieces({id(parameter) for parameter in module.parameters()})

    def touched(self, places: Iterable[Place]) -> None:
        """Parameters are used outside of their modules."""
        if in_reentrant_checkpoint():
            self._expect_pieces({id(place.parameter) for place in places})

    def _expect_pieces(self, parameters: set[int]) -> None:
        # The backward of a reentrant checkpoint is one inside another. A gradient from outside of it, which may come
        # first, is not all of it.
        for gradient in self.by_name.values():
            if id(gradient.place.parameter) in parameters:
                gradient.expect_pieces()


def shares_memory(values: torch.Tensor) -> bool:
    """Whether another tensor has the memory."""
    return bool(torch._C._storage_Use_Count(values.untyped_storage()._cdata) > _STORAGE_USES)  # noqa: SLF001


def _was_there(values: torch.Tensor, *, shared: bool) -> bool:
    """Whether a gradient is on memory that was in `p.grad` before the backward, and is the user's.

    A gradient that autograd makes is no view of another tensor, and on memory that can be resized. Accumulation into
    an existing gradient raises its version; shared memory is seldom written to otherwise.
    """
    return values._is_view() or not values.untyped_storage().resizable() or (shared and values._version > 0)  # noqa: SLF001


@functools.cache
def _references_of_one() -> int:
    """Python's count of references to a gradient without other owners; versions of Python and torch differ in it."""
    with torch.inference_mode(mode=False):
        parameter = torch.nn.Parameter(torch.zeros((), device="cpu"))
        parameter.grad = torch.zeros((), device="cpu")
    values = parameter.grad
    return sys.getrefcount(values)
