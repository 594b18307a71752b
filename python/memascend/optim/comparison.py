"""Compares the steps of small parameters together, as torch makes them, and one at a time, as they are streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optim.shared import (
    Disagreement,
    SharedName,
    SharedValues,
    arithmetic_dtype,
    cloned,
    common_end,
    copied,
    give_gradient,
    named,
    run,
    same,
    stand_in,
    storable,
    user_attributes,
)

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence


@dataclass(frozen=True)
class Manner:
    """How an optimizer is run for one parameter at a time, bit-identical to a step of all parameters."""

    # Groups without a parameter are left out: the optimizer stacks the parameters of each group, and fails on none.
    omits: bool = False
    # A parameter without a gradient is updated with zeros, as soon as any parameter has a gradient.
    zeros: bool = False
    # torch's step keeps the state of several parameters as one stack; here each parameter has its own.
    stacks: bool = False
    # Attributes that each update writes before it reads them: their values between steps are meaningless.
    scratch: frozenset[str] = frozenset()


PLAIN = Manner()
_STEPS = 4
# Tried parameters have at most so many elements in each dimension.
_TRIAL_DIM_MAX = 6
# At most so many of each group are tried.
_TRIED_MAX = 4
# A stack is tried at its true size: at most so many matrices, and bytes of all of them (but at least two matrices).
_STACK_MAX, _STACK_BYTES_MAX = 4, 256 << 20
# Methods beside step() by which an optimizer may change its parameters between training and evaluation.
MODES = ("train", "eval")


class Member:
    """A parameter of the trial, and the position in its group of the real parameter that it stands for."""

    def __init__(
        self,
        group: int,
        position: int,
        parameter: torch.Tensor,
        dtype: torch.dtype,
        generator: torch.Generator,
        dim_max: int = _TRIAL_DIM_MAX,
    ) -> None:
        self.group = group
        self.position = position
        self.shape = [min(dim, dim_max) for dim in parameter.shape]
        self.dtype = dtype
        self.attributes = user_attributes(parameter)
        self.begin = self.drawn(generator)

    def drawn(self, generator: torch.Generator) -> torch.Tensor:
        """Random values of its shape."""
        return torch.randn(self.shape, generator=generator).to(self.dtype)


class _Joint:
    """All members in one copy, as torch steps them."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, begin: SharedValues, members: Sequence[Member], *, spread: bool
    ) -> None:
        """With `spread`, each member has its real position in the group, among others that never have a gradient."""
        shared = begin.copy(deep=True)
        self.parameters = [stand_in(member.begin.clone(), member.attributes) for member in members]
        groups = [{**options, "params": []} for options in shared.groups]
        for number, group in enumerate(groups):
            mine = {m.position: p for m, p in zip(members, self.parameters, strict=True) if m.group == number}
            count = len(optimizer.param_groups[number]["params"])
            other = torch.nn.Parameter(torch.zeros(2, 3))
            group["params"] = [mine.get(place, other) for place in range(count)] if spread else list(mine.values())
        self.copy = cloned(optimizer, shared.attributes, groups, {})
        self.known = {id(parameter) for group in groups for parameter in group["params"]}

    def do(self, method: str, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            give_gradient(parameter, None if gradient is None else gradient.clone())
        run(self.copy, method)
        if any(id(key) not in self.known for key in self.copy.state):
            raise refused(self.copy, "its step changes state that belongs to no parameter")

    def now(self) -> tuple[list[torch.Tensor], list[dict[str, Any]], SharedValues]:
        states = [dict(self.copy.state.get(parameter, {})) for parameter in self.parameters]
        return [parameter.data for parameter in self.parameters], states, SharedValues.of(self.copy)


class _OneByOne:
    """Each member in a copy of its own, which begins with the shared values of the step before."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, begin: SharedValues, members: Sequence[Member], manner: Manner
    ) -> None:
        self._optimizer = optimizer
        self._members = members
        self._manner = manner
        self._shared = begin.copy(deep=True)
        self._parameters = [stand_in(member.begin.clone(), member.attributes) for member in members]
        self._states: list[dict[str, Any]] = [{} for _ in members]
        # The names of attributes that are written before they are read, as far as was found.
        self.scratch: set[str] = set()

    def do(self, method: str, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._manner.zeros and method == "step":
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(self._parameters, gradients, strict=True)
            ]
        before = copied(([parameter.data for parameter in self._parameters], self._states), deep=True)
        ends = self._run(method, gradients, self._shared)
        while True:
            try:
                changes = common_end([(group, without_scratch(own, self.scratch)) for group, own in ends])
                break
            except Disagreement as other:
                if other.place.group is not None or other.place.name in self.scratch:
                    raise
                self.scratch.add(other.place.name)
                if not self._same_with_others(method, gradients, before):
                    raise
        lost = next((name for name, value in changes.items() if not storable(value)), None)
        if lost is not None:
            raise refused(self._optimizer, f"its step changes {lost} to what is neither number nor text")
        self._shared = self._shared.with_changes(changes)

    def _run(
        self, method: str, gradients: Sequence[torch.Tensor | None], shared: SharedValues
    ) -> list[tuple[int, dict[SharedName, Any]]]:
        """Run each member alone; returns the number of its group, and its changes of the shared values."""
        ends = []
        for number, (member, gradient) in enumerate(zip(self._members, gradients, strict=True)):
            if method == "step" and gradient is None:
                continue
            parameter = self._parameters[number]
            give_gradient(parameter, None if gradient is None else gradient.clone())
            begin, state = shared.copy(deep=True), self._states[number]
            copy = copy_of_one(self._optimizer, begin, member.group, parameter, state, self._manner)
            run(copy, method)
            self._states[number] = dict(copy.state.get(parameter, {}))
            ends.append((member.group, changes_alone(begin=shared, copy=copy, group=member.group, manner=self._manner)))
        return ends

    def _same_with_others(
        self, method: str, gradients: Sequence[torch.Tensor | None], before: tuple[list[torch.Tensor], Any]
    ) -> bool:
        """Whether the step has the same bits where the scratch attributes begin with other values."""
        after = copied(self.now()[:2], deep=True)
        other = self._shared.copy(deep=True)
        for name in self.scratch:
            value = other.attributes.get(name)
            if type(value) is not torch.Tensor:
                return False
            # A value that no step would leave in it.
            value.fill_(float("nan") if value.is_floating_point() else 101)
        values, states = copied(before, deep=True)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        self._states = states
        self._run(method, gradients, other)
        return same(after, self.now()[:2])

    def now(self) -> tuple[list[torch.Tensor], list[dict[str, Any]], SharedValues]:
        return [parameter.data for parameter in self._parameters], self._states, self._shared


def copy_of_one(
    optimizer: torch.optim.Optimizer,
    shared: SharedValues,
    group: int,
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    manner: Manner,
) -> torch.optim.Optimizer:
    """A copy of the optimizer, with these shared values, that has one parameter, in the group of that number."""
    groups = [{**shared.groups[group], "params": [parameter]}]
    if not manner.omits:
        groups = [{**own, "params": [parameter] if at == group else []} for at, own in enumerate(shared.groups)]
    return cloned(optimizer, shared.attributes, groups, {parameter: state} if state else {})


def changes_alone(
    begin: SharedValues, copy: torch.optim.Optimizer, group: int, manner: Manner
) -> dict[SharedName, Any]:
    """The changes of shared values by a copy that has one parameter, in the group of that number."""
    if not manner.omits:
        return begin.changes(SharedValues.of(copy))
    own = SharedValues(begin.attributes, [begin.groups[group]])
    return {
        place if place.group is None else SharedName(group, place.name): value
        for place, value in own.changes(SharedValues.of(copy)).items()
    }


def without_scratch(changes: dict[SharedName, Any], scratch: Container[str]) -> dict[SharedName, Any]:
    """The changes of a step, but for scratch attributes."""
    if not scratch:
        return changes
    return {place: value for place, value in changes.items() if place.group is not None or place.name not in scratch}


def chosen_members(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None, generator: torch.Generator
) -> list[Member]:
    """The first and the last of each group, and some that differ from these in dimensions or type."""
    members = []
    for number, group in enumerate(optimizer.param_groups):
        # Whole numbers have no gradient.
        every = [(place, given) for place, given in enumerate(group["params"]) if given.is_floating_point()]
        kinds = {(parameter.dim(), parameter.dtype): (place, parameter) for place, parameter in reversed(every)}
        chosen = dict([*every[:1], *every[-1:], *list(kinds.values())[:_TRIED_MAX]])
        for place in sorted(chosen):
            dtype = arithmetic_dtype(chosen[place].dtype, master_dtype)
            members.append(Member(number, place, chosen[place], dtype, generator))
    return members


def members_at_size(
    optimizer: torch.optim.Optimizer, group: int, master_dtype: torch.dtype | None, generator: torch.Generator
) -> list[Member]:
    """The first parameters of a group that stacks them, at their true size, on which matrix products depend."""
    params = optimizer.param_groups[group]["params"]
    first = params[0]
    dtype = arithmetic_dtype(first.dtype, master_dtype)
    count = max(2, min(_STACK_MAX, _STACK_BYTES_MAX // max(1, first.numel() * dtype.itemsize)))
    alike = [(place, one) for place, one in enumerate(params) if one.shape == first.shape][:count]
    return [Member(group, place, one, dtype, generator, dim_max=max(one.shape, default=1)) for place, one in alike]


Plan = list[tuple[str, list[bool]]]


def all_present(optimizer: torch.optim.Optimizer, members: Sequence[Member]) -> Plan:
    """Steps with all gradients, then an evaluation between two steps."""
    every, none = [True] * len(members), [False] * len(members)
    plan: Plan = [("step", every)] * _STEPS
    if callable(getattr(type(optimizer), "train", None)):
        # Twice: the second call must change nothing.
        plan = [("train", none), ("train", none), *plan]
        if callable(getattr(type(optimizer), "eval", None)):
            plan += [("eval", none), ("eval", none), ("train", none), ("step", every)]
    return plan


def some_missing(optimizer: torch.optim.Optimizer, members: Sequence[Member]) -> Plan:
    """Steps in each of which another member has no gradient."""
    plan: Plan = [("step", [number != step for number in range(len(members))]) for step in range(len(members))]
    plan = [(method, present) for method, present in plan if any(present)]
    plan.append(("step", [True] * len(members)))
    if callable(getattr(type(optimizer), "train", None)):
        plan.insert(0, ("train", [False] * len(members)))
    return plan


@dataclass(eq=False)
class Comparison:
    """Compares steps of all members together with steps of one at a time."""

    optimizer: torch.optim.Optimizer
    begin: SharedValues
    members: Sequence[Member]
    manner: Manner
    spread: bool  # see `_Joint`

    def __post_init__(self) -> None:
        try:
            self._one_by_one = _OneByOne(self.optimizer, self.begin, self.members, self.manner)
            self._joint = _Joint(self.optimizer, self.begin, self.members, spread=self.spread)
        except Exception as error:
            raise refused(
                self.optimizer, f"what it holds cannot be copied ({type(error).__name__}: {error})"
            ) from error
        self._last = ""

    def follow(self, plan: Plan, generator: torch.Generator) -> SharedValues:
        """Run the plan; returns the shared values at the end."""
        for method, present in plan:
            gradients = [
                member.drawn(generator) if there else None for member, there in zip(self.members, present, strict=True)
            ]
            if not self._do(method, gradients):
                break
        return SharedValues.of(self._joint.copy)

    def _do(self, method: str, gradients: Sequence[torch.Tensor | None]) -> bool:
        optimizer = self.optimizer
        before = copied(self._joint.now()[:2], deep=True)
        try:
            self._joint.do(method, gradients)
        except ConfigError:
            raise
        except Exception as error:
            if self.spread:
                # torch's own step fails, too: there is nothing to compare.
                return False
            raise refused(
                optimizer, f"its {method} failed on small parameters ({type(error).__name__}: {error})"
            ) from error
        idle = method in MODES and self._last in ("", method)
        if idle and not same(before, self._joint.now()[:2]):
            raise refused(optimizer, f"its {method} changes parameters also where there is nothing to change")
        self._last = method
        try:
            self._one_by_one.do(method, gradients)
        except ConfigError:
            raise
        except Disagreement as other:
            raise refused(optimizer, f"its {method} changes {other} by values of single parameters") from None
        except Exception as error:
            raise refused(
                optimizer, f"its {method} failed on one small parameter at a time ({type(error).__name__}: {error})"
            ) from error
        self._require_same(method)
        return True

    def _require_same(self, method: str) -> None:
        values, states, shared = self._joint.now()
        others, other_states, other_shared = self._one_by_one.now()
        differs = next(iter(without_scratch(shared.changes(other_shared), self.scratch)), None)
        if differs is not None:
            raise refused(
                self.optimizer,
                f"its {method} changes {differs} by how many parameters have a gradient: one at a time it would be "
                "another",
            )
        # Before its first gradient a member may have state that `__init__` made (Adagrad), which does not count yet.
        begun = [state if other else {} for state, other in zip(states, other_states, strict=True)]
        alike = _stacked_alike(begun, other_states) if self.manner.stacks else same(begun, other_states)
        if not alike or not same(values, others):
            raise refused(
                self.optimizer,
                "its update of one parameter depends on the others, so that one at a time it would be another; use an "
                "optimizer whose update needs one parameter at a time",
            )

    @property
    def stacked_groups(self) -> set[int]:
        """The numbers of groups in which torch's step keeps the state of several parameters as one."""
        (_, joint, _), (_, others, _) = self._joint.now(), self._one_by_one.now()
        return {
            member.group
            for member, state, own in zip(self.members, joint, others, strict=True)
            if own and not same(state, own)
        }

    @property
    def scratch(self) -> frozenset[str]:
        """The names of attributes that each update writes before it reads them."""
        return frozenset(self._one_by_one.scratch)


def _stacked_alike(joint: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
    """Whether each state equals its own alone, or is a stack of its own and the next ones, which then have none."""
    taken = 0
    for number, (state, own) in enumerate(zip(joint, others, strict=True)):
        if number < taken or same(state, own):
            continue
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        count = tensors[0].shape[0] if tensors else 0
        if count < 2 or any(joint[number + 1 : number + count]):
            return False
        taken = number + count
        for place, alone_state in enumerate(others[number:taken]):
            part = {
                name: value[place : place + 1] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in state.items()
            }
            if not same(part, alone_state):
                return False
    return True


def refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
    """The error for an optimizer that cannot stream, with the reason."""
    return ConfigError(f"{named(optimizer)} cannot run on streamed state: {why}")
