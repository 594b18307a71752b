"""Routes gradients: used in the backward ("fused"), or held until step() on storage ("ssd") or in memory ("ram").

Backward stages, step() commits, zero_grad() discards. What stands in `p.grad` meanwhile is the record of truth: step()
skips a parameter whose gradient is None and uses one that the user assigned.
"""

from __future__ import annotations

import math
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.errors import UsageError
from memascend.gradients import norms as measures
from memascend.gradients.backward_tasks import Backwards, in_reentrant_checkpoint
from memascend.gradients.gradient import Arrival, Spill
from memascend.gradients.handle import GradientHandle
from memascend.residency.row_gradient import RowGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend.residency.placeholder import Place

__all__ = ["Gradients", "Rule"]

# The gradient's own, and the one that asks.
_STORAGE_USES = 2
# In the parameters' tables of hooks, where torch's own keys are numbers.
_KEY = "memascend"
_INSTEAD = 'pass accumulation_steps= to offload(), or gradients="ssd"'


class Rule(Protocol):
    """The arithmetic of an update."""

    def options(self, kept: Arrival) -> Any:
        """The options that an update of this parameter would use now."""

    def update(self, kept: Arrival, gradient: torch.Tensor, scale: float) -> None:
        """Begin the update by a gradient in memory, multiplied by `scale`."""

    def update_spilled(self, kept: Arrival, factors: Sequence[float], scale: float) -> None:
        """Begin the update by the gradient that was spilled."""

    def rewrite(self, name: str, values: torch.Tensor, step: int) -> None:
        """Stage other values, and a master that equals them."""

    def state(self, kept: Arrival) -> dict[str, torch.Tensor]:
        """A copy of the state, by torch's names, and the master."""


class Gradients:
    """All gradients of a step, and what becomes of them."""

    def __init__(
        self, spill: Spill, rule: Rule, check: Any, *, mode: str, accumulation_steps: int, keeps: bool
    ) -> None:
        """Nothing has arrived.

        Args:
            spill: where gradients wait.
            rule: the arithmetic of an update.
            check: `kernels.check_and_unscale`.
            mode: "auto", "fused", "ssd" or "ram".
            accumulation_steps: backwards that make a step.
            keeps: the loop is known to need kept gradients, so that "auto" has nothing to learn.
        """
        self.spill = spill
        self.rule = rule
        self._check = check
        self.learning = mode == "auto"
        self.mode = "ssd" if mode == "auto" else mode
        self._keeps = keeps
        self.kept: dict[str, Arrival] = {}
        # Multiplies every gradient: the inverse of the loss scale.
        self.scale = 1.0
        # A backward must be begun by optimizer.backward(), and was.
        self.scaled_only = False
        self.scaling = False
        # Something arrived since the last step.
        self.fresh = False
        self.backwards = Backwards(accumulation_steps, self._begins)
        self._noticed: set[str] = set()
        # Of gradients that were measured in memory for this step.
        self._measures: dict[str, measures.Measure] = {}
        # By the parameter, for its hook: one function for all of them.
        self._of: dict[int, Arrival] = {}
        # torch keeps hooks where Python's collector does not look: they must not lead back to a parameter.
        weak = weakref.ref(self)

        def arrive(parameter: torch.Tensor) -> None:
            gradients = weak()
            if gradients is not None:
                gradients._heard(gradients._of[id(parameter)], parameter)  # noqa: SLF001

        self._arrive = arrive
        # Hears of each gradient that was handed on: its name, its bytes, and when that began.
        self.on_arrived: Callable[[str, int, float], None] | None = None

    # --- arrival -------------------------------------------------------------------

    def watch(self, place: Place, group: int, step: int) -> Arrival:
        """Take charge of a parameter's gradients."""
        kept = self.kept[place.name] = Arrival(self, place, group, step)
        self._of[id(place.parameter)] = kept
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            frozen = not place.parameter.requires_grad
            # One that is frozen now may thaw later, and torch takes no hook of it.
            place.parameter.requires_grad_(True)
            _hook(place.parameter, self._arrive)
            place.parameter.requires_grad_(not frozen)
        return kept

    def _heard(self, kept: Arrival, parameter: torch.Tensor) -> None:
        """A gradient was accumulated."""
        began = time.perf_counter()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            gradient = parameter.grad
            if gradient is not None and not kept.stands_in(gradient):
                self._arrived(kept, parameter, gradient)
            elif gradient is not None:
                self.backwards.enter()
        if self.on_arrived is not None:
            self.on_arrived(kept.name, kept.place.nothing.nbytes, began)

    def _arrived(self, kept: Arrival, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient came where there was none."""
        nested = self.backwards.enter()
        if kept.handle is not None:
            # The handle was taken away: what stood behind it is dropped.
            self._drop(kept)
        kept.arrived_in = self.backwards.count
        self.fresh = True
        self.backwards.delivered = True
        self._require_declared(kept)
        if self.mode == "ram" and isinstance(gradient, RowGradient):
            parameter.grad = gradient.dense()
            return
        if self.mode == "ram" or gradient.is_sparse:
            # A sparse one is small: it waits where it is.
            return
        if gradient.requires_grad:
            raise UsageError(
                f"backward(create_graph=True) leaves a graph on the gradient of {kept.name!r}, which cannot be kept: "
                'take gradients by torch.autograd.grad(..., create_graph=True), or pass gradients="ram"'
            )
        if torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > _STORAGE_USES:  # noqa: SLF001
            # A view of memory that somebody gave to backward(gradient=), and may write to.
            gradient = gradient.clone()
        gradient = kept.laid_out(gradient)
        if self.mode == "fused" and not nested and not kept.in_pieces and self.backwards.is_last():
            self._update(kept, gradient)
        else:
            kept.in_pieces = kept.in_pieces or nested
            self.spill.spill(kept.name, gradient)
            kept.spilled = True
        kept.used = False
        # torch's `grad` is an edge that Python's collector does not see: what stands in it must not lead back here.
        kept.handle = GradientHandle(weakref.proxy(kept), strides=kept.place.stride, device=kept.place.device)
        parameter.grad = kept.handle

    def added(self, kept: Arrival, gradient: torch.Tensor) -> None:
        """A gradient came where there is one."""
        inside = self.backwards.inside()
        if inside:
            self.backwards.enter()
        again = kept.arrived_in == self.backwards.count and inside
        if again:
            kept.in_pieces = True
        if not kept.spilled:
            if kept.used:
                raise UsageError(
                    f"a second gradient for {kept.name!r} after step(): call zero_grad() after each step, or {_INSTEAD}"
                )
            raise UsageError(f"a second gradient for {kept.name!r}, whose update ran already: {_INSTEAD}")
        if not again:
            self.noticed("accumulation")
            self._require_declared(kept)
        kept.arrived_in = self.backwards.count
        self.fresh = True
        self.backwards.delivered = self.backwards.delivered or inside
        kept.used = False
        gradient = kept.laid_out(gradient)
        if self.mode == "fused" and not again and not kept.in_pieces and self.backwards.is_last():
            self.spill.spill(kept.name, gradient, add=True)
            self._stage_spilled(kept, (), self.scale)
        else:
            self.spill.spill(kept.name, gradient, add=True)

    def _require_declared(self, kept: Arrival) -> None:
        if self.mode == "fused":
            self.backwards.require_declared(kept.name)

    def _update(self, kept: Arrival, gradient: torch.Tensor) -> None:
        if isinstance(gradient, RowGradient):
            kept.found = gradient.measured(self._check)
            kept.spilled = False
            self._stage(kept, gradient, self.scale)
            return
        kept.found = self._measure(gradient)
        kept.spilled = False
        self._stage(kept, gradient, self.scale)

    def _measure(self, gradient: torch.Tensor) -> measures.Measure:
        return measures.measure(gradient, self._check)

    def _stage(self, kept: Arrival, gradient: torch.Tensor, scale: float) -> None:
        kept.options = self.rule.options(kept)
        self.rule.update(kept, gradient, scale)
        # Only now: an update that could not begin is no part of the step.
        kept.staged = True

    def _stage_spilled(self, kept: Arrival, factors: Sequence[float], scale: float) -> None:
        kept.options = self.rule.options(kept)
        self.rule.update_spilled(kept, factors, scale)
        kept.staged = True

    # --- the loop --------------------------------------------------------------------

    def _begins(self) -> None:
        """A backward begins."""
        if self.scaled_only and not self.scaling:
            raise UsageError("there is a loss scale: begin the backward by optimizer.backward(loss)")
        if self.backwards.count and self.mode == "fused" and self._all_dropped():
            # By p.grad = None, as model.zero_grad() does: the count begins again.
            self.backwards.count = 0

    def _all_dropped(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return not any(
                kept.handle is not None and kept.stands_in(kept.place.parameter.grad) for kept in self.kept.values()
            )

    def entered(self, module: torch.nn.Module) -> None:
        """A module of the model is entered."""
        self.backwards.entered()
        if in_reentrant_checkpoint():
            self._comes_in_pieces({id(parameter) for parameter in module.parameters()})

    def touched(self, places: Iterable[Place]) -> None:
        """Parameters are used outside of their modules."""
        if in_reentrant_checkpoint():
            self._comes_in_pieces({id(place.parameter) for place in places})

    def _comes_in_pieces(self, parameters: set[int]) -> None:
        # The backward of a reentrant checkpoint is one inside another. A gradient from outside of it, which may come
        # first, is not all of it.
        for kept in self.kept.values():
            if id(kept.place.parameter) in parameters:
                kept.in_pieces = True

    def noticed(self, what: str) -> None:
        """The loop does something that needs kept gradients."""
        self._noticed.add(what)

    # --- the step --------------------------------------------------------------------

    def present(self) -> list[tuple[Arrival, torch.Tensor]]:
        """The parameters that have a gradient now, and those gradients; what was taken away is dropped."""
        self.backwards.seen_outside()
        if self.backwards.failed:
            raise UsageError("the last backward failed, so this step would be a part of one; call zero_grad()")
        found = []
        self._measures.clear()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for kept in self.kept.values():
                gradient = kept.place.parameter.grad
                if kept.handle is not None and not kept.stands_in(gradient):
                    self._drop(kept)
                elif kept.staged and kept.handle is None:
                    # By a step that failed, from a gradient in memory, which may be another now.
                    self.spill.discard(kept.name)
                    kept.staged = False
                if gradient is not None:
                    found.append((kept, gradient))
                    if gradient is not kept.handle and not kept.is_seen(gradient):
                        self.fresh = True
        if not found:
            self.backwards.count = 0
        return found

    def update_all(self, present: Iterable[tuple[Arrival, torch.Tensor]], factor: float) -> None:
        """Begin every update that did not begin yet; none of those that did may have other options now."""
        for kept, gradient in present:
            if kept.staged:
                now = self.rule.options(kept)
                if now != kept.options:
                    raise UsageError(
                        f"options of {kept.name!r} changed between backward and step(), from {kept.options} to {now}: "
                        'its update ran already; change them after step(), or pass gradients="ssd"'
                    )
                continue
            if gradient is not kept.handle:
                self._stage_measured(kept, kept.laid_out(gradient), self.scale * factor)
                continue
            if not kept.spilled:
                raise UsageError(
                    f"the gradient of {kept.name!r} was used by the last step and is gone, and this one needs it: "
                    'call zero_grad() after each step, or pass gradients="ssd"'
                )
            factors = kept.handle.factors()
            if factors is None:
                self._stage_measured(kept, kept.handle.materialize(), self.scale * factor)
            else:
                self._stage_spilled(kept, factors, self.scale * factor)

    def _stage_measured(self, kept: Arrival, gradient: torch.Tensor, scale: float) -> None:
        self._stage(kept, gradient, scale)
        if kept.name not in self._measures:
            # While the engine's thread works: nobody writes to what it was given.
            self._measures[kept.name] = self._measure(gradient)

    def norm(self, present: Iterable[tuple[Arrival, torch.Tensor]]) -> float:
        """The norm of the gradients that the committed step used, unscaled and before `factor`, in double precision.

        Nothing is read for it: each was measured as it was handed on, written or used. What was done to one on storage
        by scalars, as clipping does, counts as a factor.
        """
        found: list[measures.Measure] = []
        for kept, gradient in present:
            measure = self._measures.get(kept.name)
            if measure is None and gradient is kept.handle and kept.spilled:
                bad, squared = self.spill.spilled(kept.name)
                factors = kept.handle.factors()
                assert factors is not None, "a gradient that was changed in memory was measured there"
                measure = (bad, squared * math.prod((*factors, *factors)))
            found.append(measure or kept.found or (False, 0.0))
        # In the order of the parameters, whichever gradient came first.
        return math.sqrt(sum(squared for _, squared in measures.read(found))) * abs(self.scale)

    def measured(self, present: Iterable[tuple[Arrival, torch.Tensor]]) -> tuple[bool, float]:
        """Whether all gradients are finite, and the norm of them all, unscaled, in double precision."""
        self.spill.finish()
        found: list[measures.Measure] = []
        for kept, gradient in present:
            if gradient is not kept.handle:
                found.append(self._measure(kept.laid_out(gradient)))
                self._measures[kept.name] = found[-1]
            elif kept.spilled and kept.handle.operations:
                found.append(self._measure(kept.handle.materialize()))
                self._measures[kept.name] = found[-1]
            elif kept.spilled:
                found.append(self.spill.spilled(kept.name))
            else:
                found.append(kept.found or (False, 0.0))
        finite, squared = True, 0.0
        for bad, square in measures.read(found):
            finite = finite and not bad
            squared += square
        return finite, math.sqrt(squared) * abs(self.scale)

    def committed(self, present: Iterable[tuple[Arrival, torch.Tensor]]) -> list[str]:
        """The step is committed; the names of the parameters that it updated."""
        updated = []
        for kept in self.kept.values():
            if kept.staged:
                updated.append(kept.name)
                kept.staged = False
                kept.step += 1
                kept.used = True
        for kept, gradient in present:
            if gradient is not kept.handle:
                kept.seen = (weakref.ref(gradient), gradient._version)  # noqa: SLF001
        self.fresh = False
        self.backwards.count = 0
        return updated

    def learn(self) -> str | None:
        """After the first step: what the loop needs; the words for the log, once."""
        if not self.learning:
            return None
        self.learning = False
        needs = self._keeps or bool(self._noticed)
        self.mode = "ssd" if needs else "fused"
        if needs:
            why = ", ".join(sorted(self._noticed)) or "a declared max_grad_norm or accumulation_steps"
            return f'gradients="auto": kept on storage until step() ("ssd"), because of {why}'
        return 'gradients="auto": updated as they appear ("fused") from the second step on'

    def skip(self) -> None:
        """Forget what was staged; gradients stay where they are."""
        self.spill.discard()
        for kept in self.kept.values():
            kept.used = kept.used or kept.staged
            kept.staged = False
        self.fresh = False
        self.backwards.count = 0

    # --- the end ----------------------------------------------------------------------

    def _drop(self, kept: Arrival) -> None:
        if kept.staged:
            self.spill.discard(kept.name)
        if kept.spilled:
            self.spill.drop_spilled(kept.name)
        if kept.handle is not None:
            kept.handle.gradient.drop()
        kept.handle = None
        kept.staged = kept.spilled = kept.used = False

    def clear(self) -> None:
        """Drop everything: staged updates, kept gradients, handles."""
        self.backwards.seen_outside()
        if self.fresh or self.backwards.failed or any(kept.staged for kept in self.kept.values()):
            self.spill.discard()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for kept in self.kept.values():
                kept.staged = False
                self._drop(kept)
                kept.place.parameter.grad = None
        self.backwards.failed = False
        self.fresh = False
        self.backwards.count = 0

    def zero(self) -> None:
        """Leave zeros, as `zero_grad(set_to_none=False)` does."""
        self.backwards.seen_outside()
        self.noticed("zero_grad(set_to_none=False)")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            gradients = [(kept, kept.place.parameter.grad) for kept in self.kept.values()]
        for kept, gradient in gradients:
            if gradient is None:
                continue
            in_memory = not kept.stands_in(gradient)
            if not in_memory and not kept.spilled:
                raise UsageError(
                    'zero_grad(set_to_none=False) would leave zeros where an update ran already: pass gradients="ssd"'
                )
            if kept.staged:
                self.spill.discard(kept.name)
                kept.staged = False
            if in_memory:
                gradient.detach_()
            gradient.zero_()
            # A step would apply the zeros: moments decay, weights too.
            self.fresh = True
        self.backwards.count = 0
        self.backwards.failed = False

    def unwatch(self) -> None:
        """Let go of the parameters."""
        for kept in self._of.values():
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                hooks: Any = kept.place.parameter._post_accumulate_grad_hooks  # noqa: SLF001
            if hooks is not None:
                hooks.pop(_KEY, None)
        self._of.clear()


class _Hooks(dict[Any, Any]):
    """A parameter's hooks, as torch's own table of them but smaller: a model has thousands of parameters."""

    __slots__ = ("__weakref__",)


def _hook(parameter: Any, hook: Any) -> None:
    """Have a hook called when a gradient was accumulated, without the handle that torch would make."""
    if parameter._post_accumulate_grad_hooks is None:  # noqa: SLF001
        parameter._post_accumulate_grad_hooks = _Hooks()  # noqa: SLF001
    parameter._post_accumulate_grad_hooks[_KEY] = hook  # noqa: SLF001
