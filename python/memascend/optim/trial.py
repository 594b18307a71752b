"""Decides which optimizers can stream: torch's own by a tested list, any other class by a trial on small tensors."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import types
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memascend.errors import ConfigError
from memascend.optim.shared import (
    Disagreement,
    SharedName,
    SharedValues,
    arithmetic_dtype,
    attributes_of,
    cloned,
    common_end,
    copied,
    named,
    run,
    same,
    stand_in,
    storable,
    user_attributes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class _Draws(TorchDispatchMode):
    """Refuses operations that draw random numbers, whatever their tensors lie on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in a trial; to say so to torch's compiler would load it, which takes seconds.
        return False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A generator that the step makes itself begins alike for each parameter.
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            raise _draws_refused(self._optimizer)
        return func(*args, **(kwargs or {}))


def _draws_refused(optimizer: torch.optim.Optimizer) -> ConfigError:
    return ConfigError(
        f"{named(optimizer)} cannot run on streamed state: its step draws random numbers, which streamed parameters "
        "would get in another order than torch's; use an optimizer that draws none"
    )


@contextlib.contextmanager
def undrawn(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Refuse an optimizer that draws random numbers; those of torch, Python and numpy stay as they are."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    theirs: Any = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]), _Draws(optimizer):
            yield
        drawn = random.getstate() != before or (numpy is not None and numpy.random.get_state()[2] != theirs[2])
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(theirs)
    if drawn:
        raise _draws_refused(optimizer)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let functions that a step compiles run as they are written: for small tensors compiling would take minutes."""
    # Where it is not loaded, nothing was compiled yet, and loading it takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


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
            raise _reach_refused(optimizer, f"its {name} are those of another optimizer")
    held = [(f"its attribute {name!r}", value) for name, value in attributes_of(optimizer).items()]
    for group in optimizer.param_groups:
        held += [(f"the option {name!r} of a group", value) for name, value in group.items() if name != "params"]
    theirs = _Users(optimizer)
    for where, value in held:
        what = next(filter(None, map(theirs.kind, reached_from(value))), None)
        if what is not None:
            raise _reach_refused(optimizer, f"{where} holds {what}")


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


def _reach_refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
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


_STEPS = 4


# Tried parameters have at most so many elements in each dimension.
_TRIAL_DIM_MAX = 6


# At most so many of each group are tried.
_TRIED_MAX = 4


# What an optimizer may have beside step(), to change its parameters between training and evaluation.
MODES = ("train", "eval")


class _Member:
    """A parameter of the trial, and where the one that it stands for is in its group."""

    def __init__(self, group: int, position: int, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        self.group = group
        self.position = position
        self.shape = [min(dim, _TRIAL_DIM_MAX) for dim in parameter.shape]
        self.dtype = dtype
        self.attributes = user_attributes(parameter)
        self.begin = torch.empty(0)

    def drawn(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(self.shape, generator=generator).to(self.dtype)


class _Joint:
    """All members in one copy, as torch steps them."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, begin: SharedValues, members: Sequence[_Member], *, spread: bool
    ) -> None:
        """With `spread`, each is at the place that it has in its group, among others that never have a gradient."""
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
            parameter.grad = None if gradient is None else gradient.clone()
        run(self.copy, method)
        if any(id(key) not in self.known for key in self.copy.state):
            raise _refused(self.copy, "its step changes state that belongs to no parameter")

    def now(self) -> tuple[list[torch.Tensor], list[dict[str, Any]], SharedValues]:
        states = [dict(self.copy.state.get(parameter, {})) for parameter in self.parameters]
        return [parameter.data for parameter in self.parameters], states, SharedValues.of(self.copy)


class _OneByOne:
    """Each member in a copy of its own, which begins with the shared values of the step before."""

    def __init__(self, optimizer: torch.optim.Optimizer, begin: SharedValues, members: Sequence[_Member]) -> None:
        self._optimizer = optimizer
        self._members = members
        self._shared = begin.copy(deep=True)
        self._parameters = [stand_in(member.begin.clone(), member.attributes) for member in members]
        self._states: list[dict[str, Any]] = [{} for _ in members]

    def do(self, method: str, gradients: Sequence[torch.Tensor | None]) -> None:
        ends = []
        for number, (member, gradient) in enumerate(zip(self._members, gradients, strict=True)):
            if method == "step" and gradient is None:
                continue
            parameter = self._parameters[number]
            parameter.grad = None if gradient is None else gradient.clone()
            begin = self._shared.copy(deep=True)
            groups = [{**options, "params": []} for options in begin.groups]
            groups[member.group]["params"] = [parameter]
            state = self._states[number]
            copy = cloned(self._optimizer, begin.attributes, groups, {parameter: state} if state else {})
            run(copy, method)
            self._states[number] = dict(copy.state.get(parameter, {}))
            ends.append((member.group, self._shared.changes(SharedValues.of(copy))))
        changes = common_end(ends)
        lost = next((name for name, value in changes.items() if not storable(value)), None)
        if lost is not None:
            raise _refused(self._optimizer, f"its step changes {lost} to what is neither number nor text")
        self._shared = self._shared.with_changes(changes)

    def now(self) -> tuple[list[torch.Tensor], list[dict[str, Any]], SharedValues]:
        return [parameter.data for parameter in self._parameters], self._states, self._shared


def require_independent(optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> dict[SharedName, Any]:
    """Refuse an optimizer whose parameters do not get the same bits together and one at a time.

    They are stepped several times, all with a gradient, then some without; where it can be told to `train()` and to
    `eval()`, that is tried too.

    Returns:
        The values that its step changes for all parameters alike, as they are at the end of the trial.

    Raises:
        ConfigError: it says what differs.
    """
    members = _chosen(optimizer, master_dtype)
    begin = SharedValues.of(optimizer)
    with undrawn(optimizer), warnings.catch_warnings(), uncompiled():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(1)
        for member in members:
            member.begin = member.drawn(generator)
        after = _Comparison(optimizer, begin, members, spread=False).follow(_all_present(optimizer, members), generator)
        _Comparison(optimizer, begin, members, spread=True).follow(_some_missing(optimizer, members), generator)
    return begin.changes(after)


def _chosen(optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> list[_Member]:
    """The first and the last of each group, and some that differ from these in dimensions or type."""
    members = []
    for number, group in enumerate(optimizer.param_groups):
        # Whole numbers have no gradient.
        every = [(place, given) for place, given in enumerate(group["params"]) if given.is_floating_point()]
        kinds = {(parameter.dim(), parameter.dtype): (place, parameter) for place, parameter in reversed(every)}
        chosen = dict([*every[:1], *every[-1:], *list(kinds.values())[:_TRIED_MAX]])
        for place in sorted(chosen):
            dtype = arithmetic_dtype(chosen[place].dtype, master_dtype)
            members.append(_Member(number, place, chosen[place], dtype))
    return members


_Plan = list[tuple[str, list[bool]]]


def _all_present(optimizer: torch.optim.Optimizer, members: Sequence[_Member]) -> _Plan:
    """Steps with all gradients; then an evaluation in between."""
    every, none = [True] * len(members), [False] * len(members)
    plan: _Plan = [("step", every)] * _STEPS
    if callable(getattr(type(optimizer), "train", None)):
        # Twice: the second time there is nothing to do.
        plan = [("train", none), ("train", none), *plan]
        if callable(getattr(type(optimizer), "eval", None)):
            plan += [("eval", none), ("eval", none), ("train", none), ("step", every)]
    return plan


def _some_missing(optimizer: torch.optim.Optimizer, members: Sequence[_Member]) -> _Plan:
    """Steps in each of which another member has no gradient."""
    plan: _Plan = [("step", [number != step for number in range(len(members))]) for step in range(len(members))]
    plan = [(method, present) for method, present in plan if any(present)]
    plan.append(("step", [True] * len(members)))
    if callable(getattr(type(optimizer), "train", None)):
        plan.insert(0, ("train", [False] * len(members)))
    return plan


class _Comparison:
    """Both ways, step by step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, begin: SharedValues, members: Sequence[_Member], *, spread: bool
    ) -> None:
        self._optimizer = optimizer
        self._members = members
        self._spread = spread
        try:
            self._one_by_one = _OneByOne(optimizer, begin, members)
            self._joint = _Joint(optimizer, begin, members, spread=spread)
        except Exception as error:
            raise _refused(optimizer, f"what it holds cannot be copied ({_words(error)})") from error
        self._last = ""

    def follow(self, plan: _Plan, generator: torch.Generator) -> SharedValues:
        """Do what is planned; the shared values at the end."""
        for method, present in plan:
            gradients = [
                member.drawn(generator) if there else None for member, there in zip(self._members, present, strict=True)
            ]
            if not self._do(method, gradients):
                break
        return SharedValues.of(self._joint.copy)

    def _do(self, method: str, gradients: Sequence[torch.Tensor | None]) -> bool:
        optimizer = self._optimizer
        before = copied(self._joint.now()[:2], deep=True)
        try:
            self._joint.do(method, gradients)
        except ConfigError:
            raise
        except Exception as error:
            if self._spread:
                # In torch such a step is an error, too: there is nothing to compare with.
                return False
            raise _refused(optimizer, f"its {method} failed on small parameters ({_words(error)})") from error
        idle = method in MODES and self._last in ("", method)
        if idle and not same(before, self._joint.now()[:2]):
            raise _refused(optimizer, f"its {method} changes parameters also where there is nothing to change")
        self._last = method
        try:
            self._one_by_one.do(method, gradients)
        except ConfigError:
            raise
        except Disagreement as other:
            raise _refused(optimizer, f"its {method} changes {other} by values of single parameters") from None
        except Exception as error:
            raise _refused(
                optimizer, f"its {method} failed on one small parameter at a time ({_words(error)})"
            ) from error
        _require_same(optimizer, self._joint, self._one_by_one, method)
        return True


def _require_same(optimizer: torch.optim.Optimizer, joint: _Joint, one_by_one: _OneByOne, method: str) -> None:
    values, states, shared = joint.now()
    others, other_states, other_shared = one_by_one.now()
    differs = next(iter(shared.changes(other_shared)), None)
    if differs is not None:
        raise _refused(
            optimizer,
            f"its {method} changes {differs} by how many parameters have a gradient: one at a time it would be another",
        )
    # Where nothing was stepped yet, there may be what was made beforehand (Adagrad): it counts from the first gradient.
    begun = [state if other else {} for state, other in zip(states, other_states, strict=True)]
    if not same([*values, *begun], [*others, *other_states]):
        raise _refused(
            optimizer,
            "its update of one parameter depends on the others, so that one at a time it would be another; use an "
            "optimizer whose update needs one parameter at a time",
        )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
    return ConfigError(f"{named(optimizer)} cannot run on streamed state: {why}")


def stepping(
    optimizer: torch.optim.Optimizer,
    group: int,
    parameter: torch.nn.Parameter,
    gradients: Iterator[torch.Tensor],
    options: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Step one parameter in place of the original's; its state after each step.

    Args:
        optimizer: the original; nothing is done to it.
        group: the number of its group.
        parameter: changes in place.
        gradients: one for each step.
        options: what stands in every group that has such an option.
    """
    shared = SharedValues.of(optimizer).copy(deep=True)
    for number, made in enumerate(shared.groups):
        made.update({name: value for name, value in options.items() if name in made})
        made["params"] = [parameter] if number == group else []
    copy = cloned(optimizer, shared.attributes, shared.groups, {})
    if callable(getattr(type(optimizer), "train", None)):
        run(copy, "train")
    for gradient in gradients:
        parameter.grad = gradient
        run(copy)
        yield dict(copy.state.get(parameter, {}))


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
