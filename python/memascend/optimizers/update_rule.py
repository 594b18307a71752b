"""Chooses how each parameter is updated: Adam in the engine, or the optimizer's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend.engine import Adam, master_of
from memascend.errors import UsageError
from memascend.optimizers import generic
from memascend.optimizers.adoption import Adoption
from memascend.optimizers.clone import group_options
from memascend.optimizers.state_layout import describe
from memascend.optimizers.state_trials import StateTrials
from memascend.pages import whole_pages
from memascend.residency.placeholder import dense_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend.engine import Chunk, Engine, Store
    from memascend.gradients.gradient import Gradient
    from memascend.optimizers.state_layout import StateLayout

__all__ = ["Arithmetic", "Updates"]

_AS_IT_COMES = generic.Given()


class Arithmetic:
    """What has to be known of an optimizer's parameters before there is a store.

    Args:
        optimizer: the original.
        master_dtype: of the copies that 16-bit parameters are updated in, or None.
        sparse: the ids of parameters whose gradients may be sparse: those are updated whole.

    Raises:
        ConfigError: the optimizer cannot be streamed; the message says why.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None, sparse: frozenset[int] = frozenset()
    ) -> None:
        # What its steps change for all parameters alike.
        self.shared = Adoption(optimizer, generic.require_streamable(optimizer, master_dtype))
        self.optimizer = optimizer
        self.master_dtype = master_dtype
        self._sparse = sparse
        # By parameter: what torch's own code keeps of it; None where Adam runs on the engine.
        self.layouts: dict[int, StateLayout | None] = {}
        trials = StateTrials(optimizer)
        for group in optimizer.param_groups:
            for parameter in filter(torch.is_floating_point, group["params"]):
                rust = self.rust_options(group, parameter.dtype)
                layout = None if rust is not None else describe(optimizer, parameter, master_dtype, trials)
                self.layouts[id(parameter)] = layout

    def rust_options(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Any] | None:
        """The numbers of an update on the engine; None where torch's own code has to run."""
        return generic.rust_options(self.optimizer, group, dtype=dtype, master_dtype=self.master_dtype)

    def describe(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors of a parameter, on meta."""
        layout = self.layouts[id(parameter)]
        if layout is not None:
            return dict(layout.tensors)
        moments = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        masters = {torch.float32: {}, torch.bfloat16: {"rest": torch.int16}, torch.float16: {"master": torch.float32}}
        strides = dense_strides(parameter)
        return {
            name: torch.empty_strided(parameter.shape, strides, dtype=dtype, device="meta")
            for name, dtype in {**masters[parameter.dtype], **moments}.items()
        }

    def initial(self, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """The state that the optimizer has already, and how many updates made it."""
        layout = self.layouts[id(parameter)]
        if layout is not None:
            return generic.import_state(self.optimizer, parameter, layout)
        state = self.optimizer.state.get(parameter) or {}
        strides = dense_strides(parameter)
        found = {}
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                found[name] = torch.empty_strided(parameter.shape, strides, dtype=torch.float32).copy_(state[name])
        if found and parameter.dtype != torch.float32:
            found["master"] = torch.empty_strided(parameter.shape, strides, dtype=torch.float32).copy_(parameter)
        return found, int(state.get("step", 0))

    @property
    def whole_bytes(self) -> int:
        """Memory for the largest parameter that is updated whole."""
        whole = [
            layout.whole_bytes
            for parameter, layout in self.layouts.items()
            if layout is not None and (layout.whole or parameter in self._sparse)
        ]
        # Its tensors begin on lines of the cache.
        return whole_pages(max(whole) + 64 * 16) if whole else 0

    @property
    def update_values(self) -> Literal["resident", "read", "never"]:
        """Whether updates need the values, for the plan: "resident", "read" or "never"."""
        rust = {
            parameter.dtype
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if self.layouts.get(id(parameter), parameter) is None
        }
        if any(layout is not None for layout in self.layouts.values()):
            return "read"
        if torch.bfloat16 in rust or torch.float32 in rust:
            return "resident"
        return "never"


class Updates:
    """The arithmetic at work, on an engine; see `gradients.Rule`."""

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

    def _layout(self, kept: Gradient) -> StateLayout | None:
        return self._arithmetic.layouts[id(kept.place.parameter)]

    def _run(
        self, kept: Gradient, layout: StateLayout, given: generic.Given = _AS_IT_COMES, method: str = "step"
    ) -> Callable[[Chunk], None]:
        """A run of the optimizer's own code on one parameter."""
        return generic.update(
            self._arithmetic.optimizer,
            self._groups[kept.group],
            layout,
            given,
            first=kept.step == 0,
            method=method,
            ended=self._arithmetic.shared.ended(kept.name, kept.group),
        )

    def options(self, kept: Gradient) -> dict[str, Any]:
        """The options that an update of this parameter would use now."""
        group = self._groups[kept.group]
        if self._layout(kept) is not None:
            return group_options(group)
        options = self._arithmetic.rust_options(group, kept.place.dtype)
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
            values = self._values(kept)
            numbers = Adam(step=step, grad_scale=scale, **kept.options)
            self._engine.update(kept.name, gradient, numbers, values=values)
            return
        # Its rows are few, and looked up by the engine's thread.
        sparse = gradient.cpu() if gradient.is_sparse else None
        function = self._run(kept, layout, generic.Given(gradient=sparse, grad_scale=scale))
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        self._engine.apply(kept.name, function, step=step, gradient=dense, whole=layout.whole or sparse is not None)

    def update_spilled(self, kept: Gradient, factors: Sequence[float], scale: float) -> None:
        """Begin the update by the gradient that was spilled."""
        layout = self._layout(kept)
        step = kept.step + 1
        if layout is None:
            numbers = Adam(step=step, grad_scale=scale, **kept.options)
            self._engine.update_spilled(kept.name, numbers, factors=factors)
            return
        function = self._run(kept, layout, generic.Given(factors=tuple(factors), grad_scale=scale))
        self._engine.apply(kept.name, function, step=step, whole=layout.whole)

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
            function = self._run(kept, layout, method=mode)
            self._engine.apply(kept.name, function, step=kept.step, gradient=unread, whole=layout.whole)
            begun.append(kept.name)
        return begun

    def rewrite(self, name: str, values: torch.Tensor, step: int) -> None:
        """Stage other values, and a master that equals them; the moments stay."""
        zeroed = ("rest",)

        def function(chunk: Chunk) -> None:
            given = chunk.gradient
            assert given is not None
            chunk.values.copy_(given)
            if "master" in chunk.state:
                chunk.state["master"].copy_(given)
            for other in zeroed:
                if other in chunk.state:
                    # The master is the values, nothing was rounded: no rest, and no sign that says so.
                    chunk.state[other].zero_()
                    chunk.state["exp_avg_sq"].abs_()

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
        whole = master_of(values, state)
        master = {"master": whole.pop("master")}
        if kept.step == 0:
            return master
        return {"step": torch.tensor(float(kept.step), dtype=torch.float32, device="cpu"), **whole, **master}
