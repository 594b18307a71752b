"""Unwraps and joins the optimizers that `offload()` gets, and records which group owns each parameter."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class JoinedOptimizers(torch.optim.Optimizer):
    """A single optimizer that joins the optimizers of a list that `offload()` got. Its `step()` never runs."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        """Uses the group dicts of the members, so that an option set in a member is set in this optimizer, too."""
        # Optimizer.__init__ is not called: it rejects a mix of groups with and without parameter names.
        self.members = tuple(members)
        self.param_groups = [group for member in self.members for group in member.param_groups]
        first, *others = self.members
        self.defaults = {
            name: value for name, value in first.defaults.items() if all(name in o.defaults for o in others)
        }


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the joined optimizers, or the optimizer itself if it joins none."""
    return optimizer.members if isinstance(optimizer, JoinedOptimizers) else (optimizer,)


def joined(optimizers: Sequence[Any]) -> Any:
    """Joins a list of optimizers into one optimizer; returns the only optimizer of a list with one element."""
    if not optimizers:
        raise ConfigError("the list of optimizers is empty: give the optimizers that own the model's parameters")
    for place, one in enumerate(optimizers):
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(f"optimizer[{place}] must be a torch.optim.Optimizer, not {type(one).__name__}")
        if any(one is before for before in optimizers[:place]):
            raise ConfigError(f"optimizer[{place}] is in the list twice: give each optimizer once")
    return optimizers[0] if len(optimizers) == 1 else JoinedOptimizers(optimizers)


def title_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the optimizer's name in stores and checkpoints: "AdamW", or "Muon + AdamW"."""
    return " + ".join(type(member).__name__ for member in members_of(optimizer))


def roster_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the class and number of groups of each joined optimizer, for commits; empty for a single optimizer."""
    members = members_of(optimizer)
    if len(members) == 1:
        return []
    return [{"optimizer": type(member).__name__, "groups": len(member.param_groups)} for member in members]


def is_roster(value: Any) -> bool:
    """True if a value from a store or checkpoint has the form of `roster_of`'s result."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("optimizer"), str) and isinstance(one.get("groups"), int)
        for one in value
    )


def is_owners(value: Any) -> bool:
    """True if a value from a store or checkpoint has the form of `GroupOwners.runs`'s result."""
    return (
        isinstance(value, list)
        and len(value) % 2 == 0
        and all(isinstance(number, int) and number >= 0 for number in value)
    )


def require_roster(own: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], where: str) -> None:
    """Rejects a store or checkpoint that was made with other joined optimizers.

    `where` names the store or checkpoint. `own` and `stored` are results of `roster_of`. They are empty for a single
    optimizer, so two single optimizers are not compared.
    """
    if [(one["optimizer"], one["groups"]) for one in own] != [(one["optimizer"], one["groups"]) for one in stored]:
        had, has = _listed(stored), _listed(own)
        raise ConfigError(
            f"{where} was made with {had}, but offload() got {has}: pass the same optimizers with the same groups, in "
            "the same order"
        )


# The maximum number of runs (see `GroupOwners`) that a commit stores, because a commit has room for 128 KiB of options.
# Even a model of thousands of layers needs fewer runs.
_RUNS_MAX = 4096


class GroupOwners:
    """The group of each parameter, for commits.

    A resume gives stored options to groups by number, so each group must have the same parameters as before. A commit
    stores the group of each parameter as runs, in the order of parameter names. A run is two numbers: the number of a
    group, and the number of consecutive parameters that the group owns.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """`names` has the parameters' names by id.

        With several ranks, `names` has only parameters with rows on this rank.
        """
        groups = optimizer.param_groups
        owned = [(id(one), number) for number, group in enumerate(groups) for one in group["params"]]
        self._owners = dict(sorted((names[one], number) for one, number in owned if one in names))
        self._count = len(groups)

    def runs(self) -> list[int]:
        """Returns the runs for a commit; empty if only one group exists, or if there are too many runs."""
        runs = [(number, sum(1 for _ in run)) for number, run in groupby(self._owners.values())]
        return list(chain(*runs)) if self._count > 1 and len(runs) <= _RUNS_MAX else []

    def require_same(self, groups: int, runs: Sequence[int], where: str) -> None:
        """Rejects stored options if their groups owned other parameters than the present groups.

        `groups` is the stored number of groups. `where` names the store or checkpoint.
        """
        # `require_as_many` rejects another number of groups. A rank without rows of some parameters has fewer
        # parameters than the stored runs, and compares nothing. The first rank, which has rows of all parameters,
        # compares.
        if groups != self._count or sum(runs[1::2]) != len(self._owners):
            return
        stored = [number for number, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]
        moved = [
            f"{name} was in group {had} and is in group {has}"
            for (name, has), had in zip(self._owners.items(), stored, strict=True)
            if had != has
        ]
        if moved:
            raise ConfigError(
                f"{where} has options (lr, weight_decay and so on) for each group, but in the stored run the groups "
                f"had other parameters: {'; '.join(moved[:3])}{'; and so on' if moved[3:] else ''}. Nothing was "
                "changed: make the optimizer with the groups of the stored run"
            )


def _listed(roster: Sequence[Mapping[str, Any]]) -> str:
    words = [f"{one['optimizer']} ({one['groups']} group{'' if one['groups'] == 1 else 's'})" for one in roster]
    return " and ".join(words) or "one optimizer"


def require_one_owner(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]) -> None:
    """Rejects a parameter that more than one optimizer owns."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for member in members_of(optimizer):
        for group in member.param_groups:
            for parameter in group["params"]:
                other = owners.setdefault(id(parameter), member)
                if other is not member:
                    name = next((name for name, one in named.items() if one is parameter), "a parameter")
                    raise ConfigError(
                        f"{name} is owned by two of the optimizers ({type(other).__name__} and "
                        f"{type(member).__name__}), and would be updated by both: pass it to only one of them"
                    )


class JoinedHooks(OrderedDict[int, Any]):
    """The hooks of the optimizer that `offload()` returns, together with the hooks of the original optimizers."""

    def __init__(self, members: Iterable[dict[int, Any]]) -> None:
        super().__init__()
        self._members = tuple(members)

    def values(self) -> Any:
        """Returns all hooks: first the hooks of the original optimizers, in their order."""
        return list(chain(*(member.values() for member in self._members), super().values()))


# For each wrapper class: the attribute that has the optimizer, and the call that wraps the optimizer. The table has
# names instead of classes, because the libraries may not be installed.
_WRAPPERS = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): ("optimizer", "accelerator.prepare()"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"): ("_optimizer", "fabric.setup()"),
    ("lightning_fabric.wrappers", "_FabricOptimizer"): ("_optimizer", "fabric.setup()"),
}


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside a wrapper of accelerate or Fabric; joins the optimizers of a list."""
    if isinstance(optimizer, list | tuple):
        return joined([_unwrapped(one) for one in optimizer])
    return _unwrapped(optimizer)


def _unwrapped(optimizer: Any) -> Any:
    found = _wrapper(optimizer)
    if found is None:
        return optimizer
    attribute, call = found
    more = _more_than_steps(optimizer)
    if more is not None:
        raise ConfigError(
            f"{more}, but offload() would unwrap this optimizer: call offload() with the unwrapped model and "
            f"optimizer, and pass its results to {call}"
        )
    return getattr(optimizer, attribute)


def _more_than_steps(wrapper: Any) -> str | None:
    """Describes what a wrapper does in addition to calling step(); None if it only calls step()."""
    if hasattr(wrapper, "gradient_state"):
        if wrapper.scaler is not None:
            return "the AcceleratedOptimizer scales gradients (fp16)"
        steps = wrapper.gradient_state.num_steps
        return None if steps == 1 else f"the AcceleratedOptimizer steps only once in {steps} backwards"
    strategy = wrapper._strategy  # noqa: SLF001
    if type(strategy).__name__ != "SingleDeviceStrategy":
        return f"Fabric's optimizer is stepped by its {type(strategy).__name__}"
    if getattr(strategy.precision, "scaler", None) is not None:
        return f"Fabric's {type(strategy.precision).__name__} scales gradients (fp16)"
    return None


def _wrapper(optimizer: Any) -> tuple[str, str] | None:
    kinds = ((kind.__module__, kind.__name__) for kind in type(optimizer).__mro__)
    return next((_WRAPPERS[kind] for kind in kinds if kind in _WRAPPERS), None)


def wrap_again(optimizer: Any, offloaded: torch.optim.Optimizer) -> None:
    """Puts the offloaded optimizer into the wrapper of the original optimizer, which user code may still use."""
    found = _wrapper(optimizer)
    if found is not None:
        setattr(optimizer, found[0], offloaded)
