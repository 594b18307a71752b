"""Replaces the state of the original optimizer by `StoredState`; rejects state that other code would keep using."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memascend.errors import ConfigError, UsageError
from memascend.optim.shared import attributes_of
from memascend.optim.trial import reached_from
from memascend.params.aliases import held_for_good, require_unaliased
from memascend.session.optimizer import StoredState, session_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.session.optimizer import OffloadedOptimizer


# torch's own setter of `.data`, read before `process_hooks` replaces the property `data` of parameters.
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WHERE = "is on storage: call state_of(p) of the optimizer that offload() returned"


def require_unaliased_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter], model: torch.nn.Module
) -> None:
    """Rejects state if other code refers to its dicts or to its tensors' memory, and so would see old values later.

    Raises:
        ConfigError: other code refers to state; the message names the parameter and a remedy. Nothing was changed.
    """
    state = optimizer.state
    states = {name: state[parameter] for name, parameter in named.items() if parameter in state}
    tensors = {
        f"{key} of {name}": value
        for name, own in states.items()
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
    }
    known = [value for own in state.values() for value in own.values() if isinstance(value, torch.Tensor)]
    require_unaliased(tensors, model, known, what="the optimizer's state")
    names = list(states)
    # Drop this function's own references, which the counts below would include.
    states.clear()
    key = object()
    # The reference count of a dict to which only one mapping refers.
    alone = _references({key: {}}, key)
    held = held_for_good(names, lambda name: _references(optimizer.state, named[name]) > alone)
    if held:
        raise ConfigError(
            f"the optimizer's state of {held[0]} is also used outside of the optimizer: other code, such as a variable "
            "or a result of state_dict(), refers to the dict optimizer.state[p], which would have old values during "
            "the run. Delete that reference, and call state_of(p) of the optimizer that offload() returns instead"
        )


def _references(mapping: Mapping[Any, Any], key: Any) -> int:
    return sys.getrefcount(mapping[key])


def leave(optimizer: torch.optim.Optimizer, offloaded: OffloadedOptimizer) -> None:
    """Empties the state of the original optimizer, and makes later lookups in the state raise UsageError.

    If other code still refers to a tensor of the old state, access to the tensor raises an error, too, unless several
    parameters, or an attribute of the optimizer, share the tensor.
    """
    state = optimizer.state
    # Counts in how many states and attributes of the optimizer each value occurs. A value that occurs several times,
    # such as a table, is shared, so this function does not take the memory of such a value.
    common = Counter(id(value) for own in state.values() for value in own.values())
    if state:
        common.update(2 * [id(one) for value in attributes_of(optimizer).values() for one in reached_from(value)])
    # The reference count of a tensor to which only one mapping refers.
    alone = _references({0: torch.empty(1, device="cpu")}, 0)
    for own in state.values():
        for key in own:
            if isinstance(own[key], torch.Tensor) and common[id(own[key])] == 1 and _references(own, key) > alone:
                _take_memory(own[key], key)
    state.clear()
    if isinstance(state, defaultdict):
        state.default_factory = _refuse_state
    optimizer.state = StoredState(session_of(offloaded).run.resources)  # type: ignore[assignment]
    optimizer.register_state_dict_pre_hook(_refuse_state_dict)
    optimizer.register_load_state_dict_pre_hook(_refuse_state_dict)


def _take_memory(tensor: torch.Tensor, key: str) -> None:
    """Replaces a tensor's memory by empty memory that raises an error on access. The store has the tensor's values."""
    nothing = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    torch._C._set_storage_access_error_msg(nothing, f"this tensor was {key} of an optimizer, whose state {_WHERE}")  # noqa: SLF001
    _SET_DATA(tensor, nothing)


def _refuse_state() -> NoReturn:
    raise UsageError(f"the state of this optimizer {_WHERE}")


def _refuse_state_dict(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer.state, StoredState):
        raise UsageError(
            "this optimizer was given to offload(), and its state is on storage: call state_dict(), load_state_dict() "
            "or save() of the optimizer that offload() returned. Load a state dict into this optimizer only "
            "before offload()"
        )
