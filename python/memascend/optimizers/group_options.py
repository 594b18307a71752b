"""Converts options of parameter groups to JSON and restores them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError
from memascend.optimizers.option_values import copied
from memascend.optimizers.shared_values import GONE, SharedName, plain, put, restored, storable

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Mapping, Sequence


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that JSON can hold; a tensor of one element becomes a number."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        if storable(value):
            found[name] = plain(value)
    return found


def require_as_many(groups: Sequence[dict[str, Any]], stored: list[dict[str, Any]] | None) -> None:
    """Refuse stored options that are not those of as many groups.

    Raises:
        ConfigError: there are others; nothing was changed.
    """
    if stored is None or len(stored) != len(groups):
        names = ", ".join(f"group {number}: {len(group['params'])}" for number, group in enumerate(groups))
        raise ConfigError(
            f"what is stored has the options of {len(stored or [])} parameter groups, and the optimizer has "
            f"{len(groups)} ({names} parameters); nothing was changed: make the optimizer with the groups that it had, "
            'or begin anew with existing="replace"'
        )


def take_options(
    groups: Sequence[dict[str, Any]],
    stored: list[dict[str, Any]] | None,
    undo: contextlib.ExitStack,
    changed_by_steps: Mapping[SharedName, Any] | None = None,
) -> None:
    """Let the groups have the options that are stored; `undo` gives them back their own.

    Options that the optimizer's own steps change are no surprise: of those nothing is said.
    """
    examples = changed_by_steps or {}
    require_as_many(groups, stored)
    assert stored is not None
    changed = []
    for number, (group, options) in enumerate(zip(groups, stored, strict=True)):
        now = options_of(group)
        for name, value in options.items():
            if now.get(name) != value:
                place = SharedName(number, name)
                if place not in examples and not _is_scheduled(name, now, options):
                    changed.append((number, name, now.get(name), value))
                undo.callback(put, group, name, copied(group.get(name, GONE)))
                put(group, name, restored(value, examples.get(place, group.get(name))))
    if changed:
        number, name, own, _ = changed[0]
        words = (
            "the stored options stand, and differ from the optimizer's: "
            + "; ".join(f"group {number}: {name} {own} -> {value}" for number, name, own, value in changed)
            + ". To train with your own, set them after offload(): "
            + f"optimizer.param_groups[{number}][{name!r}] = {own!r}"
        )
        if any(name == "lr" for _, name, _, _ in changed):
            words += "; a learning rate scheduler computes from its base_lrs: set those, too"
        warnings.warn(words, stacklevel=4)


def _is_scheduled(name: str, given: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether a scheduler made an option what it is, from the value that is given now too."""
    if name not in given:
        # A scheduler's own: initial_lr, max_lr and their like.
        return True
    return name == "lr" and stored.get("initial_lr") in (given["lr"], given.get("initial_lr", GONE))
