"""Compares two ways to run an optimizer: one step for all parameters at once, and one step for each parameter."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    plain_parameter,
    run,
    same,
    storable,
    user_attributes,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence


@dataclass(frozen=True)
class RunMode:
    """How to run an optimizer for one parameter at a time, bit-identically to a step of all parameters."""

    # A copy gets only the group of its parameter. Some optimizers need this, because they fail with an empty group. An
    # example is an optimizer that stacks the parameters of each group.
    omits: bool = False
    # A parameter without a gradient is updated with a gradient of zeros, if another parameter has a gradient.
    zeros: bool = False
    # In the trial, the step of all parameters kept the state of several parameters in one stacked tensor. In the store,
    # each parameter has its own state.
    stacks: bool = False
    # Attributes that each update writes before it reads them. Their values between steps have no meaning, so a trial
    # may overwrite them.
    scratch: frozenset[str] = frozenset()


PLAIN = RunMode()
# A trial first makes this number of steps with a gradient for every parameter.
_STEPS = 4
# The maximum size of a small trial parameter in each dimension.
_TRIAL_DIM_MAX = 6
# From each group, a trial takes the first and the last parameter, and one parameter of each kind (dtype and number of
# dimensions) for at most this number of kinds.
_TRIED_MAX = 4
# A trial of stacked state uses matrices of true size: at most `_STACK_MAX` matrices of at most `_STACK_BYTES_MAX` bytes
# together, but at least two matrices.
_STACK_MAX, _STACK_BYTES_MAX = 4, 256 << 20
# Methods other than step() by which an optimizer may change its parameters. Loops call these methods when training or
# an evaluation begins.
MODES = ("train", "eval")


class _RandomGuard(TorchDispatchMode):
    """Rejects operations that draw from torch's default random number generators, on any device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # No operation of a trial is compiled. torch's version of this method would load the compiler, which takes
        # seconds.
        return False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A step may draw from a generator that it makes itself: such a generator starts in the same state for each
        # parameter.
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            raise _draws_refused(self._optimizer)
        return func(*args, **(kwargs or {}))


def _draws_refused(optimizer: torch.optim.Optimizer) -> ConfigError:
    return refused(
        optimizer,
        "its step draws random numbers, so updates of one parameter at a time would differ from torch's step; use an "
        "optimizer that draws no random numbers",
    )


@contextlib.contextmanager
def on_trial(optimizer: torch.optim.Optimizer, *, meta: bool = False) -> Iterator[None]:
    """Context manager for a trial of an optimizer; raises ConfigError if a step draws random numbers.

    Warnings are hidden. The random number generators of torch, Python and numpy keep their states. With `meta`, draws
    from the generators of Python and numpy are allowed: on the meta device torch itself draws from Python's generator
    for a collective.
    Code that a step would compile runs without compilation, because compilation would take minutes.
    """
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    theirs: Any = numpy.random.get_state() if numpy else None
    # If `torch._dynamo` is not loaded, the step compiles no code. Loading it here would take seconds.
    uncompiled: Any = torch.compiler.set_stance if "torch._dynamo" in sys.modules else contextlib.nullcontext
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _RandomGuard(optimizer),
            warnings.catch_warnings(),
            uncompiled("force_eager"),
        ):
            warnings.simplefilter("ignore")
            yield
        drawn = random.getstate() != before or (numpy is not None and numpy.random.get_state()[2] != theirs[2])
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(theirs)
    if drawn and not meta:
        raise _draws_refused(optimizer)


class _Member:
    """A parameter of a trial. It represents the real parameter at `position` in group number `group`."""

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
        """Returns random values of the member's shape and dtype."""
        return torch.randn(self.shape, generator=generator).to(self.dtype)


class _TogetherRun:
    """Steps all members in one copy of the optimizer, as torch does."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, begin: SharedValues, members: Sequence[_Member], *, spread: bool
    ) -> None:
        """Copies the optimizer for the members.

        With `spread`, each member has its real position in its group, and a parameter without a gradient fills all
        remaining positions. Without `spread`, each group has only its members.
        """
        shared = begin.copy(deep=True)
        self.parameters = [plain_parameter(member.begin.clone(), member.attributes) for member in members]
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
            raise refused(self.copy, f"its {method} changes state that belongs to no parameter")

    def now(self) -> tuple[list[torch.Tensor], list[dict[str, Any]], SharedValues]:
        states = [dict(self.copy.state.get(parameter, {})) for parameter in self.parameters]
        return [parameter.data for parameter in self.parameters], states, SharedValues.of(self.copy)


class _SeparateRun:
    """Steps each member in a separate copy of the optimizer.

    Each copy starts with the shared values that the previous step left.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, begin: SharedValues, members: Sequence[_Member], run_mode: RunMode
    ) -> None:
        self._optimizer = optimizer
        self._members = members
        self._run_mode = run_mode
        self._shared = begin.copy(deep=True)
        self._parameters = [plain_parameter(member.begin.clone(), member.attributes) for member in members]
        self._states: list[dict[str, Any]] = [{} for _ in members]

    def do(self, method: str, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._run_mode.zeros and method == "step":
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(self._parameters, gradients, strict=True)
            ]
        ends = []
        for number, (member, gradient) in enumerate(zip(self._members, gradients, strict=True)):
            if method == "step" and gradient is None:
                continue
            parameter = self._parameters[number]
            give_gradient(parameter, None if gradient is None else gradient.clone())
            begin, state = self._shared.copy(deep=True), self._states[number]
            for name in self._run_mode.scratch:
                # Overwrite the attribute: if the step reads it before it writes it, the results differ.
                value = begin.attributes[name]
                value.fill_(float("nan") if value.is_floating_point() else 101)
            copy = copy_of_one(self._optimizer, begin, member.group, parameter, state, self._run_mode)
            run(copy, method)
            self._states[number] = dict(copy.state.get(parameter, {}))
            ends.append((member.group, changes_alone(self._shared, copy, member.group, self._run_mode)))
        changes = common_end(ends)
        lost = next((name for name, value in changes.items() if not storable(value)), None)
        if lost is not None:
            raise refused(self._optimizer, f"its {method} changes {lost} to a value that is neither a number nor text")
        self._shared = self._shared.with_changes(changes)

    def now(self) -> tuple[list[torch.Tensor], list[dict[str, Any]], SharedValues]:
        return [parameter.data for parameter in self._parameters], self._states, self._shared


def copy_of_one(
    optimizer: torch.optim.Optimizer,
    shared: SharedValues,
    group: int,
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    run_mode: RunMode,
) -> torch.optim.Optimizer:
    """Returns a copy of the optimizer with the shared values `shared` and one parameter, in group number `group`."""
    groups = [{**shared.groups[group], "params": [parameter]}]
    if not run_mode.omits:
        groups = [{**own, "params": [parameter] if at == group else []} for at, own in enumerate(shared.groups)]
    return cloned(optimizer, shared.attributes, groups, {parameter: state} if state else {})


def changes_alone(
    begin: SharedValues, copy: torch.optim.Optimizer, group: int, run_mode: RunMode
) -> dict[SharedName, Any]:
    """Returns the shared values, except scratch, that `copy` changed; `copy` has one parameter, in group `group`."""
    after = SharedValues.of(copy)
    if run_mode.omits:
        after = SharedValues(after.attributes, [*begin.groups[:group], *after.groups, *begin.groups[group + 1 :]])
    return without_scratch(begin.changes(after), run_mode.scratch)


def without_scratch(changes: dict[SharedName, Any], scratch: Container[str]) -> dict[SharedName, Any]:
    """Returns the changes of a step without the changes of scratch attributes."""
    if not scratch:
        return changes
    return {place: value for place, value in changes.items() if place.group is not None or place.name not in scratch}


def _chosen_members(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None, generator: torch.Generator
) -> list[_Member]:
    """Returns members for the first and the last parameter of each group, and for some parameters of other kinds.

    The kind of a parameter is its dtype and number of dimensions.
    """
    members = []
    for number, group in enumerate(optimizer.param_groups):
        # Integer parameters have no gradient.
        every = [(place, given) for place, given in enumerate(group["params"]) if given.is_floating_point()]
        kinds = {(parameter.dim(), parameter.dtype): (place, parameter) for place, parameter in reversed(every)}
        chosen = dict([*every[:1], *every[-1:], *list(kinds.values())[:_TRIED_MAX]])
        for place in sorted(chosen):
            dtype = arithmetic_dtype(chosen[place].dtype, master_dtype)
            members.append(_Member(number, place, chosen[place], dtype, generator))
    return members


def _members_at_size(
    optimizer: torch.optim.Optimizer, group: int, master_dtype: torch.dtype | None, generator: torch.Generator
) -> list[_Member]:
    """Returns members of true size for a group that has stacked state.

    They represent the first parameters that have the shape of the group's first parameter. The bits of matrix products
    depend on the size.
    """
    params = optimizer.param_groups[group]["params"]
    first = params[0]
    dtype = arithmetic_dtype(first.dtype, master_dtype)
    count = max(2, min(_STACK_MAX, _STACK_BYTES_MAX // max(1, first.numel() * dtype.itemsize)))
    same_shape = [(place, one) for place, one in enumerate(params) if one.shape == first.shape][:count]
    return [
        _Member(group, place, one, dtype, generator, dim_max=max(one.shape, default=1)) for place, one in same_shape
    ]


# The calls of a trial. Each call has the name of a method and, for each member, whether the member has a gradient.
_Plan = list[tuple[str, list[bool]]]


def _all_present(optimizer: torch.optim.Optimizer, members: Sequence[_Member]) -> _Plan:
    """Returns a plan of steps in which every member has a gradient.

    If the class has `train()`, the plan begins with it. If the class also has `eval()`, the plan calls `eval()` and
    `train()` before the last step.
    """
    every, none = [True] * len(members), [False] * len(members)
    plan: _Plan = [("step", every)] * _STEPS
    if callable(getattr(type(optimizer), "train", None)):
        # The plan calls a method twice, because the second call must change no parameter.
        plan = [("train", none), ("train", none), *plan]
        if callable(getattr(type(optimizer), "eval", None)):
            plan += [("eval", none), ("eval", none), ("train", none), ("step", every)]
    return plan


def _some_missing(optimizer: torch.optim.Optimizer, members: Sequence[_Member]) -> _Plan:
    """Returns a plan with one step for each member, in which only this member has no gradient.

    The last step has all gradients; for a single member, it is the only step. If the class has `train()`, the plan
    begins with it.
    """
    plan: _Plan = [("step", [number != step for number in range(len(members))]) for step in range(len(members))]
    plan = [(method, present) for method, present in plan if any(present)]
    plan.append(("step", [True] * len(members)))
    if callable(getattr(type(optimizer), "train", None)):
        plan.insert(0, ("train", [False] * len(members)))
    return plan


@dataclass(eq=False)
class _Comparison:
    """Compares steps of all members together with steps of one member at a time."""

    optimizer: torch.optim.Optimizer
    begin: SharedValues
    members: Sequence[_Member]
    run_mode: RunMode
    spread: bool  # True if each member has its real position in its group

    def __post_init__(self) -> None:
        try:
            self._one_by_one = _SeparateRun(self.optimizer, self.begin, self.members, self.run_mode)
            self._joint = _TogetherRun(self.optimizer, self.begin, self.members, spread=self.spread)
        except Exception as error:
            raise refused(
                self.optimizer, f"its attributes and options cannot be copied ({type(error).__name__}: {error})"
            ) from error
        self._last = ""
        # The numbers of groups in which the step of all members keeps the state of several members in a stacked tensor.
        self.stacked: set[int] = set()

    def follow(self, plan: _Plan, generator: torch.Generator) -> SharedValues:
        """Makes the calls of `plan` in both ways and compares the results; returns the shared values at the end.

        With `spread`, ends early if a step of all members fails.
        """
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
                # The step of all parameters fails with these gradients, so there is no result to compare.
                return False
            raise refused(optimizer, f"its {method} failed in a trial ({type(error).__name__}: {error})") from error
        idle = method in MODES and self._last in ("", method)
        if idle and not same(before, self._joint.now()[:2]):
            raise refused(
                optimizer,
                f"its {method}() changes parameters or their state even if the optimizer is in that mode already",
            )
        self._last = method
        try:
            self._one_by_one.do(method, gradients)
        except (ConfigError, Disagreement):
            raise
        except Exception as error:
            raise refused(
                optimizer,
                f"its {method} failed in a trial on one parameter at a time ({type(error).__name__}: {error})",
            ) from error
        self._require_same(method)
        return True

    def _require_same(self, method: str) -> None:
        values, states, shared = self._joint.now()
        others, other_states, other_shared = self._one_by_one.now()
        differs = next(iter(without_scratch(shared.changes(other_shared), self.run_mode.scratch)), None)
        if differs is not None:
            raise refused(
                self.optimizer,
                f"its {method} changes {differs} depending on how many parameters have a gradient, but memascend steps "
                "one parameter at a time",
            )
        # Adagrad's `__init__` makes state. Such state is compared only after the member's first gradient.
        begun = [state if other else {} for state, other in zip(states, other_states, strict=True)]
        stacks = _stacks(begun, other_states)
        if stacks is None or not same(values, others):
            raise refused(
                self.optimizer,
                "its update of one parameter depends on other parameters, but memascend updates one parameter at a "
                "time; use an optimizer that updates each parameter independently",
            )

        self.stacked |= {self.members[number].group for number in stacks}


def _stacks(joint: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> set[int] | None:
    """Compares the states of members; returns the numbers of the members that have a stack.

    A stack is the state of several consecutive members in stacked tensors. The first of these members has the stack,
    and the states of the rest are empty. Returns None if the states differ in any way that is not such a stack.
    """
    found, number = set(), 0
    while number < len(joint):
        state, count = joint[number], 1
        if not same(state, others[number]):
            plain = {name: value for name, value in state.items() if type(value) is torch.Tensor and value.dim()}
            # Tensors of other layouts, such as sparse tensors, have no slices to compare.
            tensors = {name: value for name, value in plain.items() if value.layout == torch.strided}
            count = min(map(len, tensors.values()), default=0)
            if count < 2 or any(joint[number + 1 : number + count]):
                return None
            parts = [state | {name: value[at : at + 1] for name, value in tensors.items()} for at in range(count)]
            if not same(parts, others[number : number + count]):
                return None
            found.add(number)
        number += count
    return found


def refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
    """Returns the error for an optimizer that cannot run on streamed state, with the reason `why`."""
    return ConfigError(
        f"{named(optimizer)} cannot run on streamed state: {why}; docs/optimizers.md lists optimizers that can"
    )


def require_independent(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None
) -> tuple[dict[SharedName, Any], RunMode]:
    """Rejects an optimizer if updates of one parameter at a time give other bits than a step of all parameters.

    See [Note: One at a time].

    Steps small parameters several times, first with all gradients, then without some gradients. Also calls `train()`
    and `eval()` if the class has these methods. Returns the shared values that a step changes, as they are at the end
    of the trial, and the first `RunMode` in which the bits agree.
    """
    first: ConfigError | None = None
    for omits, zeros in itertools.product((False, True), repeat=2):
        try:
            return _tried(optimizer, master_dtype, RunMode(omits=omits, zeros=zeros))
        except ConfigError as error:
            # An error about different bits explains more than an error about a step that failed.
            if first is None or (first.__cause__ is not None and error.__cause__ is None):
                first = error
    assert first is not None
    raise first


def _tried(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None, run_mode: RunMode
) -> tuple[dict[SharedName, Any], RunMode]:
    generator = torch.Generator().manual_seed(1)
    members = _chosen_members(optimizer, master_dtype, generator)
    begin = SharedValues.of(optimizer)
    try:
        with on_trial(optimizer):
            every = _Comparison(optimizer, begin, members, run_mode, spread=False)
            after = every.follow(_all_present(optimizer, members), generator)
            some = _Comparison(optimizer, begin, members, run_mode, spread=True)
            some.follow(_some_missing(optimizer, members), generator)
            for group in sorted(every.stacked):
                whole = _members_at_size(optimizer, group, master_dtype, generator)
                whole += [member for member in members if member.group != group]
                true = _Comparison(optimizer, begin, whole, run_mode, spread=False)
                true.follow([("step", [True] * len(whole))] * 2, generator)
    except Disagreement as other:
        name, scratch = other.place.name, run_mode.scratch
        is_attribute = other.place.group is None and name not in scratch
        if is_attribute and type(begin.attributes.get(name)) is torch.Tensor:
            # Try again with this attribute as scratch. The second trial fails if an update reads the attribute before
            # it writes the attribute.
            return _tried(optimizer, master_dtype, replace(run_mode, scratch=scratch | {name}))
        raise refused(optimizer, f"its step changes {other} to values that differ between parameters") from None
    changes = without_scratch(begin.changes(after), run_mode.scratch)
    return changes, replace(run_mode, stacks=bool(every.stacked))
