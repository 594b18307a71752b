"""Unwraps optimizers that accelerate has wrapped, so that their steps are streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    import torch

_ACCELERATED = ("accelerate.optimizer", "AcceleratedOptimizer")


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that runs the steps: itself, or the one inside of accelerate's wrapper.

    Raises:
        ConfigError: the wrapper does more than to hand the steps on.
    """
    if not _is_accelerated(optimizer):
        return optimizer
    instead = (
        "; give offload() the model and the optimizer before accelerator.prepare(), which then takes what it returns"
    )
    if optimizer.scaler is not None:
        raise ConfigError(f"the AcceleratedOptimizer scales gradients (fp16){instead}")
    steps = optimizer.gradient_state.num_steps
    if steps != 1:
        raise ConfigError(f"the AcceleratedOptimizer steps after {steps} backwards alone{instead}")
    return optimizer.optimizer


def wrap_again(optimizer: Any, offloaded: torch.optim.Optimizer) -> None:
    """Put the offloaded optimizer where the wrapper had the original: whoever holds the wrapper goes on with it."""
    if _is_accelerated(optimizer):
        optimizer.optimizer = offloaded


def _is_accelerated(optimizer: Any) -> bool:
    """By name: accelerate need not be there."""
    return any((kind.__module__, kind.__name__) == _ACCELERATED for kind in type(optimizer).__mro__)
