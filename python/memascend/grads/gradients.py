"""Takes each gradient as autograd accumulates it, and carries out step() and zero_grad() for all of them."""

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
from memascend.grads.gradient import Gradient, GradientState, shares_memory, was_there
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

    # Gradients, each with what stands in `p.grad`.
    Present = Sequence[tuple[Gradient, torch.Tensor]]


# The norm by which torch's `clip_grad_norm_` clips.
_CLIPPING_NORM = Operation(torch.ops.aten._foreach_norm.Scalar, "norm", (2.0,), listed=True)  # noqa: SLF001


@dataclass(kw_only=True, eq=False)
class Gradients:
    """The gradients of a run: used in the backward ("fused"), or kept until step() on storage or in memory."""

    engine: Engine  # takes gradients where they lie
    units: CachedUnits | None  # updates begin from values in their memory; None: they are read, and hold no unit
    ram_tier: Container[str]  # the names of parameters whose gradients wait in memory, which holds one of each
    scale: LossScale  # of losses; where it is on, every backward is begun within `scaled()`
    loop: Loop  # the detected habits of the training loop
    speculation: Speculation  # whether updates by gradients that are kept begin early
    norms: Norms  # of the gradients of a step
    residency: Residency  # of the parameters

    def __post_init__(self) -> None:
        # By the names of the parameters, in their order.
        self.by_name: dict[str, Gradient] = {}
        self.backwards = Backwards(self.loop.accumulation_steps, self.begin_backward, self._note_failure)
        # Parameters whose updates may be left to the next step, which the store has room for.
        self.deferrable: frozenset[str] = frozenset()
        # Parameters whose updates the last step left to this one.
        self.behind: set[str] = set()
        # Whether this step leaves updates.
        self._defers = False
        # Something arrived, or was changed, since the last step.
        self.fresh = False
        # Time that backward spent to hand on gradients, waiting for memory included.
        self.handing_seconds = 0.0
        # A backward was begun by optimizer.backward().
        self._scaled = False
        # The step that is made uses gradients as they arrived.
        self._unchanged = False
        self._of: dict[int, Gradient] = {}
        # The backward of the step, by its number, that brought each gradient last.
        self._brought: dict[str, int] = {}
        # torch holds hooks where Python's collector does not look.
        weak = weakref.WeakMethod(self._hear)

        def accumulated(parameter: torch.Tensor) -> None:
            method = weak()
            if method is not None:
                method(parameter)

        self._hook = accumulated
        self._hooks: list[RemovableHandle] = []
        # What stood in `p.grad` when a failed backward was seen.
        self._left: list[tuple[Gradient, weakref.ref[torch.Tensor]]] = []

    def watch(self, place: Place, rule: Rule, step: int) -> None:
        """Take charge of a parameter's gradients."""
        parameter: Any = place.parameter
        self.by_name[place.name] = self._of[id(parameter)] = Gradient(self, place, rule, step)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            frozen = not parameter.requires_grad
            # One that is frozen now may thaw later, and torch takes no hook of it.
            parameter.requires_grad_(True)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook))
            parameter.requires_grad_(not frozen)

    def unwatch(self) -> None:
        """Release the parameters."""
        for hook in self._hooks:
            hook.remove()
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
            values, parts = parameter.grad, self.residency.stages
            if values is not None and parts is not None and parts.take(gradient):
                values = None
            if values is not None and gradient.handle is not None and gradient.stands_in(values):
                self.backwards.enter()
            elif values is not None:
                # How ranks are handed theirs refers to it, too: there it is known.
                alone = isinstance(parameter, LocalParameter) or sys.getrefcount(values) <= _references_of_one()
                self._arrive(gradient, values, lasting=assigned or not alone)
        self.handing_seconds += time.perf_counter() - began
        # Updates may have released units since the last one was used.
        self.residency.units.look_ahead()

    def heard_sum(self, parameter: torch.Tensor, total: torch.Tensor | None) -> None:
        """A gradient came: in `p.grad`, or as its `total` with the one that stands there."""
        if total is not None:
            with torch.no_grad():
                before: Any = parameter.grad
                if isinstance(before, GradientHandle):
                    before.gradient.replace_by_sum(total)
                elif before is not total:
                    before.copy_(total)
        self._hear(parameter, assigned=total is not None)

    def earlier_sum(self, before: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
        """The sum of a gradient that stands in `p.grad`, where it is `needed`, to add another one to it elsewhere."""
        if isinstance(before, GradientHandle):
            before.gradient.require_open()
            return before.gradient.materialize() if needed else None
        return before if needed else None

    def _arrive(self, gradient: Gradient, values: torch.Tensor, *, lasting: bool) -> None:
        """A gradient came where there was none; `lasting`: other code has the tensor, too."""
        nested = self.backwards.enter(delivers=True)
        if self.loop.mode == "fused":
            self.backwards.require_declared(gradient.name)
        last = self.backwards.is_last()
        self._note_arrival(gradient)
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
        if lasting or (not own_rows and was_there(values, shared=shared)):
            # The user reads and writes it by another name: it stays where it is, as under "ram".
            return
        if shared and not own_rows:
            # On memory of other gradients, or of a tensor that was given to backward(gradient=) and may be written to.
            # The rows of a rank are on memory that fully_shard makes for all of a group, and nobody writes to.
            gradient.note_given(values)
        if nested:
            gradient.expect_pieces()
        gradient.use(values, whole=last, shared=shared)

    def expect_clipping(self) -> None:
        """Note that the loop clips by torch's `clip_grad_norm_`, before its first step shows it."""
        for gradient in self.by_name.values():
            gradient.expected = (_CLIPPING_NORM,)

    def deliver(self, gradient: Gradient, values: torch.Tensor, *, whole: bool) -> None:
        """The sum of what all micro-batches of a call have accumulated; `whole`: no more of it comes in this step."""
        self._note_arrival(gradient)
        if self.loop.mode == "ram":
            gradient.put(values)
        else:
            gradient.use(values, whole=whole)

    def store_sum(self, gradient: Gradient, values: torch.Tensor) -> None:
        """A sum, or the first part of one, which waits on storage."""
        self._note_arrival(gradient)
        gradient.store(gradient.laid_out(values))

    def defers(self, gradient: Gradient) -> bool:
        """Whether the step that is made leaves the update of a parameter to the next one, if that is possible."""
        return self._defers and gradient.name in self.deferrable

    def catch_up(self) -> None:
        """Make and commit the updates that the last step left, before anything of their parameters is staged."""
        if self.engine.is_behind:
            # Parts of units that are on their way are of the commit that this one replaces.
            self.residency.units.drop_reads()
            self.engine.catch_up()
        self.behind.clear()

    def _note_arrival(self, gradient: Gradient) -> None:
        if gradient.handle is not None:
            # The handle was taken away: what stood behind it is dropped.
            gradient.drop()
        self._brought[gradient.name] = self.backwards.count
        self.fresh = True

    def note_change(self) -> None:
        """A gradient became another one, which no step has used."""
        self.fresh = True

    def _note_step(self, *, unchanged: bool) -> None:
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

    def require_in_order(self, gradient: Gradient) -> None:
        """Refuse more of a gradient whose sum a call took for complete."""
        if self.residency.stages is not None:
            self.residency.stages.require_open(gradient)

    def add(self, gradient: Gradient, values: torch.Tensor, *, summed: bool) -> None:
        """A gradient came where there is one, which no update used: its handle refuses another.

        `summed`: the values are those of both.
        """
        inside = self.backwards.inside()
        if inside:
            self.backwards.enter()
        brought = self._brought.get(gradient.name, -1)
        again = brought == self.backwards.count and inside
        if again:
            gradient.expect_pieces()
        else:
            # A call that has said how many backwards follow is detected as any loop where it is one of several.
            if self.backwards.before is None or brought < self.backwards.before:
                self.loop.notice("accumulation")
            if self.loop.mode == "fused":
                self.backwards.require_declared(gradient.name)
        gradient.require_own()
        self._brought[gradient.name] = self.backwards.count
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
        """After a failed backward, continue if all gradients that it left in `p.grad` were dropped, by any means."""
        if not self.backwards.failed:
            return
        for gradient, left in self._left:
            values = gradient.values
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
        begin_heap_backward()
        if self.scale.enabled and not self._scaled:
            raise UsageError(
                "there is a loss scale, which loss.backward() leaves out: begin the backward by "
                "optimizer.backward(loss)"
            )
        if self.backwards.count and self.loop.mode == "fused":
            every = self.by_name.values()
            if not any(one.handle is not None and one.stands_in(one.values) for one in every):
                # All were dropped by p.grad = None, as model.zero_grad() does: the count begins again.
                self.backwards.restart()

    def entered(self, module: torch.nn.Module) -> None:
        """A module of the model is entered."""
        self.backwards.entered()
        if not torch.is_grad_enabled() and in_reentrant_checkpoint():
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

    def are_taken_away(self) -> bool:
        """Whether each `p.grad` of what is staged is None, as `model.zero_grad()` leaves it."""
        return self.is_staged() and all(gradient.values is None for gradient in self.by_name.values())

    def is_staged(self) -> bool:
        """Whether something arrived or is staged that no step has used."""
        return self.fresh or self.has_updates

    @property
    def has_updates(self) -> bool:
        """Whether an update of a step that is not committed has begun."""
        return any(gradient.state.staged for gradient in self.by_name.values())

    # --- the step --------------------------------------------------------------------

    def present(self) -> Present:
        """The present gradients and their values in `p.grad`; a gradient whose handle was removed is dropped.

        Where any is there, an optimizer that updates parameters without a gradient by zeros gets these.
        """
        backwards = self.backwards
        backwards.seen_outside()
        self.require_no_failure()
        self.norms.begin_step()
        found = []
        for gradient in self.by_name.values():
            values = gradient.values
            if gradient.handle is not None and not gradient.stands_in(values):
                gradient.drop()
            elif gradient.state is GradientState.MEMORY_STAGED:
                # By a step that failed, from a gradient in memory, which may be another now.
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
            if gradient.name not in there and gradient.rule.code.manner.zeros:
                place = gradient.place
                # Without memory: they are laid out when their turn comes.
                zeros = torch.zeros((), dtype=place.dtype, device="cpu").expand(place.shape)
                found.append((gradient, zeros))
        return found

    def update_all(self, present: Present, factor: float) -> None:
        """Begin every update that has not begun yet, and repeat early updates that would be different now.

        The options of an update that has begun for good must not have changed.
        """
        self._unchanged = factor == 1.0
        self._decide_when(present)
        # Parameters of a group share their options: they are looked at once.
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
                    f"the gradient of {gradient.name!r} was used by the last step and is gone, and this one needs it: "
                    'call zero_grad() after each step, or pass gradients="ssd"'
                )
            factors = gradient.factors()
            self._unchanged = self._unchanged and not gradient.is_changed
            if factors is not None:
                gradient.stage(factor, factors=factors)
                continue
            changed = gradient.materialize()
            if gradient.name in self.ram_tier or self.defers(gradient):
                # In place of the gradient that it was made of: memory is planned for one of them, and the commit names
                # the one on storage.
                gradient.assign(changed)
                gradient.stage(factor)
                self.norms.measure_once(gradient, changed)
            else:
                self._stage(gradient, changed, factor)

    def _decide_when(self, present: Present) -> None:
        """Decide whether this step leaves updates to the next one, and make those that the last one left if not."""
        stored = [gradient for gradient, values in present if values is gradient.handle and gradient.state.stored]
        unchanged = self._unchanged and not any(gradient.is_changed for gradient in stored)
        self._defers = self.loop.stays_kept and not self.speculation.begins_after(unchanged=unchanged)
        left = ((gradient, values) for gradient, values in present if gradient.name in self.behind)
        if self.behind and not (self._defers and all(_may_wait(*one) for one in left)):
            self.catch_up()

    def _stays(self, gradient: Gradient, now: Any, factor: float) -> bool:
        """Whether the update that has begun is the step's, now that the options and the factor are known."""
        is_same = bool(now == gradient.options)
        if gradient.state is GradientState.EARLY:
            if is_same and gradient.stands(factor):
                gradient.let_stand()
                return True
            return False
        if not is_same:
            raise UsageError(
                f"options of {gradient.name!r} changed between backward and step(), from {gradient.options} to {now}: "
                'its update ran already; change them after step(), or pass gradients="ssd"'
            )
        return True

    def _stage(self, gradient: Gradient, values: torch.Tensor, factor: float) -> None:
        gradient.stage(factor, values)
        # While the engine's thread works: its gradient is not written to.
        self.norms.measure_once(gradient, values)

    def measured(self, present: Present) -> Numbers:
        """Before the updates: whether any gradient is not finite, and the sum of their squares."""
        self.engine.drain()
        for gradient, values in present:
            if values is not gradient.handle:
                self.norms.measure_once(gradient, gradient.laid_out(values))
            elif gradient.state.stored and gradient.operations:
                self.norms.measure_once(gradient, gradient.materialize())
        return self.norms.of(present)

    def nonfinite(self, present: Present) -> list[str]:
        """The names of gradients of a step, of which the norm was taken, that are not finite or have no finite norm."""
        numbers = self.norms.each(one for one, _ in present)
        parts = zip(present, numbers, strict=True)
        return [one.name for (one, _), (bad, squares) in parts if bad or not math.isfinite(rounded(squares))]

    def norm(self, squares: Squares) -> float:
        """The norm with these squares, unscaled, in double precision."""
        return norm_of(squares) * abs(self.scale.inverse)

    def committed(self, present: Present) -> list[str]:
        """The step is committed; the names of the parameters that it updated."""
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
        """Discard staged updates; gradients stay where they are."""
        self.engine.discard()
        for gradient in self.by_name.values():
            if gradient.state.begun:
                gradient.skip()
        self._note_step(unchanged=False)

    # --- the end ----------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything: staged updates, gradients on storage, handles."""
        self.backwards.seen_outside()
        self.drop_all()
        for gradient in self.by_name.values():
            gradient.put(None)

    def zero(self) -> None:
        """Leave zeros, as `zero_grad(set_to_none=False)` does."""
        backwards = self.backwards
        backwards.seen_outside()
        self.loop.notice("zero_grad(set_to_none=False)")
        every = [(gradient, gradient.values) for gradient in self.by_name.values()]
        present = [(gradient, values) for gradient, values in every if values is not None]
        if any(gradient.stands_in(values) and not gradient.state.stored for gradient, values in present):
            raise UsageError(
                'zero_grad(set_to_none=False) would leave zeros where an update ran already: pass gradients="ssd"'
            )
        for gradient, values in present:
            in_memory = not gradient.stands_in(values)
            if in_memory and gradient.handle is not None:
                gradient.drop()
            elif gradient.state.staged:
                gradient.unstage()
            if in_memory and values.grad_fn is not None:
                values.detach_()
            elif in_memory:
                # As torch does it; a view cannot be detached in place.
                values.requires_grad_(False)
            values.zero_()
            # A step would apply the zeros: moments decay, weights too.
            self.fresh = True
        backwards.forget_failure()


def _may_wait(gradient: Gradient, values: torch.Tensor) -> bool:
    """Whether an update can be left to the next step, as that of the last one was."""
    rule = gradient.rule
    return not values.is_sparse and rule.numbers(rule.options(), gradient.step, 1.0) is not None


@functools.cache
def _references_of_one() -> int:
    """Python's count of references to a gradient without other owners; versions of Python and torch differ in it."""
    with torch.inference_mode(mode=False):
        parameter = torch.nn.Parameter(torch.zeros((), device="cpu"))
        give_gradient(parameter, torch.zeros((), device="cpu"))
    values = parameter.grad
    return sys.getrefcount(values)
