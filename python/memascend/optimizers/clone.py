"""Copies an optimizer so that the copy steps other parameters, one at a time."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "arithmetic_dtype",
    "attributes_of",
    "copied",
    "group_options",
    "named",
    "same",
    "stand_in",
    "stepped",
    "user_attributes",
]

# What a copy does not take: the state, the groups, the hooks of users, and what schedulers and scalers left on it.
_OWN = frozenset(
    {
        "state",
        "param_groups",
        "step",
        "grad_scale",
        "found_inf",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    }
)
# Tensors in options and attributes that are copied and compared; a larger one is a table that steps only read.
_COMPARED_NUMEL = 4096


def named(optimizer: torch.optim.Optimizer) -> str:
    """Its name, as messages say it."""
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__qualname__


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What its `__init__` left on it, beside groups, state and hooks."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OWN}


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


def stepped(
    optimizer: torch.optim.Optimizer,
    attributes: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
) -> torch.optim.Optimizer:
    """Run one step of a copy that has these attributes, groups and state, and return the copy.

    It is of the very type of the original. Its `__init__` does not run: what that takes is the class's own business.
    Hooks do not run either: they are for steps, and this is one parameter's part of a step.
    """
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(attributes)
    for name in _OWN:
        if name.startswith("_optimizer"):
            copy.__dict__[name] = OrderedDict()
    copy.param_groups = list(groups)
    copy.state = defaultdict(dict)
    for parameter, kept in state.items():
        copy.state[parameter] = dict(kept)
    if isinstance(copy, torch.optim.Adagrad):
        _begin_adagrad(copy)
    step = type(copy).step
    # torch wraps the step of every class, so that hooks run, also those of all optimizers.
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(copy)
    return copy  # type: ignore[no-any-return]


def _begin_adagrad(copy: torch.optim.Adagrad) -> None:
    """Adagrad makes its state in `__init__`; not every version of torch makes it elsewhere too."""
    begin = copy.defaults["initial_accumulator_value"]
    for group in copy.param_groups:
        for parameter in group["params"]:
            if not copy.state[parameter]:
                made = torch.optim.Adagrad([parameter], initial_accumulator_value=begin)
                copy.state[parameter] = made.state[parameter]


def copied(value: Any) -> Any:
    """A copy of containers and small tensors, through and through; anything else as it is."""
    if isinstance(value, torch.Tensor):
        small = value.numel() <= _COMPARED_NUMEL and type(value) is torch.Tensor
        return value.detach().clone() if small else value
    if type(value) in {dict, OrderedDict}:
        return type(value)((name, copied(part)) for name, part in value.items())
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, {name: copied(part) for name, part in value.items()})
    if type(value) in {list, tuple, deque}:
        return type(value)(copied(part) for part in value)
    return set(value) if type(value) is set else value


def same(one: Any, other: Any) -> bool:
    """Whether two such copies are equal to the bit."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        fits = one.dtype == other.dtype and one.shape == other.shape
        return fits and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    comparable = isinstance(one, int | float | str | bytes | complex | set | frozenset)
    # NaN is what differs from itself.
    return comparable and bool(one == other or (one != one and other != other))  # noqa: PLR0124
