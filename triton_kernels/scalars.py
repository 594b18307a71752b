"""Computes the scalars of an Adam step for all implementations. Computes in float64, and rounds to fp32."""

from __future__ import annotations

import dataclasses

from memascend import _core
from memascend.errors import ConfigError

from .arguments import factor_of


@dataclasses.dataclass(frozen=True)
class Scalars:
    """The scalars of a step, which are the same for all elements. Each float is exact in fp32.

    Attributes:
        grad_factor: the factor of the gradient: `grad_scale`, or `-grad_scale` if the loss is maximised.
        decay: the factor of the parameter: `1 - lr * weight_decay` for AdamW, 1 for Adam.
        l2: the multiple of the parameter that is added to the gradient: `weight_decay` for Adam, 0 for AdamW.
        first_weight: the weight of `g - m` in the first moment: `1 - beta1` if `1 - beta1` is below one half, else
            `-beta1`.
        from_gradient: if true, the weighted difference is added to `g` instead of `m`, because torch interpolates from
            the nearer end.
        beta2: the decay of the second moment.
        one_minus_beta2: the weight of the squared gradient in the second moment.
        bias2_root: the square root of the second bias correction.
        eps: added to the denominator.
        step_size: minus the learning rate divided by the first bias correction.
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
    decoupled: bool,
) -> Scalars:
    """Returns the scalars of step number `step`; the first step is 1.

    Raises:
        ConfigError: an argument has a wrong type or is out of range. `lr`, `eps` and `weight_decay` must be at least 0,
            each of `betas` must be in [0, 1), and all numbers must be finite in fp32.
    """
    numbers = [factor_of(name, x) for name, x in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay))]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}: pass a pair of numbers")
    beta1, beta2 = (factor_of(f"betas[{i}]", beta) for i, beta in enumerate(betas))
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < 1 << 53:
        raise ConfigError(f"step is {step!r}: pass the number of this update, as an int from 1 to 2**53 - 1")
    factor = factor_of("grad_scale", grad_scale)
    lr, eps, weight_decay = numbers
    fields = _core.kernel_scalars(lr, (beta1, beta2), eps, weight_decay, decoupled, step, factor, bool(maximize))
    return Scalars(*fields)
