"""Finds what of the user's a copy of an optimizer could reach: parameters, models, other optimizers, generators."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optimizers.clone import attributes_of, named

if TYPE_CHECKING:
    from collections.abc import Iterator

# Roads to all that the interpreter knows, and nothing that a step would change.
_SKIPPED = (type, types.ModuleType, types.CodeType, types.FrameType, str, bytes, int, float)


def require_self_contained(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step would reach the user's own objects by another way than its groups and its state.

    A copy of it that steps would change those. Nothing of it runs here.

    Raises:
        ConfigError: what it holds, under which name.
    """
    for name in ("param_groups", "state"):
        if hasattr(getattr(type(optimizer), name, None), "__set__"):
            raise _refused(optimizer, f"its {name} are those of another optimizer")
    held = [(f"its attribute {name!r}", value) for name, value in attributes_of(optimizer).items()]
    for group in optimizer.param_groups:
        held += [(f"the option {name!r} of a group", value) for name, value in group.items() if name != "params"]
    theirs = _Users(optimizer)
    for where, value in held:
        what = next(filter(None, map(theirs.kind, reached_from(value))), None)
        if what is not None:
            raise _refused(optimizer, f"{where} holds {what}")


class _Users:
    """What is the user's of all that could be reached."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = {id(parameter) for parameter in parameters}
        self._memory = set(map(_memory, parameters)) - {None}

    def kind(self, reached: Any) -> str | None:
        """What it is, in words; None where it is nobody's."""
        what = None
        if reached is self._optimizer:
            what = "the optimizer itself"
        elif isinstance(reached, torch.optim.Optimizer):
            what = f"another optimizer ({named(reached)})"
        elif isinstance(reached, torch.nn.Module) and next(reached.parameters(), None) is not None:
            what = f"a model ({type(reached).__qualname__})"
        elif isinstance(reached, torch.Generator):
            what = "a random number generator"
        elif isinstance(reached, torch.Tensor) and (
            id(reached) in self._parameters or _memory(reached) in self._memory
        ):
            what = "a parameter"
        return what


def _refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
    inner = "; where it wraps an optimizer, give offload() that one" if "optimizer" in why else ""
    return ConfigError(
        f"{named(optimizer)} cannot run on streamed state: {why}, and only the groups and the state of each parameter "
        f"are streamed{inner}"
    )


def _memory(tensor: torch.Tensor) -> int | None:
    """What tells memory apart; None where there is none of a plain kind."""
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    memory: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return memory


def reached_from(value: Any) -> Iterator[Any]:
    """The value, and all that it refers to, through containers, objects, closures and weak references."""
    seen: set[int] = set()
    # They are held, so that no other comes to be where one of them was.
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
            # Not its globals.
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        elif isinstance(value, weakref.ref):
            waiting.append(value())
        elif isinstance(value, dict) and value.get("__name__") in sys.modules:
            # Of a module.
            continue
        elif not isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
            waiting += gc.get_referents(value)
        elif isinstance(value, torch.nn.Module):
            waiting.append(vars(value))
