"""Gradients: used as they appear ("fused"), or kept until step() on storage ("ssd") or in memory ("ram").

Backward stages, step() commits, zero_grad() discards. What stands in `p.grad` meanwhile is the record of truth: step()
skips a parameter whose gradient is None and uses one that the user assigned.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.errors import UsageError
from memascend.handles import GradientHandle, Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend.placeholder import Place

__all__ = ["Arrival", "Gradients", "Rule"]

_WORDS: dict[Notice, str] = {
    "add": "accumulation",
    "change": "a change of gradients, as by clipping",
    "norm": "a norm of gradients",
    "read": "a read of gradients",
    "scaler": "a GradScaler",
    "zero": "zero_grad(set_to_none=False)",
}
# The gradient's own, and the one that asks.
_STORAGE_USES = 2
_INSTEAD = 'pass accumulation_steps= to offload(), or gradients="ssd"'


class Spill(Protocol):
    """Where gradients wait: the part of the engine that is used here."""

    def spill(self, name: str, gradient: torch.Tensor, *, add: bool = False) -> None:
        """Write a gradient, or add it to the one that is there."""

    def spilled(self, name: str) -> tuple[bool, float]:
        """Whether it has a value that is not finite, and its squared norm."""

    def read_spilled(self, name: str, into: torch.Tensor) -> None:
        """Read it."""

    def drop_spilled(self, name: str) -> None:
        """Forget it."""

    def finish(self) -> None:
        """Wait for all that is queued."""

    def discard(self, name: str | None = None) -> None:
        """Forget what is staged."""


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


class Arrival:
    """The gradient of one parameter, from its arrival until it is dropped. What a handle stands on."""

    __slots__ = (
        "__weakref__",
        "_owner",
        "arrived_in",
        "finite",
        "group",
        "handle",
        "in_pieces",
        "name",
        "options",
        "place",
        "seen",
        "spilled",
        "squared",
        "staged",
        "step",
        "used",
    )

    def __init__(self, owner: Gradients, place: Place, group: int, step: int) -> None:
        self._owner = owner
        self.place = place
        self.name = place.name
        self.group = group
        # Updates that are committed.
        self.step = step
        self.handle: GradientHandle | None = None
        # An update is staged and not committed.
        self.staged = False
        # A committed step has used it, and no gradient came since.
        self.used = False
        self.spilled = False
        self.options: Any = None
        self.finite = True
        self.squared = 0.0
        self.arrived_in = -1
        # The gradient in memory that a step has used (which may be gone, and another be where it was), and its version.
        self.seen: tuple[weakref.ref[torch.Tensor], int] | None = None
        # It comes in several pieces in one backward (nested graph tasks), so it is never updated as it appears.
        self.in_pieces = False

    # --- what handles ask ---------------------------------------------------------

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
        return self.staged or not self.spilled

    def read(self) -> torch.Tensor:
        """A copy of it."""
        into = torch.empty_strided(self.place.shape, self.place.stride, dtype=self.dtype)
        self._owner.spill.read_spilled(self.name, into)
        return into

    def add(self, gradient: torch.Tensor) -> None:
        """More of it came."""
        self._owner.added(self, gradient)

    def assign(self, gradient: torch.Tensor) -> None:
        """It is another one now."""
        self._owner.spill.spill(self.name, gradient)
        self._owner.fresh = True

    def norm(self) -> float:
        """Its 2-norm, in double precision."""
        return math.sqrt(self._owner.spill.spilled(self.name)[1] if self.spilled else self.squared)

    def nonfinite(self) -> bool:
        """Whether it has a value that is not finite."""
        if self.spilled:
            return self._owner.spill.spilled(self.name)[0]
        return not self.finite

    def noticed(self, what: Notice) -> None:
        """Somebody looked at it, or changed it. A second piece of it is told from accumulation in `added`."""
        if what != "add":
            self._owner.noticed(_WORDS[what])


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
        self._accumulation_steps = accumulation_steps
        self._keeps = keeps
        self.kept: dict[str, Arrival] = {}
        # Multiplies every gradient: the inverse of the loss scale.
        self.scale = 1.0
        # A backward must be begun by optimizer.backward(), and was.
        self.scaled_only = False
        self.scaling = False
        # Something arrived since the last step.
        self.fresh = False
        self.backwards = 0
        self._task: int | None = None
        self._thread = 0
        # The backward that is open brought a gradient.
        self._delivered = False
        self._failed = False
        self._noticed: set[str] = set()
        self._hooks: list[Any] = []
        # Hears of each gradient that was handed on: its name, its bytes, and when that began.
        self.on_arrived: Callable[[str, int, float], None] | None = None

    # --- arrival -------------------------------------------------------------------

    def watch(self, place: Place, group: int, step: int) -> Arrival:
        """Take charge of a parameter's gradients."""
        kept = self.kept[place.name] = Arrival(self, place, group, step)
        # torch keeps the hook where Python's collector does not look: it must not lead back to the parameter.
        weak = weakref.ref(self)
        name, nbytes = place.name, place.nan.nbytes

        def arrived(parameter: torch.Tensor) -> None:
            gradients = weak()
            if gradients is not None:
                gradients._heard(name, nbytes, parameter)  # noqa: SLF001

        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            frozen = not place.parameter.requires_grad
            # One that is frozen now may thaw later, and torch takes no hook of it.
            place.parameter.requires_grad_(True)
            self._hooks.append(place.parameter.register_post_accumulate_grad_hook(arrived))
            place.parameter.requires_grad_(not frozen)
        return kept

    def _heard(self, name: str, nbytes: int, parameter: torch.Tensor) -> None:
        """A gradient was accumulated."""
        began = time.perf_counter()
        kept = self.kept[name]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            gradient = parameter.grad
            if gradient is not None and not self._is_kept(kept, gradient):
                self._arrived(kept, parameter, gradient)
            elif gradient is not None:
                self.enter_backward()
        if self.on_arrived is not None:
            self.on_arrived(name, nbytes, began)

    def _arrived(self, kept: Arrival, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient came where there was none."""
        nested = self.enter_backward()
        if kept.handle is not None:
            # The handle was taken away: what stood behind it is dropped.
            self._drop(kept)
        kept.arrived_in = self.backwards
        self.fresh = True
        self._delivered = True
        self._require_declared(kept)
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
        gradient = self.dense(kept, gradient)
        if self.mode == "fused" and not nested and not kept.in_pieces and self._is_last_backward():
            self._update(kept, gradient)
        else:
            kept.in_pieces = kept.in_pieces or nested
            self.spill.spill(kept.name, gradient)
            kept.spilled = True
        kept.used = False
        # torch's `grad` is an edge that Python's collector does not see: what stands in it must not lead back here.
        kept.handle = GradientHandle(weakref.proxy(kept), strides=kept.place.stride)
        parameter.grad = kept.handle

    def added(self, kept: Arrival, gradient: torch.Tensor) -> None:
        """A gradient came where there is one."""
        inside = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        if inside:
            self.enter_backward()
        again = kept.arrived_in == self.backwards and inside
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
        kept.arrived_in = self.backwards
        self.fresh = True
        self._delivered = self._delivered or inside
        kept.used = False
        gradient = self.dense(kept, gradient)
        if self.mode == "fused" and not again and not kept.in_pieces and self._is_last_backward():
            self.spill.spill(kept.name, gradient, add=True)
            self._stage_spilled(kept, (), self.scale)
        else:
            self.spill.spill(kept.name, gradient, add=True)

    def _require_declared(self, kept: Arrival) -> None:
        """More backwards than were declared would make a step that is none of the loop's."""
        declared = self._accumulation_steps
        if self.mode == "fused" and 1 < declared <= self.backwards:
            raise UsageError(
                f"backward {self.backwards + 1} of a step of {declared}, for {kept.name!r}: accumulation_steps= says "
                'how many make a step; pass another number, or gradients="ssd", which takes any'
            )

    def _is_last_backward(self) -> bool:
        return (self.backwards + 1) % self._accumulation_steps == 0

    def _update(self, kept: Arrival, gradient: torch.Tensor) -> None:
        bad, kept.squared = self._measure(gradient)
        kept.finite = not bad
        kept.spilled = False
        self._stage(kept, gradient, self.scale)

    def _measure(self, gradient: torch.Tensor) -> tuple[bool, float]:
        """Whether a gradient in memory has a value that is not finite, and its squared norm."""
        found, squared = self._check(gradient.coalesce().values() if gradient.is_sparse else gradient)
        return bool(found), float(squared)

    def _stage(self, kept: Arrival, gradient: torch.Tensor, scale: float) -> None:
        kept.options = self.rule.options(kept)
        self.rule.update(kept, gradient, scale)
        # Only now: an update that could not begin is no part of the step.
        kept.staged = True

    def _stage_spilled(self, kept: Arrival, factors: Sequence[float], scale: float) -> None:
        kept.options = self.rule.options(kept)
        self.rule.update_spilled(kept, factors, scale)
        kept.staged = True

    @staticmethod
    def dense(kept: Arrival, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient laid out as its parameter is stored."""
        if isinstance(gradient, GradientHandle):
            gradient = gradient.materialize()
        gradient = gradient.detach()
        if gradient.is_sparse:
            return gradient
        if tuple(gradient.stride()) != kept.place.stride and gradient.numel() > 1:
            gradient = torch.empty_strided(kept.place.shape, kept.place.stride, dtype=gradient.dtype).copy_(gradient)
        return gradient

    # --- which backward it is ---------------------------------------------------------

    def enter_backward(self) -> bool:
        """Note that a backward runs; whether this is one inside another."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if task == -1:
            return False
        if self._task is None:
            if self._failed:
                raise UsageError("the last backward failed; call zero_grad() before the next one")
            if self.scaled_only and not self.scaling:
                raise UsageError("there is a loss scale: begin the backward by optimizer.backward(loss)")
            if self.backwards and self.mode == "fused" and self._all_dropped():
                # By p.grad = None, as model.zero_grad() does: the count begins again.
                self.backwards = 0
            self._task = task
            self._thread = threading.get_ident()
            self._delivered = False
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # noqa: SLF001
        return task != self._task

    def _backward_ended(self) -> None:
        self._task = None
        # One that asked for gradients of something else is none.
        self.backwards += self._delivered

    def _all_dropped(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return not any(
                kept.handle is not None and self._is_kept(kept, kept.place.parameter.grad)
                for kept in self.kept.values()
            )

    def entered(self) -> None:
        """The model is entered; by another thread than the one that has a backward open, this says nothing of it."""
        if self._task is None or self._thread == threading.get_ident():
            self.seen_outside()

    def seen_outside(self) -> None:
        """A backward that is still open, seen from outside, failed."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            self.enter_backward()
        elif self._task is not None:
            self._task = None
            self._failed = True

    def noticed(self, what: str) -> None:
        """The loop does something that needs kept gradients."""
        self._noticed.add(what)

    # --- the step --------------------------------------------------------------------

    def present(self) -> list[tuple[Arrival, torch.Tensor]]:
        """The parameters that have a gradient now, and those gradients; what was taken away is dropped."""
        self.seen_outside()
        if self._failed:
            raise UsageError("the last backward failed, so this step would be a part of one; call zero_grad()")
        found = []
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for kept in self.kept.values():
                gradient = kept.place.parameter.grad
                if kept.handle is not None and not self._is_kept(kept, gradient):
                    self._drop(kept)
                elif kept.staged and kept.handle is None:
                    # By a step that failed, from a gradient in memory, which may be another now.
                    self.spill.discard(kept.name)
                    kept.staged = False
                if gradient is not None:
                    found.append((kept, gradient))
                    if gradient is not kept.handle and not _is_seen(kept, gradient):
                        self.fresh = True
        if not found:
            self.backwards = 0
        return found

    @staticmethod
    def _is_kept(kept: Arrival, gradient: torch.Tensor | None) -> bool:
        """Whether p.grad is the handle, or another tensor of the same gradient, which then is the handle."""
        if gradient is kept.handle:
            return True
        if (
            kept.handle is None
            or not isinstance(gradient, GradientHandle)
            or gradient.gradient is not kept.handle.gradient
        ):
            return False
        kept.handle = gradient
        return True

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
                self._stage(kept, self.dense(kept, gradient), self.scale * factor)
                continue
            if not kept.spilled:
                raise UsageError(
                    f"the gradient of {kept.name!r} was used by the last step and is gone, and this one needs it: "
                    'call zero_grad() after each step, or pass gradients="ssd"'
                )
            factors = kept.handle.factors()
            if factors is None:
                self._stage(kept, kept.handle.materialize(), self.scale * factor)
            else:
                self._stage_spilled(kept, factors, self.scale * factor)

    def measured(self, present: Iterable[tuple[Arrival, torch.Tensor]]) -> tuple[bool, float]:
        """Whether all gradients are finite, and the norm of them all, unscaled, in double precision."""
        self.spill.finish()
        finite, squared = True, 0.0
        for kept, gradient in present:
            if gradient is not kept.handle:
                bad, square = self._measure(self.dense(kept, gradient))
            elif kept.spilled and kept.handle.operations:
                bad, square = self._measure(kept.handle.materialize())
            elif kept.spilled:
                bad, square = self.spill.spilled(kept.name)
            else:
                bad, square = not kept.finite, kept.squared
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
        self.backwards = 0
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
        self.backwards = 0

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
        self.seen_outside()
        if self.fresh or self._failed or any(kept.staged for kept in self.kept.values()):
            self.spill.discard()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for kept in self.kept.values():
                kept.staged = False
                self._drop(kept)
                kept.place.parameter.grad = None
        self._failed = False
        self.fresh = False
        self.backwards = 0

    def zero(self) -> None:
        """Leave zeros, as `zero_grad(set_to_none=False)` does."""
        self.seen_outside()
        self.noticed("zero_grad(set_to_none=False)")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            gradients = [(kept, kept.place.parameter.grad) for kept in self.kept.values()]
        for kept, gradient in gradients:
            if gradient is None:
                continue
            in_memory = not self._is_kept(kept, gradient)
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
        self.backwards = 0
        self._failed = False

    def unwatch(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _is_seen(kept: Arrival, gradient: torch.Tensor) -> bool:
    """Whether a step has used this gradient in memory, which nobody wrote to since."""
    return kept.seen is not None and kept.seen[0]() is gradient and kept.seen[1] == gradient._version  # noqa: SLF001
