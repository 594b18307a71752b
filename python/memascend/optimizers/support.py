"""Decides which optimizers can stream: torch's own by a tested list, any other class by a trial.

An update must need nothing but one parameter, its gradient, its own state, and values that a step changes for all
parameters alike (`shared_values`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optimizers.clone import named
from memascend.optimizers.references import require_self_contained
from memascend.optimizers.trial import require_independent

if TYPE_CHECKING:
    from memascend.optimizers.shared_values import SharedName

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
            if parameter.is_complex():
                raise ConfigError(f"a parameter of {parameter.dtype} cannot be streamed: it must be of a real float")
            if group.get("fused") and master_dtype is None and type(optimizer) is torch.optim.SGD:
                _require_updated_vectors(parameter.dtype)
    if known(optimizer):
        return {}
    require_self_contained(optimizer)
    return require_independent(optimizer, master_dtype)


def _require_updated_vectors(dtype: torch.dtype) -> None:
    """Refuse torch's fused SGD of 16-bit parameters where its kernel skips whole vectors, as torch 2.11's does."""
    if dtype.itemsize == 2 and not _fused_sgd_updates(dtype):
        raise ConfigError(
            f"fused=True is refused for SGD on parameters of {dtype}: torch {torch.__version__} leaves most elements "
            "as they are, and reads momentum past its end; set fused=False, leave master_dtype at torch.float32, or "
            "take a newer torch"
        )


@functools.cache
def _fused_sgd_updates(dtype: torch.dtype) -> bool:
    """Whether torch's kernel updates whole vectors on the CPU; asked of the kernel, as no list of versions is sure."""
    values, gradient = torch.zeros(64, dtype=dtype, device="cpu"), torch.ones(64, dtype=dtype, device="cpu")
    torch._fused_sgd_(
        *([values], [gradient], []),
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )
    return bool((values == -1.0).all())
