"""The arithmetic of updates: AdamW and Adam on the engine, any other optimizer by torch's own code on streamed state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.errors import ConfigError
from memascend.placeholder import dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.engine import Engine, Store
    from memascend.gradients import Arrival, Rule

__all__ = ["AdamRule", "RuleKind", "choose_rule"]


class RuleKind(Protocol):
    """What has to be known of an optimizer before there is a store."""

    def describe(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors of a parameter, on meta."""

    def initial(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """The state that the optimizer has already, and how many updates made it."""

    def whole_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Memory for parameters that are updated whole."""

    def make(self, engine: Engine, store: Store, optimizer: torch.optim.Optimizer) -> Rule:
        """The arithmetic, on an engine."""


def choose_rule(optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> RuleKind:
    """AdamW and Adam run on the engine where master and moments are fp32; anything else runs torch's code."""
    kind = type(optimizer)
    if kind is torch.optim.LBFGS:
        raise ConfigError("LBFGS keeps a history of the whole model and cannot be streamed; use AdamW")
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return AdamKind(decoupled=kind is torch.optim.AdamW)
    raise ConfigError(f"{kind.__name__} is not supported yet")


class AdamKind:
    """AdamW and Adam with fp32 master and moments."""

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled

    def describe(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors of a parameter, on meta."""
        names = ("exp_avg", "exp_avg_sq") if parameter.dtype == torch.float32 else ("master", "exp_avg", "exp_avg_sq")
        strides = dense_strides(parameter)
        return {
            name: torch.empty_strided(parameter.shape, strides, dtype=torch.float32, device="meta") for name in names
        }

    def initial(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """The state that the optimizer has already, and how many updates made it."""
        state = optimizer.state.get(parameter) or {}
        moments = {name: state[name].detach().float() for name in ("exp_avg", "exp_avg_sq") if name in state}
        return moments, int(state.get("step", 0))

    def whole_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Memory for parameters that are updated whole: none."""
        del parameters
        return 0

    def make(self, engine: Engine, store: Store, optimizer: torch.optim.Optimizer) -> Rule:
        """The arithmetic, on an engine."""
        return AdamRule(engine, store, optimizer.param_groups, decoupled=self._decoupled)


class AdamRule:
    """AdamW and Adam with fp32 master and moments, on the engine."""

    def __init__(self, engine: Engine, store: Store, groups: list[dict[str, Any]], *, decoupled: bool) -> None:
        self._engine = engine
        self._store = store
        self._groups = groups
        self._decoupled = decoupled

    def options(self, kept: Arrival) -> dict[str, Any]:
        """The options that an update of this parameter would use now."""
        group = self._groups[kept.group]
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),
            "betas": (float(beta1), float(beta2)),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group.get("maximize", False)),
            "decoupled": bool(group.get("decoupled_weight_decay", self._decoupled)),
        }

    def update(self, kept: Arrival, gradient: torch.Tensor, scale: float) -> None:
        """Begin the update by a gradient in memory, multiplied by `scale`."""
        self._engine.update(kept.name, gradient, step=kept.step + 1, grad_scale=scale, **kept.options)

    def update_spilled(self, kept: Arrival, factors: Sequence[float], scale: float) -> None:
        """Begin the update by the gradient that was spilled."""
        self._engine.update_spilled(kept.name, step=kept.step + 1, grad_scale=scale, factors=factors, **kept.options)

    def state(self, kept: Arrival) -> dict[str, torch.Tensor]:
        """A copy of the state, by torch's names."""
        values, state = self._store.read(kept.name)
        master = {"master": state.pop("master", values)}
        if kept.step == 0:
            return master
        return {"step": torch.tensor(float(kept.step), dtype=torch.float32), **state, **master}
