"""Decides which optimizers can stream: torch's own by a tested list, any other class by a trial.

An update must need nothing but one parameter, its gradient, its own state, and values that a step changes for all
parameters alike (`shared_values`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optimizers.clone import named
from memascend.optimizers.references import require_self_contained
from memascend.optimizers.trial import require_independent

if TYPE_CHECKING:
    from memascend.optimizers.shared_values import SharedName

__all__ = ["elementwise", "known", "require_streamable"]

# The update of an element needs nothing but that element and the scalars of its parameter.
_ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)
# The update of a parameter needs all of it, and nothing else.
_WHOLE = frozenset({torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam})


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update needs only that element: of torch's own classes, by their exact type."""
    return type(optimizer) in _ELEMENTWISE


def known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own classes, which need no trial."""
    return type(optimizer) in _ELEMENTWISE | _WHOLE


def require_streamable(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None = torch.float32
) -> dict[SharedName, Any]:
    """Refuse, by name, an optimizer whose updates cannot be exact on streamed state.

    A class that is not torch's own is tried on small tensors: its parameters must get the same bits together and one
    by one. Nothing is done to the optimizer, its parameters or random numbers.

    Returns:
        The options and attributes that a step changes for all parameters alike, with an example of each.

    Raises:
        ConfigError: what is refused, and what works instead.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__qualname__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{named(optimizer)} is refused: its step evaluates the model several times, and its state spans all "
            "parameters; use AdamW, or any optimizer whose state is per parameter"
        )
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise ConfigError(
                    f"{option}=True is refused: updates run outside of autograd and CUDA graphs; set {option}=False"
                )
        for parameter in group["params"]:
            if not parameter.dtype.is_floating_point:
                raise ConfigError(f"a parameter of {parameter.dtype} cannot be streamed: it must be of a real float")
    if known(optimizer):
        return {}
    require_self_contained(optimizer)
    return require_independent(optimizer, master_dtype)
