"""Copies an optimizer, so that the copy steps other parameters."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from memascend.optimizers.option_values import copied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What a copy does not take: the state, the groups, and what scalers left on it.
_OWN = frozenset({"state", "param_groups", "grad_scale", "found_inf"})


def named(optimizer: torch.optim.Optimizer) -> str:
    """Its name, as messages say it."""
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__qualname__


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What its `__init__` left on it, beside groups, state, hooks and methods that others replaced (schedulers do)."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN
        and not name.startswith("_optimizer_")
        and not callable(getattr(torch.optim.Optimizer, name, None))
        and not _is_own_method(optimizer, value)
    }


def _is_own_method(optimizer: torch.optim.Optimizer, value: Any) -> bool:
    """Whether it is a method of the optimizer's that it keeps under another name: a copy has to have its own."""
    return isinstance(value, types.MethodType) and value.__self__ is optimizer


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group's options, which later changes of the group do not reach."""
    return {name: copied(value) for name, value in group.items() if name != "params"}


def arithmetic_dtype(dtype: torch.dtype, master_dtype: torch.dtype | None) -> torch.dtype:
    """What a parameter's update computes in: its master's type where it has one."""
    return master_dtype if master_dtype is not None and dtype.itemsize == 2 else dtype


def user_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """What users wrote on a parameter, which an optimizer may read."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_memascend")}


def stand_in(values: torch.Tensor, attributes: Mapping[str, Any] | None = None) -> torch.nn.Parameter:
    """A parameter on the memory of `values`, with what users wrote on the one that it stands for."""
    parameter = torch.nn.Parameter(values)
    vars(parameter).update(attributes or {})
    return parameter


def cloned(
    optimizer: torch.optim.Optimizer,
    attributes: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
) -> torch.optim.Optimizer:
    """A copy that has these attributes, groups and state, of the very type of the original.

    Its `__init__` does not run: what that takes is the class's own business. Hooks do not run either: they are for
    steps, and a copy makes one parameter's part of a step.
    """
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(attributes)
    for name, value in vars(optimizer).items():
        if _is_own_method(optimizer, value):
            copy.__dict__[name] = types.MethodType(value.__func__, copy)
    for moment in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            copy.__dict__[f"_optimizer_{moment}_{when}_hooks"] = OrderedDict()
    copy.param_groups = list(groups)
    copy.state = defaultdict(dict)
    for parameter, known in state.items():
        copy.state[parameter] = dict(known)
    if isinstance(copy, torch.optim.Adagrad):
        _begin_adagrad(copy)
    return copy  # type: ignore[no-any-return]


def run(copy: torch.optim.Optimizer, method: str = "step") -> None:
    """Run a method of a copy, as its class has it."""
    function = getattr(type(copy), method)
    # torch wraps the step of every class, so that hooks run, also those of all optimizers.
    if getattr(function, "hooked", False):
        function = function.__wrapped__
    function(copy)


def _begin_adagrad(copy: torch.optim.Adagrad) -> None:
    """Adagrad makes its state in `__init__`; not every version of torch makes it elsewhere too."""
    begin = copy.defaults["initial_accumulator_value"]
    for group in copy.param_groups:
        for parameter in group["params"]:
            if not copy.state[parameter]:
                made = torch.optim.Adagrad([parameter], initial_accumulator_value=begin)
                copy.state[parameter] = made.state[parameter]
