"""The scalars of an Adam step, computed in float64 and rounded once to fp32, as torch's fused kernel does."""

from __future__ import annotations

import dataclasses
import math

import torch

from .arguments import factor_of
from memascend.errors import ConfigError

__all__ = ["Scalars", "checked_scalars"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalars:
    """What every element of a step is computed with; each is a float that fp32 holds exactly.

    Attributes:
        grad_factor: what the gradient is multiplied by, negative where the loss is maximised.
        decay: `1 - lr * weight_decay`, which the parameter is multiplied by (AdamW).
        l2: `weight_decay`, whose multiple of the parameter joins the gradient (Adam); 0 for AdamW.
        first_weight: the weight of `g - m` in the first moment, `1 - beta1`, or, where that is one half or more,
            `-(1 - (1 - beta1))`: torch then interpolates from the other end.
        from_gradient: the first moment starts from `g` (the other end) and not from `m`.
        beta2: the decay of the second moment.
        one_minus_beta2: the weight of the squared gradient in the second moment.
        bias2_root: the square root of the second bias correction.
        eps: what is added to the denominator.
        step_size: minus the learning rate over the first bias correction.
    """

    grad_factor: float
    decay: float
    l2: float
    first_weight: float
    from_gradient: bool
    beta2: float
    one_minus_beta2: float
    bias2_root: float
    eps: float
    step_size: float


def checked_scalars(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    maximize: bool,
    amsgrad: bool,
    decoupled: bool,
) -> Scalars:
    """The scalars of step `step`, which counts from 1.

    Raises:
        ConfigError: a hyperparameter is outside the range that torch's own optimizers take.
    """
    lr, eps, weight_decay = factor_of("lr", lr), factor_of("eps", eps), factor_of("weight_decay", weight_decay)
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if value < 0:
            raise ConfigError(f"{name} is {value}: pass a number that is not negative")
    beta1, beta2 = (factor_of(f"betas[{i}]", beta) for i, beta in enumerate(_pair(betas)))
    for i, beta in enumerate((beta1, beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(f"betas[{i}] is {beta}: pass a number from 0 up to, and not including, 1")
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ConfigError(f"step is {step!r}: pass the number of this update, which counts from 1")
    if amsgrad:
        raise ConfigError("amsgrad is not supported: its third moment is not kept; pass amsgrad=False")
    factor = factor_of("grad_scale", grad_scale)
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    weight = _fp32(1 - beta1)
    from_gradient = weight >= 0.5
    return Scalars(
        grad_factor=_fp32(-factor if maximize else factor),
        decay=_fp32(1 - lr * weight_decay) if decoupled else 1.0,
        l2=0.0 if decoupled else _fp32(weight_decay),
        first_weight=-_fp32(1 - weight) if from_gradient else weight,
        from_gradient=from_gradient,
        beta2=_fp32(beta2),
        one_minus_beta2=_fp32(1 - beta2),
        bias2_root=_fp32(math.sqrt(bias2)),
        eps=_fp32(eps),
        step_size=_fp32(-(lr / bias1)),
    )


def _fp32(value: float) -> float:
    """`value` rounded to fp32; past its range, infinity."""
    return torch.tensor(value, dtype=torch.float64).float().item()


def _pair(betas: object) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}: pass a pair of numbers")
    return betas[0], betas[1]
