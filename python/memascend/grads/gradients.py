"""Routes gradients: used in the backward ("fused"), or held until step() on storage ("ssd") or in memory ("ram")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import UsageError
from memascend.grads.gradient import State

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from memascend.grads.backward import Arrivals
    from memascend.grads.gradient import Gradient

    # Gradients, each with what stands in `p.grad`.
    Present = Sequence[tuple[Gradient, torch.Tensor]]


class Gradients:
    """Carries out step() and zero_grad() for all gradients.

    Attributes:
        by_name: the gradients, by the names of their parameters, in the order of the parameters.
        rule: the arithmetic of an update.
    """

    def __init__(self, arrivals: Arrivals, held: Container[str] = ()) -> None:
        """`held` are the names of parameters whose gradients wait in memory, which holds one of each."""
        self._held = held
        self.rule = arrivals.rule
        self._engine = arrivals.engine
        self._scale = arrivals.scale
        self._loop = arrivals.loop
        self._norms = arrivals.norms
        self._arrivals = arrivals
        self.by_name = self._arrivals.by_name
        self.learn = self._loop.learn
        self.noticed = self._loop.notice
        self.entered = self._arrivals.entered
        self.touched = self._arrivals.touched
        self.heard_parts = self._arrivals.heard_parts
        self.watch = self._arrivals.watch
        self.unwatch = self._arrivals.unwatch
        self.scaled = self._arrivals.scaled
        # The step that is made uses gradients as they arrived.
        self._unchanged = False

    @property
    def mode(self) -> str:
        """How gradients wait for step(): "fused" (they do not), "ssd" or "ram"."""
        return self._loop.mode

    def is_staged(self) -> bool:
        """Whether something arrived or is staged that no step has used."""
        return self._arrivals.fresh or self.has_updates

    @property
    def has_updates(self) -> bool:
        """Whether an update of a step that is not committed has begun."""
        return any(gradient.state.staged for gradient in self.by_name.values())

    # --- the step --------------------------------------------------------------------

    def present(self) -> Present:
        """The present gradients and their values in `p.grad`; a gradient whose handle was removed is dropped."""
        backwards = self._arrivals.backwards
        backwards.seen_outside()
        self._arrivals.require_no_failure()
        self._norms.begin_step()
        found = []
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for gradient in self.by_name.values():
                values = gradient.place.parameter.grad
                if gradient.handle is not None and not gradient.stands_in(values):
                    gradient.drop()
                elif gradient.state is State.MEMORY_STAGED:
                    # By a step that failed, from a gradient in memory, which may be another now.
                    gradient.unstage()
                gradient.require_unwritten()
                if values is not None:
                    found.append((gradient, values))
                    if values is not gradient.handle and not gradient.is_used(values):
                        self._arrivals.note_change()
        if not found:
            backwards.restart()
            return found
        there = {gradient.name for gradient, _ in found}
        for gradient in self.by_name.values():
            if gradient.name not in there and self.rule.takes_zeros(gradient):
                place = gradient.place
                # Without memory: they are laid out when their turn comes.
                zeros = torch.zeros((), dtype=gradient.dtype, device="cpu").expand(place.shape)
                found.append((gradient, zeros))
        return found

    def update_all(self, present: Present, factor: float) -> None:
        """Begin every update that has not begun yet, and repeat early updates that would be different now.

        The options of an update that has begun for good must not have changed.
        """
        self._unchanged = factor == 1.0
        # Parameters of a group share their options: they are looked at once.
        now: dict[tuple[int, int], Any] = {}
        for gradient, values in present:
            if gradient.state.begun:
                shared = gradient.group, id(gradient.options)
                if shared not in now:
                    now[shared] = self.rule.options(gradient)
                if self._stays(gradient, now[shared], factor):
                    continue
                gradient.take_back()
            if values is not gradient.handle:
                self._stage(gradient, gradient.laid_out(values), factor)
                continue
            if gradient.state is State.SPENT:
                raise UsageError(
                    f"the gradient of {gradient.name!r} was used by the last step and is gone, and this one needs it: "
                    'call zero_grad() after each step, or pass gradients="ssd"'
                )
            factors = gradient.handle.gradient.factors()
            self._unchanged = self._unchanged and not gradient.is_changed
            if factors is not None:
                gradient.stage_stored(factors, factor)
                continue
            changed = gradient.handle.gradient.materialize()
            if gradient.name in self._held:
                # In place of the gradient that it was made of: memory is planned for one of them.
                gradient.handle.gradient.assign(changed)
                gradient.stage_stored((), factor)
                self._norms.measure_once(gradient, changed)
            else:
                self._stage(gradient, changed, factor)

    def _stays(self, gradient: Gradient, now: Any, factor: float) -> bool:
        """Whether the update that has begun is the step's, now that the options and the factor are known."""
        is_same = bool(now == gradient.options)
        if gradient.state is State.EARLY:
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
        gradient.stage(values, factor)
        # While the engine's thread works: its gradient is not written to.
        self._norms.measure_once(gradient, values)

    def measured(self, present: Present) -> tuple[bool, float]:
        """Before the updates: whether all gradients are finite, and their norm, unscaled, in double precision."""
        self._engine.drain()
        for gradient, values in present:
            if values is not gradient.handle:
                self._norms.measure_once(gradient, gradient.laid_out(values))
            elif gradient.state.stored and gradient.handle.gradient.operations:
                self._norms.measure_once(gradient, gradient.handle.gradient.materialize())
        finite, norm = self._norms.of(present)
        return finite, norm * abs(self._scale.inverse)

    def norm(self, present: Present) -> float:
        """After the updates: the norm of the gradients that they used, before `factor`; nothing is read for it."""
        return self._norms.of(present)[1] * abs(self._scale.inverse)

    def committed(self, present: Present) -> list[str]:
        """The step is committed; the names of the parameters that it updated."""
        updated = []
        for gradient in self.by_name.values():
            if gradient.state.staged:
                gradient.commit()
                updated.append(gradient.name)
        for gradient, values in present:
            if values is not gradient.handle:
                gradient.note_used(values)
        self._arrivals.note_step(unchanged=self._unchanged)
        return updated

    def skip(self) -> None:
        """Discard staged updates; gradients stay where they are."""
        self._engine.discard()
        for gradient in self.by_name.values():
            if gradient.state.begun:
                gradient.skip()
        self._arrivals.note_step(unchanged=False)

    def take_back(self) -> None:
        """Discard updates that began early: storage is about to change otherwise, and nothing may be staged by then.

        Their gradients stay for step(), and no further updates begin before it.
        """
        self._arrivals.speculation.pause()
        for gradient in self.by_name.values():
            gradient.take_back()

    # --- the end ----------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything: staged updates, gradients on storage, handles."""
        self._arrivals.backwards.seen_outside()
        self._arrivals.drop_all()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for gradient in self.by_name.values():
                gradient.place.parameter.grad = None

    def zero(self) -> None:
        """Leave zeros, as `zero_grad(set_to_none=False)` does."""
        backwards = self._arrivals.backwards
        backwards.seen_outside()
        self._loop.notice("zero_grad(set_to_none=False)")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            grads = [(gradient, gradient.place.parameter.grad) for gradient in self.by_name.values()]
        present = [(gradient, values) for gradient, values in grads if values is not None]
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
            self._arrivals.note_change()
        backwards.forget_failure()
