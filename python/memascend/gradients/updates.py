"""Begins the updates of single parameters: Adam in the engine, or a run of the optimizer's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.engine import decode_state, master_of
from memascend.errors import UsageError
from memascend.optimizers import generic
from memascend.optimizers.clone import group_options
from memascend.optimizers.rehearsals import Rehearsals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend.engine import Adam, Chunk, Engine, Late, Momentum, Store
    from memascend.gradients.gradient import Gradient
    from memascend.optimizers.state_layout import StateLayout
    from memascend.optimizers.update_rule import Arithmetic

_AS_IT_COMES = generic.Given()


class Updates:
    """The arithmetic of a run's optimizer at work, on an engine."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        engine: Engine,
        store: Store,
        values: Callable[[Gradient], torch.Tensor | None],
    ) -> None:
        """`values` gives the values of a parameter where they are resident."""
        self._arithmetic = arithmetic
        self._engine = engine
        self._store = store
        self._values = values
        self._groups = arithmetic.optimizer.param_groups
        # The last ones of each group: parameters whose options are equal share them.
        self._options: dict[int, dict[str, Any]] = {}
        self._rehearsals = Rehearsals(arithmetic.optimizer)

    def _layout(self, kept: Gradient) -> StateLayout | None:
        return self._arithmetic.layouts[id(kept.place.parameter)]

    def _group(self, kept: Gradient) -> dict[str, Any]:
        if kept.group >= len(self._groups):
            raise UsageError(
                f"optimizer.param_groups has lost the group of {kept.name!r}, which it had at offload(): put it back "
                "and call zero_grad(); freeze parameters with requires_grad_(False)"
            )
        return self._groups[kept.group]

    def _run(
        self, kept: Gradient, layout: StateLayout, given: generic.Given = _AS_IT_COMES, method: str = "step"
    ) -> tuple[Callable[[Chunk], None], Late]:
        """A run of the optimizer's own code on one parameter, and when it may be called."""
        group, is_first = self._group(kept), kept.step == 0
        function = generic.Update(
            self._arithmetic.optimizer,
            group,
            layout,
            given,
            first=is_first,
            method=method,
            ended=self._arithmetic.shared.ended(kept.name, kept.group),
        )
        return self._rehearsals.followed(function, group, kept.dtype, is_first, given.gradient is not None)

    def _own_numbers(self, kept: Gradient, step: int, scale: float) -> Adam | Momentum | None:
        """The numbers of an update on the engine, of state as its optimizer keeps it; None where that runs itself."""
        first = kept.step == 0
        options = self._arithmetic.own_options(self._group(kept), kept.place.parameter, first=first)
        return None if options is None else self._arithmetic.numbers(options, step, scale)

    def options(self, kept: Gradient) -> dict[str, Any]:
        """The options that an update of this parameter would use now."""
        group = self._group(kept)
        if self._layout(kept) is not None:
            return group_options(group)
        options = self._arithmetic.rust_options(group, kept.place.parameter)
        if options is None:
            raise UsageError(
                f"the options of {kept.name!r} now need other state than it has (amsgrad, say): set them before "
                "offload()"
            )
        if self._options.get(kept.group) != options:
            self._options[kept.group] = options
        return self._options[kept.group]

    def update(self, kept: Gradient, gradient: torch.Tensor, scale: float) -> None:
        """Begin the update by a gradient in memory, multiplied by `scale`."""
        layout = self._layout(kept)
        step = kept.step + 1
        if layout is None:
            if gradient.is_sparse:
                raise UsageError(
                    f"{type(self._arithmetic.optimizer).__name__} does not support sparse gradients, and {kept.name!r} "
                    "has one; use SparseAdam or SGD, or an embedding without sparse=True"
                )
            numbers = self._arithmetic.numbers(kept.options, step, scale)
            self._engine.update(kept.name, gradient, numbers, values=self._values(kept))
            return
        own = None if gradient.is_sparse else self._own_numbers(kept, step, scale)
        if own is not None:
            self._engine.update(kept.name, gradient, own, values=self._values(kept))
            return
        # Its rows are few, and looked up by the engine's thread.
        sparse = gradient.cpu() if gradient.is_sparse else None
        function, late = self._run(kept, layout, generic.Given(gradient=sparse, grad_scale=scale))
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        whole = layout.whole or sparse is not None
        self._engine.apply(kept.name, function, step=step, gradient=dense, whole=whole, late=late)

    def update_spilled(self, kept: Gradient, factors: Sequence[float], scale: float) -> None:
        """Begin the update by the gradient that was spilled."""
        layout = self._layout(kept)
        step = kept.step + 1
        if layout is None:
            numbers = self._arithmetic.numbers(kept.options, step, scale)
            self._engine.update_spilled(kept.name, numbers, factors=factors)
            return
        own = self._own_numbers(kept, step, scale)
        if own is not None:
            self._engine.update_spilled(kept.name, own, factors=factors)
            return
        function, late = self._run(kept, layout, generic.Given(factors=tuple(factors), grad_scale=scale))
        self._engine.apply(kept.name, function, step=step, whole=layout.whole, late=late)

    def switch(self, mode: str, parameters: Iterable[Gradient]) -> list[str]:
        """Stage what `train()` or `eval()` of the optimizer does to its parameters; the names of those."""
        begun = []
        for kept in parameters:
            layout = self._layout(kept)
            if kept.step == 0 or layout is None:
                # Before its first step there is nothing to do, which offload() has tried.
                continue
            # The engine wants a gradient; nothing reads it, and what is not written takes no memory.
            unread = torch.empty_strided(kept.place.shape, kept.place.stride, dtype=kept.dtype, device="cpu")
            function, late = self._run(kept, layout, method=mode)
            self._engine.apply(kept.name, function, step=kept.step, gradient=unread, whole=layout.whole, late=late)
            begun.append(kept.name)
        return begun

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

        self._engine.apply(name, function, step=step, gradient=values)

    def state(self, kept: Gradient) -> dict[str, torch.Tensor]:
        """A copy of the state, by torch's names, and the master."""
        values, state = self._store.read(kept.name)
        layout = self._layout(kept)
        if layout is not None:
            master = {"master": state.pop("master", values)}
            if kept.step == 0:
                return master
            return {**generic.export_state(layout, state), **master}
        given = self._arithmetic.format_of(kept.place.parameter)
        whole = master_of(values, state) if given is None else decode_state(values, state, given)
        master = {"master": whole.pop("master")}
        if kept.step == 0:
            return master
        if "momentum_buffer" in whole:
            # SGD counts no steps.
            return {**whole, **master}
        return {"step": torch.tensor(float(kept.step), dtype=torch.float32, device="cpu"), **whole, **master}
