"""Chooses how each parameter is updated, Adam in the engine or the optimizer's own code, and the state that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend.optimizers import generic
from memascend.optimizers.adoption import Adoption
from memascend.optimizers.state_layout import describe
from memascend.optimizers.state_trials import StateTrials
from memascend.pages import whole_pages
from memascend.residency.placeholder import dense_strides

if TYPE_CHECKING:
    from memascend.optimizers.state_layout import StateLayout

__all__ = ["Arithmetic"]


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
    def is_adam(self) -> bool:
        """Whether every update is the engine's own."""
        return not any(layout is not None for layout in self.layouts.values())

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
