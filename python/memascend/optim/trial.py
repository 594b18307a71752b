"""Decides which optimizers are accepted: torch's tested classes are listed, and most other classes are tried out."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optim.comparison import PLAIN, RunMode, refused, require_independent
from memascend.optim.shared import SharedName, attributes_of, named

if TYPE_CHECKING:
    from collections.abc import Iterator


# `reached_from` skips objects of these types: classes, modules, code and frames lead to most of the interpreter, and
# text and numbers refer to no object of the user.
_SKIPPED = (type, types.ModuleType, types.CodeType, types.FrameType, str, bytes, int, float)


def require_self_contained(optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer whose attributes or group options refer to objects that a step of a copy could change.

    Such objects are its parameters, models, optimizers and random number generators. Also rejects an optimizer whose
    `param_groups` or `state` is a property. This check runs no code of the optimizer.
    """
    for name in ("param_groups", "state"):
        if hasattr(getattr(type(optimizer), name, None), "__set__"):
            raise _reach_refused(optimizer, f"its attribute {name!r} is a property, perhaps of a wrapped optimizer")
    held = [(f"its attribute {name!r}", value) for name, value in attributes_of(optimizer).items()]
    for group in optimizer.param_groups:
        held += [(f"the option {name!r} of a group", value) for name, value in group.items() if name != "params"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids, memory = set(map(id, parameters)), set(map(_memory, parameters)) - {None}
    for where, value in held:
        for reached in reached_from(value):
            is_parameter = isinstance(reached, torch.Tensor) and (id(reached) in ids or _memory(reached) in memory)
            what = "a parameter" if is_parameter else _users(optimizer, reached)
            if what is not None:
                raise _reach_refused(optimizer, f"{where} holds {what}")


def _users(optimizer: torch.optim.Optimizer, reached: Any) -> str | None:
    """Describes `reached` for an error if it is an optimizer, a model or a random number generator; else None."""
    if reached is optimizer:
        return "the optimizer itself"
    if isinstance(reached, torch.optim.Optimizer):
        return f"another optimizer ({named(reached)})"
    if isinstance(reached, torch.nn.Module) and next(reached.parameters(), None) is not None:
        return f"a model ({type(reached).__qualname__})"
    return "a random number generator" if isinstance(reached, torch.Generator) else None


def _reach_refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
    inner = "; if it wraps another optimizer, pass that optimizer to offload()" if "optimizer" in why else ""
    return refused(optimizer, f"{why}, but only the groups and the state of each parameter are streamed{inner}")


def _memory(tensor: torch.Tensor) -> int | None:
    """Returns the identity of a tensor's memory; None if the tensor is not strided, or is composed of other tensors."""
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    memory: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return memory


def reached_from(value: Any) -> Iterator[Any]:
    """Yields `value` and the objects that it refers to, through containers, objects, closures and weak references.

    Skips objects of `_SKIPPED` types and the globals of functions. Does not search tensors, optimizers and the globals
    of modules.
    """
    seen: set[int] = set()
    # `held` keeps all visited objects alive, so that no new object gets the id of a freed object.
    waiting = [value]
    held = []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _SKIPPED):
            continue
        seen.add(id(value))
        held.append(value)
        yield value
        if isinstance(value, types.FunctionType):
            # Leaves out the function's globals.
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        elif isinstance(value, weakref.ref):
            waiting.append(value())
        elif isinstance(value, dict) and value.get("__name__") in sys.modules:
            # `value` is the `__dict__` of a module.
            continue
        elif not isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
            waiting += gc.get_referents(value)
        elif isinstance(value, torch.nn.Module):
            waiting.append(vars(value))


# Optimizer classes whose update of an element needs only that element and the scalars of its parameter.
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
# Optimizer classes whose update of a parameter needs the whole parameter, but no other parameter.
_WHOLE = frozenset({torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam})


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's own classes (exact types) whose update of an element needs only that element."""
    return type(optimizer) in _ELEMENTWISE


def known(optimizer: torch.optim.Optimizer) -> bool:
    """True for the listed classes of torch (exact types), which need no trial."""
    return type(optimizer) in _ELEMENTWISE | _WHOLE


def require_streamable(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None = torch.float32
) -> tuple[dict[SharedName, Any], RunMode]:
    """Raises ConfigError if the optimizer, or an option or parameter of it, cannot be used on streamed state.

    Returns the shared values that a step changes, and the `RunMode`, as `require_independent` does; for the listed
    classes of torch, no values and `PLAIN`. The optimizer, its parameters and the random number generators do not
    change.
    """
    _require_class(optimizer)
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise ConfigError(
                    f"{option}=True is rejected: updates run outside of autograd and CUDA graphs; set {option}=False"
                )
        for parameter in group["params"]:
            if parameter.is_complex():
                raise ConfigError(
                    f"a parameter of {parameter.dtype} cannot be streamed, because only real floats are updated: "
                    "freeze it with requires_grad_(False), and make the optimizer without it"
                )
            plain_sgd = group.get("fused") and master_dtype is None and type(optimizer) is torch.optim.SGD
            if plain_sgd and parameter.dtype.itemsize == 2 and not _fused_sgd_updates(parameter.dtype):
                raise ConfigError(
                    f"fused=True is rejected for SGD on parameters of {parameter.dtype}: torch {torch.__version__} "
                    "does not update all elements. Use fused=False, keep master_dtype=torch.float32, or install "
                    "another version of torch"
                )
    if known(optimizer):
        return {}, PLAIN
    require_self_contained(optimizer)
    return require_independent(optimizer, master_dtype)


def _require_class(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__qualname__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{named(optimizer)} is rejected: its step evaluates the model several times, and its state spans all "
            "parameters. Use AdamW, or any optimizer whose state is per parameter"
        )
    if any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__):
        raise ConfigError(
            f"{named(optimizer)} of bitsandbytes is rejected: the bits of its updates depend on the processor. Use "
            "torch.optim.AdamW, Adam, or SGD with momentum; to keep their moments in 8 bits, pass "
            'offload(..., state="8bit")'
        )


@functools.cache
def _fused_sgd_updates(dtype: torch.dtype) -> bool:
    """True if torch's fused SGD updates all elements of a small tensor on the CPU; torch 2.11 skips whole vectors."""
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
