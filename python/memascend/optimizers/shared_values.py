"""Tracks options and attributes that a step changes for all parameters alike, and whether they agree.

A step that changes `group["step"]`, `self.initialized` and their like runs for one parameter at a time. Each run begins
with the values that the last committed step left; where all of them end with the same ones, those are the step's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.optimizers.clone import attributes_of
from memascend.optimizers.option_values import copied, same

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNCHANGED = object()
# In the place of a value: there is none, or a step took it away.
GONE = object()


class SharedName(NamedTuple):
    """Where a value stands: an option of the group of that number, or an attribute of the optimizer."""

    group: int | None
    name: str

    def __str__(self) -> str:
        return f"its attribute {self.name!r}" if self.group is None else f"the option {self.name!r} of a group"


class Disagreement(Exception):
    """Two parameters ended with different values."""

    def __init__(self, place: SharedName) -> None:
        super().__init__(str(place))
        self.place = place


@dataclass(frozen=True)
class SharedValues:
    """What an optimizer holds beside the state of its parameters: its attributes, and the options of each group."""

    attributes: dict[str, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> SharedValues:
        """Those of an optimizer, which later changes reach."""
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return cls(attributes_of(optimizer), groups)

    def copy(self, *, deep: bool = False) -> SharedValues:
        """A copy that later changes do not reach; see `copied`."""
        # A default is often one tensor in all groups.
        attributes, groups = copied((self.attributes, self.groups), deep=deep)
        return SharedValues(attributes, groups)

    def changes(self, after: SharedValues) -> dict[SharedName, Any]:
        """The values that are others now."""
        found = {SharedName(None, name): value for name, value in _changed(self.attributes, after.attributes).items()}
        for number, (before, group) in enumerate(zip(self.groups, after.groups, strict=True)):
            found |= {SharedName(number, name): value for name, value in _changed(before, group).items()}
        return found

    def with_changes(self, changes: Mapping[SharedName, Any]) -> SharedValues:
        """These, but for what is changed."""
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
    """What a step changed, from what the run of each parameter changed, beside the number of the parameter's group.

    An option of a group is what the group's own parameters made of it; where none of them took part, what the others
    did.

    Raises:
        Disagreement: they did not end alike.
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
    """Whether a value can be stored as JSON and come back as it was."""
    if type(value) in {bool, int, float, str, type(None)}:
        return True
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() == 1 and not value.dtype.is_complex
    if type(value) in {list, tuple}:
        return all(map(storable, value))
    return type(value) is dict and all(type(name) is str and storable(part) for name, part in value.items())


def plain(value: Any) -> Any:
    """Such a value as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def put(home: dict[Any, Any], name: Any, value: Any) -> None:
    """Set a value where it stands; a tensor keeps its place in memory, since groups and schedulers may share it."""
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
    """A value from JSON, of the kind of another one that stood there."""
    if isinstance(like, torch.Tensor) and value is not None:
        return torch.full_like(like, value)
    if isinstance(like, tuple) and isinstance(value, list):
        return tuple(_each(value, like))
    if isinstance(like, list) and isinstance(value, list):
        return _each(value, like)
    if isinstance(like, dict) and isinstance(value, dict):
        return {name: restored(part, like.get(name)) for name, part in value.items()}
    return value


def _each(values: list[Any], like: Sequence[Any]) -> list[Any]:
    kinds = [*like, *[None] * len(values)]
    return [restored(value, kind) for value, kind in zip(values, kinds, strict=False)]
