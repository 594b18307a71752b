"""Decides which optimizers can stream: torch's own by a tested list, any other class by a trial.

An update must need nothing but one parameter, its gradient, its own state and the options of its group.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optimizers.clone import (
    arithmetic_dtype,
    attributes_of,
    copied,
    group_options,
    named,
    same,
    stand_in,
    stepped,
    user_attributes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["TRIAL_STEPS", "elementwise", "known", "require_streamable", "trial"]

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
# Steps of a trial: state that first appears in the second step, or grows, is seen.
TRIAL_STEPS = 3
# Tried parameters have at most so many elements in each dimension.
_TRIAL_DIM_MAX = 6


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update needs only that element: of torch's own classes, by their exact type."""
    return type(optimizer) in _ELEMENTWISE


def known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own classes, which need no trial."""
    return type(optimizer) in _ELEMENTWISE | _WHOLE


def require_streamable(optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None = torch.float32) -> None:
    """Refuse, by name, an optimizer whose updates cannot be exact on streamed state.

    A class that is not torch's own is tried on small tensors: its parameters must get the same bits together and one
    by one. Nothing is done to the optimizer, its parameters or torch's random numbers.

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
    if not known(optimizer):
        _require_independent(optimizer, master_dtype)


def _require_independent(optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> None:
    """Two parameters of each group get the same bits together and alone, in three steps."""
    tried: list[tuple[int, torch.Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        tried += [(index, parameter) for parameter in dict.fromkeys([*group["params"][:1], *group["params"][-1:]])]
    generator = torch.Generator().manual_seed(1)

    def drawn(parameter: torch.Tensor) -> torch.Tensor:
        shape = [min(dim, _TRIAL_DIM_MAX) for dim in parameter.shape]
        return torch.randn(shape, generator=generator).to(arithmetic_dtype(parameter.dtype, master_dtype))

    begin = [drawn(parameter) for _, parameter in tried]
    gradients = [[drawn(parameter) for _, parameter in tried] for _ in range(TRIAL_STEPS)]

    def run(numbers: Iterable[int]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        numbers = list(numbers)
        owned = [stand_in(begin[number].clone(), user_attributes(tried[number][1])) for number in numbers]
        members = [(tried[number][0], parameter) for number, parameter in zip(numbers, owned, strict=True)]
        now = [[step[number].clone() for number in numbers] for step in gradients]
        torch.manual_seed(0)
        *_, states = trial(optimizer, members, now)
        return list(zip(owned, states, strict=True))

    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            together = run(range(len(tried)))
            alone = [run([number])[0] for number in range(len(tried))]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{named(optimizer)} cannot run on streamed state: its step failed on one small parameter at a time "
            f"({type(error).__name__}: {error})"
        ) from error
    for (one, state), (other, kept) in zip(together, alone, strict=True):
        if not same([one.data, state], [other.data, kept]):
            raise ConfigError(
                f"{named(optimizer)} cannot run on streamed state: its update of one parameter depends on the others, "
                "or on random numbers; use an optimizer whose update needs one parameter at a time"
            )


def trial(
    optimizer: torch.optim.Optimizer,
    members: Sequence[tuple[int, torch.nn.Parameter]],
    gradients: Iterable[Sequence[torch.Tensor]],
    options: Mapping[str, Any] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Step parameters, each in the group of its number, in place of the original's; the states of all after each step.

    Args:
        optimizer: the original; nothing is done to it.
        members: the number of its group, and the parameter, which changes in place.
        gradients: for each step, one for each parameter.
        options: what stands in every group that has such an option.

    Raises:
        ConfigError: a step of a class that is not torch's changed more than parameters and the state of each.
    """
    options = options or {}
    groups = [group_options(group) for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        group.update({name: value for name, value in options.items() if name in group})
        group["params"] = [parameter for number, parameter in members if number == index]
    before = [group_options(group) for group in groups]
    attributes = attributes_of(optimizer)
    state: Mapping[torch.Tensor, dict[str, Any]] = {}
    for step in gradients:
        for (_, parameter), gradient in zip(members, step, strict=True):
            parameter.grad = gradient
        copy = stepped(optimizer, copied(attributes), groups, state)
        if not known(optimizer):
            _require_own_state(copy, attributes, before, {id(parameter) for _, parameter in members})
        state = copy.state
        yield [dict(state.get(parameter, {})) for _, parameter in members]


def _require_own_state(
    copy: torch.optim.Optimizer,
    attributes: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    members: set[int],
) -> None:
    changed = [f"its attribute {name!r}" for name in _changed(attributes, attributes_of(copy))]
    for before, group in zip(groups, copy.param_groups, strict=True):
        changed += [f"the option {name!r} of a group" for name in _changed(before, group_options(group))]
    if any(id(key) not in members for key in copy.state):
        changed.append("state that belongs to no parameter")
    if changed:
        raise ConfigError(
            f"{named(copy)} cannot run on streamed state: its step changes {changed[0]}; "
            "only the state of each parameter, optimizer.state[parameter], is streamed"
        )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    every = dict.fromkeys([*before, *after])
    return [name for name in every if not (name in before and name in after and same(before[name], after[name]))]
