"""Copies optimizers and their options, and tracks the values that all parameters of an optimizer share."""

from __future__ import annotations

import copy as copying
import numbers
import types
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memascend.errors import ConfigError
from memascend.tensors import same_bits
from memascend.text import warn

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Container, Mapping, Sequence


# Tensors up to this number of elements are copied for each update. A larger tensor is assumed to be a table that steps
# only read.
_COPIED_NUMEL = 4096


def copied(value: Any, *, deep: bool = False, memo: dict[int, Any] | None = None) -> Any:
    """Returns a copy of nested containers and tensors; repeated references to one object stay references to one copy.

    Without `deep`, large tensors and objects of other classes are shared instead of copied. With `deep`, only
    functions, classes and Python modules are shared. `memo` holds the copies made so far, by the ids of their
    originals.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]
    made = _copied(value, deep=deep, memo=memo)
    # `memo` keeps the value alive, so that no new object gets the id of the value.
    memo[id(value)] = made, value
    return made


def _copied(value: Any, *, deep: bool, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        small = value.numel() <= _COPIED_NUMEL and kind is torch.Tensor
        return value.detach().clone() if small or deep else value
    if kind in {dict, OrderedDict}:
        return kind((name, copied(part, deep=deep, memo=memo)) for name, part in value.items())
    if kind is defaultdict:
        parts = {name: copied(part, deep=deep, memo=memo) for name, part in value.items()}
        return defaultdict(value.default_factory, parts)
    if kind in {list, tuple, set, deque}:
        made = [copied(part, deep=deep, memo=memo) for part in value]
        return deque(made, value.maxlen) if kind is deque else kind(made)
    return copying.deepcopy(value) if deep and kind is not types.ModuleType else value


def same(one: Any, other: Any) -> bool:
    """True if two values, such as results of `copied`, have one type and are equal; compares tensors bit for bit."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        equal = _same_tensor(one, other)
    elif isinstance(one, dict):
        equal = one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    elif isinstance(one, list | tuple | deque):
        equal = len(one) == len(other) and all(map(same, one, other))
    elif isinstance(one, int | float | str | bytes | complex | set | frozenset):
        # NaN is not equal to NaN, but is the same value here.
        equal = bool(one == other or (one != one and other != other))  # noqa: PLR0124
    else:
        equal = hasattr(one, "__dict__") and same(vars(one), vars(other))
    return equal


def _same_tensor(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if hasattr(one, "__tensor_flatten__"):
        (names, context), (others, their_context) = one.__tensor_flatten__(), other.__tensor_flatten__()
        return (
            list(names) == list(others)
            and same(context, their_context)
            and all(same(getattr(one, name), getattr(other, name)) for name in names)
        )
    if one.layout != torch.strided:
        return False
    return same_bits(one, other)


# Attributes that `attributes_of` leaves out. Copies get the state and the groups separately. Gradient scalers set the
# two other attributes.
_OWN = frozenset({"state", "param_groups", "grad_scale", "found_inf"})


def named(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of the optimizer's class for messages."""
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__qualname__


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the optimizer's attributes, except groups, state, hooks, methods, and what gradient scalers set."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN
        and not name.startswith("_optimizer_")
        and not callable(getattr(torch.optim.Optimizer, name, None))
        # Methods that are bound to the optimizer are left out: `cloned` binds them to the copy.
        and not (isinstance(value, types.MethodType) and value.__self__ is optimizer)
    }


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a group's options; later changes of the group do not affect the copy."""
    return {name: copied(value) for name, value in group.items() if name != "params"}


def arithmetic_dtype(dtype: torch.dtype, master_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a parameter is updated: the dtype of its master weights, or else its own dtype."""
    return master_dtype if master_dtype is not None and dtype.itemsize == 2 else dtype


def user_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that users set on a parameter; an optimizer may read them."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_memascend")}


def plain_parameter(values: torch.Tensor, attributes: Mapping[str, Any] | None = None) -> torch.nn.Parameter:
    """Returns a parameter on the memory of `values`, with the user's attributes of the real parameter."""
    parameter = torch.nn.Parameter(values)
    vars(parameter).update(attributes or {})
    return parameter


def give_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Sets `parameter.grad` for a step of a copy."""
    parameter.grad = gradient


def cloned(
    optimizer: torch.optim.Optimizer,
    attributes: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
) -> torch.optim.Optimizer:
    """Returns a copy of the optimizer, of the same class, with these attributes, groups and state.

    `__init__` does not run, because its arguments are unknown. The copy has no hooks: the user's hooks belong to whole
    steps of the original optimizer.
    """
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(attributes)
    for name, value in vars(optimizer).items():
        if isinstance(value, types.MethodType) and value.__self__ is optimizer:
            copy.__dict__[name] = types.MethodType(value.__func__, copy)
    for moment in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            copy.__dict__[f"_optimizer_{moment}_{when}_hooks"] = OrderedDict()
    states = defaultdict(dict, {parameter: dict(known) for parameter, known in state.items()})
    copy.__dict__.update(param_groups=list(groups), state=states)
    if isinstance(copy, torch.optim.Adagrad):
        _begin_adagrad(copy)
    return copy  # type: ignore[no-any-return]


def run(copy: torch.optim.Optimizer, method: str = "step") -> None:
    """Runs a method of a copy as its class defines it, without hooks."""
    function = getattr(type(copy), method)
    # torch wraps the step of every class to run hooks, including global hooks.
    if getattr(function, "hooked", False):
        function = function.__wrapped__
    function(copy)


def _begin_adagrad(copy: torch.optim.Adagrad) -> None:
    """Creates the state of Adagrad, because some versions of torch create this state only in `__init__`."""
    begin = copy.defaults["initial_accumulator_value"]
    for group in copy.param_groups:
        for parameter in group["params"]:
            if not copy.state[parameter]:
                made = torch.optim.Adagrad([parameter], initial_accumulator_value=begin)
                copy.state[parameter] = made.state[parameter]


_UNCHANGED = object()
# Stands for a value that is missing, or that a step removed.
GONE = object()


class SharedName(NamedTuple):
    """The name of a shared value: an option of group number `group`, or an attribute (`group` is None)."""

    group: int | None
    name: str

    def __str__(self) -> str:
        return f"its attribute {self.name!r}" if self.group is None else f"the option {self.name!r} of a group"


class Disagreement(Exception):
    """Raised if the runs of two parameters left different values under one shared name."""

    def __init__(self, place: SharedName) -> None:
        super().__init__(str(place))
        self.place = place


@dataclass(frozen=True)
class SharedValues:
    """The values that all parameters of an optimizer share: its attributes, and the options of each group."""

    attributes: dict[str, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> SharedValues:
        """Returns the optimizer's shared values, without copying them."""
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return cls(attributes_of(optimizer), groups)

    def copy(self, *, deep: bool = False) -> SharedValues:
        """Returns a copy; see `copied`."""
        # One call of `copied` copies attributes and groups, so that a tensor in several groups stays a single tensor.
        # The default of an option is often such a tensor.
        attributes, groups = copied((self.attributes, self.groups), deep=deep)
        return SharedValues(attributes, groups)

    def changes(self, after: SharedValues) -> dict[SharedName, Any]:
        """Returns the values of `after` that are new or changed; a removed value is `GONE`."""
        found = {SharedName(None, name): value for name, value in _changed(self.attributes, after.attributes).items()}
        for number, (before, group) in enumerate(zip(self.groups, after.groups, strict=True)):
            found |= {SharedName(number, name): value for name, value in _changed(before, group).items()}
        return found

    def with_changes(self, changes: Mapping[SharedName, Any]) -> SharedValues:
        """Returns a copy with `changes` applied."""
        made = self.copy()
        for place, value in changes.items():
            put(made.attributes if place.group is None else made.groups[place.group], place.name, value)
        return made


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    every = dict.fromkeys([*before, *after])
    return {
        name: after.get(name, GONE)
        for name in every
        if not (name in before and name in after and same(before[name], after[name]))
    }


def common_end(ends: Sequence[tuple[int, Mapping[SharedName, Any]]]) -> dict[SharedName, Any]:
    """Returns the changes of a whole step, given each run's group number and the changes by that run.

    The runs of a group's parameters decide about the options of the group. All runs decide about attributes, and about
    the options of a group that had no runs.

    Raises:
        Disagreement: the runs ended with different values.
    """
    places = dict.fromkeys(place for _, changes in ends for place in changes)
    found: dict[SharedName, Any] = {}
    for place in places:
        own = [changes for number, changes in ends if number == place.group] or [changes for _, changes in ends]
        values = [changes.get(place, _UNCHANGED) for changes in own]
        if not all(same(values[0], value) for value in values[1:]):
            raise Disagreement(place)
        if values[0] is not _UNCHANGED:
            found[place] = values[0]
    return found


def storable(value: Any) -> bool:
    """True if a value can be stored as JSON and restored without loss."""
    # This accepts numpy's numbers, too: numpy.float64 is a subclass of float, and numpy's integers are registered as
    # Integral.
    if type(value) in {bool, int, str, type(None)} or isinstance(value, float | numbers.Integral):
        return True
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() == 1 and not value.dtype.is_complex
    if type(value) in {list, tuple}:
        return all(map(storable, value))
    return type(value) is dict and all(type(name) is str and storable(part) for name, part in value.items())


def plain(value: Any) -> Any:
    """Converts a storable value for JSON."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, float):
        return float(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def put(home: dict[Any, Any], name: Any, value: Any) -> None:
    """Sets `home[name]`, or removes it if `value` is `GONE`.

    A tensor of the same dtype and shape is overwritten in place, because groups and schedulers may share it.
    """
    if value is GONE:
        home.pop(name, None)
        return
    now: Any = home.get(name)
    tensors = type(now) is torch.Tensor and isinstance(value, torch.Tensor)
    if tensors and (now.dtype, now.shape) == (value.dtype, value.shape):
        now.detach().copy_(value)
    elif type(now) is dict and type(value) is dict and now.keys() == value.keys():
        for part in now:
            put(now, part, value[part])
    else:
        home[name] = copied(value)


def restored(value: Any, like: Any) -> Any:
    """Converts a value from JSON to tensors and tuples where the earlier value, `like`, has tensors and tuples."""
    if isinstance(like, torch.Tensor) and value is not None:
        return torch.full_like(like, value)
    if isinstance(like, list | tuple) and isinstance(value, list):
        kinds = [*like, *[None] * len(value)]
        parts = [restored(part, kind) for part, kind in zip(value, kinds, strict=False)]
        return tuple(parts) if isinstance(like, tuple) else parts
    if isinstance(like, dict) and isinstance(value, dict):
        return {name: restored(part, like.get(name)) for name, part in value.items()}
    return value


@dataclass(frozen=True)
class TensorParts:
    """Describes how a tensor of a subclass is composed of other tensors."""

    kind: Any  # the subclass
    context: Any  # the second result of `__tensor_flatten__`
    size: torch.Size  # the shape of the composed tensor
    stride: tuple[int, ...]  # the strides of the composed tensor
    parts: dict[str, TensorParts | None]  # by name; None for a plain tensor, else the composition of the part

    def fits(self, value: Any) -> bool:
        """True if `value` has this composition, so that `together` can restore it."""
        other = parts_of(value)
        if other is None or other.kind is not self.kind or other.size != self.size or other.stride != self.stride:
            return False
        if list(other.parts) != list(self.parts) or not same(other.context, self.context):
            return False
        return all(
            inner.fits(getattr(value, name)) if inner is not None else other.parts[name] is None
            for name, inner in self.parts.items()
        )

    def names(self, name: str) -> list[str]:
        """Returns the names of the plain tensors in a value called `name`."""
        found: list[str] = []
        for part, inner in self.parts.items():
            found += [f"{name}.{part}"] if inner is None else inner.names(f"{name}.{part}")
        return found

    def apart(self, name: str, value: Any) -> dict[str, torch.Tensor]:
        """Returns the plain tensors of `value`, by name; `value` must have parts of these names."""
        found: dict[str, torch.Tensor] = {}
        for part, inner in self.parts.items():
            tensor: torch.Tensor = getattr(value, part)
            found |= {f"{name}.{part}": tensor} if inner is None else inner.apart(f"{name}.{part}", tensor)
        return found

    def together(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the composed tensor, which uses the memory of the plain tensors in `tensors`."""
        parts = {
            part: tensors[f"{name}.{part}"] if inner is None else inner.together(f"{name}.{part}", tensors)
            for part, inner in self.parts.items()
        }
        made: torch.Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return made


def parts_of(value: Any) -> TensorParts | None:
    """Returns the composition of a tensor subclass; None for a plain tensor and for any other value."""
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return None
    names, context = value.__tensor_flatten__()
    parts = {name: parts_of(getattr(value, name)) for name in names}
    return TensorParts(type(value), context, value.shape, value.stride(), parts)


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a group that JSON can hold; a tensor of one element becomes a number."""
    return {
        name: plain(value) for name, value in group.items() if name not in ("params", "param_names") and storable(value)
    }


def require_as_many(groups: Sequence[dict[str, Any]], stored: list[dict[str, Any]] | None) -> None:
    """Rejects stored options if the number of stored groups differs from the number of groups."""
    if stored is None or len(stored) != len(groups):
        names = ", ".join(f"group {number}: {len(group['params'])}" for number, group in enumerate(groups))
        raise ConfigError(
            f"the stored state has options for {len(stored or [])} parameter groups, but the optimizer has "
            f"{len(groups)} ({names} parameters). Nothing was changed: make the optimizer with the stored run's "
            'groups, or start a new run with existing="replace"'
        )


# Group options that torch's schedulers compute from the learning rate.
_RATES = frozenset({"initial_lr", "max_lr", "min_lr"})


def take_options(
    groups: Sequence[dict[str, Any]],
    stored: list[dict[str, Any]] | None,
    undo: contextlib.ExitStack,
    changed_by_steps: Mapping[SharedName, Any],
    scheduled: Container[str],
) -> list[dict[str, Any]]:
    """Sets the stored options on the groups; returns the groups' own options, which `undo` restores.

    Warns about options that differ, except options that the optimizer's own steps or its schedulers change.
    """
    require_as_many(groups, stored)
    assert stored is not None
    given = [options_of(group) for group in groups]
    changed = []
    for number, (group, now, options) in enumerate(zip(groups, given, stored, strict=True)):
        for name, value in options.items():
            if now.get(name) != value:
                place = SharedName(number, name)
                if place not in changed_by_steps and name not in scheduled and not _is_scheduled(name, now, options):
                    changed.append((number, name, now.get(name), value))
                undo.callback(put, group, name, copied(group.get(name, GONE)))
                # An option that a scheduler adds has the type of the learning rate, which may be a tensor.
                like = group.get(name, group.get("lr") if name in _RATES else None)
                put(group, name, restored(value, changed_by_steps.get(place, like)))
    if changed:
        number, name, own, _ = changed[0]
        words = (
            "the stored options are used instead of the optimizer's: "
            + "; ".join(f"group {number}: {name} {own} -> {value}" for number, name, own, value in changed)
            + ". To use your own options, set them after offload(): "
            + f"optimizer.param_groups[{number}][{name!r}] = {own!r}"
        )
        if any(name == "lr" for _, name, _, _ in changed):
            words += "; a learning rate scheduler computes from its base_lrs: set these, too"
        warn(words)
    return given


def _is_scheduled(name: str, given: dict[str, Any], stored: dict[str, Any]) -> bool:
    """True if a scheduler added the stored option, or computed it from the given learning rate."""
    if name not in given:
        # A scheduler adds such an option: initial_lr, max_lr and so on.
        return True
    return name == "lr" and stored.get("initial_lr") in (given["lr"], given.get("initial_lr", GONE))
