"""Takes each gradient as autograd accumulates it; does the work of step() and zero_grad() on all gradients."""

from __future__ import annotations

import functools
import math
import sys
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.distributed.fsdp import LocalParameter
from memascend.errors import UsageError
from memascend.grads.gradient import Gradient, GradientState, is_user_memory, shares_memory
from memascend.grads.lazy_grad import GradientHandle
from memascend.grads.loop import Backwards, in_reentrant_checkpoint
from memascend.grads.norms import norm_of
from memascend.grads.operations import Operation
from memascend.memory import begin_heap_backward
from memascend.optim.shared import give_gradient
from memascend.tensors import rounded

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from memascend.grads.loop import Loop, Speculation
    from memascend.grads.loss_scale import LossScale
    from memascend.grads.norms import Norms, Numbers
    from memascend.optim.rules import Rule
    from memascend.params.cached_units import CachedUnits
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency
    from memascend.storage import Engine
    from memascend.tensors import Squares

    # Gradients, each with the value of its `p.grad`.
    Present = Sequence[tuple[Gradient, torch.Tensor]]


# The norm that torch's `clip_grad_norm_` takes.
_CLIPPING_NORM = Operation(torch.ops.aten._foreach_norm.Scalar, "norm", (2.0,), listed=True)  # noqa: SLF001


@dataclass(kw_only=True, eq=False)
class Gradients:
    """The gradients of a run: used in the backward ("fused"), or kept until step() on storage or in memory."""

    engine: Engine  # stores gradients and makes updates
    units: CachedUnits | None  # has cached values, which updates use; None if updates read values from storage
    ram_tier: Container[str]  # names of the RAM tier's parameters; the plan has memory for one waiting gradient of each
    scale: LossScale  # scales losses; if it is enabled, every backward must begin within `scaled()`
    loop: Loop  # the detected habits of the training loop
    speculation: Speculation  # decides whether updates by kept gradients begin early
    norms: Norms  # the measures of the gradients of a step
    residency: Residency  # the parameters' units in memory

    def __post_init__(self) -> None:
        # The gradients, by parameter name, in the order of the parameters.
        self.by_name: dict[str, Gradient] = {}
        self.backwards = Backwards(self.loop.accumulation_steps, self.begin_backward, self._note_failure)
        # Names of parameters whose updates may be deferred to the next step, because the store has room to do so.
        self.deferrable: frozenset[str] = frozenset()
        # Names of parameters whose updates the last step deferred to the present step.
        self.behind: set[str] = set()
        # Whether this step defers updates.
        self._defers = False
        # True if a gradient has arrived or changed since the last step or `drop_all()`.
        self.fresh = False
        # Seconds that backwards spent in `_on_gradient()`, including waits for memory.
        self.handing_seconds = 0.0
        # True within `scaled()`: optimizer.backward() or accumulate() began the backward.
        self._scaled = False
        # True if the present step uses all gradients as they arrived, neither clipped nor changed.
        self._unchanged = False
        # The gradients, by `id()` of their parameters.
        self._of: dict[int, Gradient] = {}
        # By parameter name: the value of `backwards.count` when its gradient last arrived.
        self._arrival_backward: dict[str, int] = {}
        # A weak reference, because Python's garbage collector does not see the hooks that torch holds: a strong
        # reference would keep this object alive.
        weak = weakref.WeakMethod(self._on_gradient)

        def accumulated(parameter: torch.Tensor) -> None:
            method = weak()
            if method is not None:
                method(parameter)

        self._hook = accumulated
        self._hooks: list[RemovableHandle] = []
        # The values of `p.grad` when the last failed backward was detected.
        self._left: list[tuple[Gradient, weakref.ref[torch.Tensor]]] = []

    def watch(self, place: Place, rule: Rule, step: int) -> None:
        """Starts to handle a parameter's gradients; `step` is the number of its committed updates."""
        parameter: Any = place.parameter
        self.by_name[place.name] = self._of[id(parameter)] = Gradient(self, place, rule, step)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            frozen = not parameter.requires_grad
            # torch registers no hook on a frozen parameter, and the user may unfreeze it later.
            parameter.requires_grad_(True)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook))
            parameter.requires_grad_(not frozen)

    def unwatch(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._of.clear()

    # --- arrival ---------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.Tensor, *, assigned: bool = False) -> None:
        """Handles an accumulated gradient; `assigned`: it was added to a tensor that was already in `p.grad`."""
        began = time.perf_counter()
        gradient = self._of.get(id(parameter))
        if gradient is None:
            # A user's hook returned this tensor in place of the parameter. torch raises an error after the last hook.
            return
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            values, parts = parameter.grad, self.residency.stages
            if values is not None and parts is not None and parts.take(gradient):
                values = None
            if values is not None and gradient.handle is not None and gradient.is_handle(values):
                self.backwards.enter()
            elif values is not None:
                # If nothing else refers to a gradient, no user code holds it. The gradient of a LocalParameter has one
                # more reference, from the code that delivers it; no user code holds that gradient either.
                alone = isinstance(parameter, LocalParameter) or sys.getrefcount(values) <= _references_of_one()
                self._arrive(gradient, values, lasting=assigned or not alone)
        self.handing_seconds += time.perf_counter() - began
        # Updates may have released units since the last use of a unit: prefetch again.
        self.residency.units.look_ahead()

    def on_sum(self, parameter: torch.Tensor, total: torch.Tensor | None) -> None:
        """Handles a gradient that FSDP2 has reduced.

        `total` is the sum of this gradient and the gradients of earlier backwards; None if `p.grad` already has this
        sum.
        """
        if total is not None:
            with torch.no_grad():
                before: Any = parameter.grad
                if isinstance(before, GradientHandle):
                    before.gradient.replace_by_sum(total)
                elif before is not total:
                    before.copy_(total)
        self._on_gradient(parameter, assigned=total is not None)

    def accumulated_value(self, before: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
        """Returns the values of gradient `before`, if any, to which the caller adds more; None if not `needed`."""
        if isinstance(before, GradientHandle):
            before.gradient.require_open()
            return before.gradient.materialize() if needed else None
        return before if needed else None

    def _arrive(self, gradient: Gradient, values: torch.Tensor, *, lasting: bool) -> None:
        """Handles the gradient `values`, which `p.grad` holds in memory; `lasting`: other code may hold it, too."""
        nested = self.backwards.enter(delivers=True)
        if self.loop.mode == "fused":
            self.backwards.require_declared(gradient.name)
        last = self.backwards.is_last()
        self._note_arrival(gradient)
        if self.loop.mode == "ram" or values.is_sparse:
            # A sparse gradient is small: it stays in `p.grad`.
            return
        if values.requires_grad:
            raise UsageError(
                f"backward(create_graph=True) leaves a graph on the gradient of {gradient.name!r}, which offload() "
                'cannot store: take gradients by torch.autograd.grad(..., create_graph=True), or pass gradients="ram"'
            )
        shared = shares_memory(values)
        own_rows = isinstance(gradient.place.parameter, LocalParameter)
        if lasting or (not own_rows and is_user_memory(values, shared=shared)):
            # User code may read or write this tensor at any time, so the tensor stays in `p.grad`.
            return
        if shared and not own_rows:
            # Other tensors use this memory, too: other gradients, for example, or a tensor that user code passed to
            # backward(gradient=) and may write to. A rank's rows share memory that fully_shard makes for a group; no
            # code writes to that memory.
            gradient.note_given(values)
        if nested:
            gradient.expect_pieces()
        gradient.use(values, whole=last, shared=shared)

    def expect_clipping(self) -> None:
        """Makes gradients take the norm of `clip_grad_norm_` from the first step on. Called if the loop will clip."""
        for gradient in self.by_name.values():
            gradient.expected = (_CLIPPING_NORM,)

    def deliver(self, gradient: Gradient, values: torch.Tensor, *, whole: bool) -> None:
        """Handles `values`, the sum over all micro-batches of a call; `whole`: no more is expected in this step."""
        self._note_arrival(gradient)
        if self.loop.mode == "ram":
            gradient.put(values)
        else:
            gradient.use(values, whole=whole)

    def store_sum(self, gradient: Gradient, values: torch.Tensor) -> None:
        """Writes `values`, the sum of the first parts of a gradient, to storage. The caller adds later parts there."""
        self._note_arrival(gradient)
        gradient.store(gradient.laid_out(values))

    def defers(self, gradient: Gradient) -> bool:
        """True if this step should defer the update by `gradient` to the next step."""
        return self._defers and gradient.name in self.deferrable

    def catch_up(self) -> None:
        """Makes and commits the updates that the last step deferred.

        Must be called before another update of one of these parameters is staged.
        """
        if self.engine.is_behind:
            # Drop the reads in flight: they return values of the commit that `catch_up()` replaces.
            self.residency.units.drop_reads()
            self.engine.catch_up()
        self.behind.clear()

    def _note_arrival(self, gradient: Gradient) -> None:
        if gradient.handle is not None:
            # User code removed the handle from `p.grad`: drop the handle's gradient.
            gradient.drop()
        self._arrival_backward[gradient.name] = self.backwards.count
        self.fresh = True

    def note_change(self) -> None:
        """Records that a gradient changed: no step has used its present value."""
        self.fresh = True

    def _note_step(self, *, unchanged: bool) -> None:
        """Ends a committed or skipped step; `unchanged`: its updates used the gradients as they arrived."""
        self.speculation.step_ended(unchanged=unchanged)
        self.fresh = False
        self.backwards.restart()

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Marks a backward inside the `with` block as begun from a scaled loss."""
        self._scaled = True
        try:
            yield
        finally:
            self._scaled = False

    def require_in_order(self, gradient: Gradient) -> None:
        """Raises UsageError if `accumulate()` has already completed the sum of this gradient."""
        if self.residency.stages is not None:
            self.residency.stages.require_open(gradient)

    def add(self, gradient: Gradient, values: torch.Tensor, *, summed: bool) -> None:
        """Adds `values` to a stored gradient; callers have checked by `require_open()` that no update has used it.

        `summed`: `values` already is the sum of the stored gradient and the new gradient.
        """
        inside = self.backwards.inside()
        if inside:
            self.backwards.enter()
        brought = self._arrival_backward.get(gradient.name, -1)
        again = brought == self.backwards.count and inside
        if again:
            gradient.expect_pieces()
        else:
            # Backwards inside `expecting()` count as the loop's accumulation only if the gradient had already arrived
            # before the `expecting()` block.
            if self.backwards.before is None or brought < self.backwards.before:
                self.loop.notice("accumulation")
            if self.loop.mode == "fused":
                self.backwards.require_declared(gradient.name)
        gradient.require_own()
        self._arrival_backward[gradient.name] = self.backwards.count
        self.fresh = True
        self.backwards.enter(delivers=inside)
        gradient.change(gradient.laid_out(values), add=not summed)
        if not (again or gradient.in_pieces) and self.backwards.is_last():
            gradient.use_stored()

    # --- around a backward --------------------------------------------------------------

    def _note_failure(self) -> None:
        left = ((gradient, gradient.values) for gradient in self.by_name.values())
        self._left = [(gradient, weakref.ref(values)) for gradient, values in left if values is not None]

    def require_no_failure(self) -> None:
        """Drops all gradients if the last backward failed.

        Raises UsageError if a `p.grad` still has the value that it had when the failure was detected.
        """
        if not self.backwards.failed:
            return
        for gradient, left in self._left:
            values = gradient.values
            if values is not None and (values is left() or gradient.is_handle(values)):
                raise UsageError(
                    f"the last backward failed, so the gradient of {gradient.name!r} may be incomplete: call "
                    "zero_grad()"
                )
        self.drop_all()

    def drop_all(self) -> None:
        """Drops all gradients that arrived and all staged updates; does not change `p.grad`."""
        if self.fresh or self.backwards.failed or any(gradient.state.begun for gradient in self.by_name.values()):
            self.engine.discard()
        for gradient in self.by_name.values():
            gradient.drop(discarded=True)
        self.fresh = False
        self._left.clear()
        self.speculation.restart()
        self.backwards.forget_failure()

    def begin_backward(self) -> None:
        """Checks that a backward may begin, and prepares for it.

        An `accumulate()` that computes by layer calls this function once, before the first of its backwards.
        """
        self.require_no_failure()
        begin_heap_backward()
        if self.scale.enabled and not self._scaled:
            raise UsageError("loss.backward() leaves out the loss scale: call optimizer.backward(loss) instead")
        if self.backwards.count and self.loop.mode == "fused":
            every = self.by_name.values()
            if not any(one.handle is not None and one.is_handle(one.values) for one in every):
                # The user dropped all gradients by p.grad = None, as model.zero_grad() does: count backwards from 0.
                self.backwards.restart()

    def entered(self, module: torch.nn.Module) -> None:
        """Handles the start of a module's forward."""
        self.backwards.entered()
        if not torch.is_grad_enabled() and in_reentrant_checkpoint():
            self._expect_pieces({id(parameter) for parameter in module.parameters()})

    def touched(self, places: Iterable[Place]) -> None:
        """Handles a use of parameters outside of their modules."""
        if in_reentrant_checkpoint():
            self._expect_pieces({id(place.parameter) for place in places})

    def _expect_pieces(self, parameters: set[int]) -> None:
        # A reentrant checkpoint runs its backward inside another one. A gradient from outside of the checkpoint may
        # arrive first, and is then only a part of the whole gradient.
        for gradient in self.by_name.values():
            if id(gradient.place.parameter) in parameters:
                gradient.expect_pieces()

    def all_grads_removed(self) -> bool:
        """True if `is_staged()` and every `p.grad` is None, as after `model.zero_grad()`."""
        return self.is_staged() and all(gradient.values is None for gradient in self.by_name.values())

    def is_staged(self) -> bool:
        """True if a gradient has arrived or changed since the last step or `drop_all()`, or if an update is staged."""
        return self.fresh or self.has_updates

    @property
    def has_updates(self) -> bool:
        """True if an update is staged and not committed."""
        return any(gradient.state.staged for gradient in self.by_name.values())

    # --- the step --------------------------------------------------------------------

    def present(self) -> Present:
        """Returns the gradients of this step, each with its `p.grad`.

        Drops each gradient whose handle user code has removed from `p.grad`.

        If any gradient is present, a parameter without a gradient gets zeros if its optimizer updates such parameters.
        """
        backwards = self.backwards
        backwards.seen_outside()
        self.require_no_failure()
        self.norms.begin_step()
        found = []
        for gradient in self.by_name.values():
            values = gradient.values
            if gradient.handle is not None and not gradient.is_handle(values):
                gradient.drop()
            elif gradient.state is GradientState.MEMORY_STAGED:
                # A step has staged this update and then failed. The gradient in memory may have changed since.
                gradient.unstage()
            gradient.require_unwritten()
            if values is not None:
                found.append((gradient, values))
                if values is not gradient.handle and not gradient.is_used(values):
                    self.fresh = True
        if not found:
            backwards.restart()
            return found
        there = {gradient.name for gradient, _ in found}
        for gradient in self.by_name.values():
            if gradient.name not in there and gradient.rule.code.run_mode.zeros:
                place = gradient.place
                # `expand()` needs no memory: `update_all()` allocates the zeros of one parameter at a time.
                zeros = torch.zeros((), dtype=place.dtype, device="cpu").expand(place.shape)
                found.append((gradient, zeros))
        return found

    def update_all(self, present: Present, factor: float) -> None:
        """Begins every update that has not begun, and repeats each early update that `_stays` finds invalid.

        Raises UsageError if the options of a staged update have changed since it began, or if the last step used up a
        gradient that is still in `p.grad`.
        """
        self._unchanged = factor == 1.0
        self._decide_when(present)
        # Parameters of a group share their options: read them once per group.
        now: dict[tuple[int, int], Any] = {}
        for gradient, values in present:
            if gradient.state.begun:
                shared = gradient.rule.number, id(gradient.options)
                if shared not in now:
                    now[shared] = gradient.rule.options()
                if self._stays(gradient, now[shared], factor):
                    continue
                gradient.take_back()
            if values is not gradient.handle:
                self._stage(gradient, gradient.laid_out(values), factor)
                continue
            if gradient.state is GradientState.SPENT:
                raise UsageError(
                    f"the last step used up the gradient of {gradient.name!r}, so this step cannot use it again: call "
                    'zero_grad() after each step, or pass gradients="ssd" to offload()'
                )
            factors = gradient.factors()
            self._unchanged = self._unchanged and not gradient.is_changed
            if factors is not None:
                gradient.stage(factor, factors=factors)
                continue
            changed = gradient.materialize()
            if gradient.name in self.ram_tier or self.defers(gradient):
                # Write `changed` to storage in place of the gradient: memory is planned for only one gradient of each
                # parameter, and a commit that defers an update refers to the gradient on storage.
                gradient.assign(changed)
                gradient.stage(factor)
                self.norms.measure_once(gradient, changed)
            else:
                self._stage(gradient, changed, factor)

    def _decide_when(self, present: Present) -> None:
        """Decides whether this step defers updates.

        Makes the updates that the last step deferred, unless this step can defer the next updates of these parameters.
        """
        stored = [gradient for gradient, values in present if values is gradient.handle and gradient.state.stored]
        unchanged = self._unchanged and not any(gradient.is_changed for gradient in stored)
        self._defers = self.loop.stays_kept and not self.speculation.begins_after(unchanged=unchanged)
        left = ((gradient, values) for gradient, values in present if gradient.name in self.behind)
        if self.behind and not (self._defers and all(_may_wait(*one) for one in left)):
            self.catch_up()

    def _stays(self, gradient: Gradient, now: Any, factor: float) -> bool:
        """True if the begun update is valid for a step with options `now` and `factor`; confirms an early update."""
        is_same = bool(now == gradient.options)
        if gradient.state is GradientState.EARLY:
            if is_same and gradient.stands(factor):
                gradient.confirm()
                return True
            return False
        if not is_same:
            raise UsageError(
                f"options of {gradient.name!r} changed from {gradient.options} to {now}, but its update already used "
                'the old options: change options between step() and the next backward, or pass gradients="ssd"'
            )
        return True

    def _stage(self, gradient: Gradient, values: torch.Tensor, factor: float) -> None:
        gradient.stage(factor, values)
        # Measure the gradient while the engine's thread updates the parameter: the two threads only read the gradient.
        self.norms.measure_once(gradient, values)

    def measured(self, present: Present) -> Numbers:
        """Returns whether any gradient is not finite, and the sum of all squares; called before `update_all()`."""
        self.engine.drain()
        for gradient, values in present:
            if values is not gradient.handle:
                self.norms.measure_once(gradient, gradient.laid_out(values))
            elif gradient.state.stored and gradient.operations:
                self.norms.measure_once(gradient, gradient.materialize())
        return self.norms.of(present)

    def nonfinite(self, present: Present) -> list[str]:
        """Returns the names of gradients with a non-finite value or norm; requires that this step has measured them."""
        numbers = self.norms.each(one for one, _ in present)
        parts = zip(present, numbers, strict=True)
        return [one.name for (one, _), (bad, squares) in parts if bad or not math.isfinite(rounded(squares))]

    def norm(self, squares: Squares) -> float:
        """Returns the unscaled norm for a sum of squares, in double precision."""
        return norm_of(squares) * abs(self.scale.inverse)

    def committed(self, present: Present) -> list[str]:
        """Ends a committed step; returns the names of the parameters that it updated."""
        updated = [gradient for gradient in self.by_name.values() if gradient.state.staged]
        for gradient in updated:
            gradient.commit()
        self.behind = {gradient.name for gradient in updated if gradient.deferred}
        for gradient, values in present:
            if values is not gradient.handle:
                gradient.note_used(values)
        self._note_step(unchanged=self._unchanged)
        return [gradient.name for gradient in updated]

    def skip(self) -> None:
        """Discards all updates that have begun, and ends the step; gradients that are not used up remain."""
        self.engine.discard()
        for gradient in self.by_name.values():
            if gradient.state.begun:
                gradient.skip()
        self._note_step(unchanged=False)

    # --- the end ----------------------------------------------------------------------

    def clear(self) -> None:
        """Drops everything: staged updates, gradients on storage, and every `p.grad`."""
        self.backwards.seen_outside()
        self.drop_all()
        for gradient in self.by_name.values():
            gradient.put(None)

    def zero(self) -> None:
        """Sets all gradients to zero, as `zero_grad(set_to_none=False)` does."""
        backwards = self.backwards
        backwards.seen_outside()
        self.loop.notice("zero_grad(set_to_none=False)")
        every = [(gradient, gradient.values) for gradient in self.by_name.values()]
        present = [(gradient, values) for gradient, values in every if values is not None]
        if any(gradient.is_handle(values) and not gradient.state.stored for gradient, values in present):
            raise UsageError(
                "zero_grad(set_to_none=False) cannot zero gradients that an update has already used: leave out "
                'set_to_none=False, or pass gradients="ssd" to offload()'
            )
        for gradient, values in present:
            in_memory = not gradient.is_handle(values)
            if in_memory and gradient.handle is not None:
                gradient.drop()
            elif gradient.state.staged:
                gradient.unstage()
            if in_memory and values.grad_fn is not None:
                values.detach_()
            elif in_memory:
                # torch's own `zero_grad()` does this, too, because `detach_()` raises an error for a view.
                values.requires_grad_(False)
            values.zero_()
            # step() uses the zeros in updates: moments decay, and weights decay if the optimizer has weight decay.
            self.fresh = True
        backwards.forget_failure()


def _may_wait(gradient: Gradient, values: torch.Tensor) -> bool:
    """True if the update by this gradient can be deferred, as the parameter's last update was."""
    rule = gradient.rule
    return not values.is_sparse and rule.numbers(rule.options(), gradient.step, 1.0) is not None


@functools.cache
def _references_of_one() -> int:
    """Returns Python's reference count of a gradient without other owners, for these versions of Python and torch."""
    with torch.inference_mode(mode=False):
        parameter = torch.nn.Parameter(torch.zeros((), device="cpu"))
        give_gradient(parameter, torch.zeros((), device="cpu"))
    values = parameter.grad
    return sys.getrefcount(values)
