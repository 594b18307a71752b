"""The optimizers that offload() is given: unwrapped, joined where there are several, and who owns which parameter."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class JoinedOptimizers(torch.optim.Optimizer):
    """The optimizers of a list that `offload()` is given. This one is never stepped."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        """The groups are the members' own dicts, so that an option set on either is set on both."""
        # torch's own __init__ would reject groups with names of parameters beside groups without.
        self.members = tuple(members)
        self.param_groups = [group for member in self.members for group in member.param_groups]
        first, *others = self.members
        self.defaults = {
            name: value for name, value in first.defaults.items() if all(name in o.defaults for o in others)
        }


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that this one stands for: itself, unless it joins several."""
    return optimizer.members if isinstance(optimizer, JoinedOptimizers) else (optimizer,)


def joined(optimizers: Sequence[Any]) -> Any:
    """One optimizer for those of a list; a list of one gives that one."""
    if not optimizers:
        raise ConfigError("the list of optimizers is empty: give the optimizers that own the model's parameters")
    for place, one in enumerate(optimizers):
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(f"optimizer[{place}] must be a torch.optim.Optimizer, not {type(one).__name__}")
        if any(one is before for before in optimizers[:place]):
            raise ConfigError(f"optimizer[{place}] is in the list twice: give each optimizer once")
    return optimizers[0] if len(optimizers) == 1 else JoinedOptimizers(optimizers)


def title_of(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's name in stores and checkpoints: "AdamW", "Muon + AdamW"."""
    return " + ".join(type(member).__name__ for member in members_of(optimizer))


def roster_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The committed list of several optimizers: the class and number of groups of each; empty for one alone."""
    members = members_of(optimizer)
    if len(members) == 1:
        return []
    return [{"optimizer": type(member).__name__, "groups": len(member.param_groups)} for member in members]


def is_roster(value: Any) -> bool:
    """Whether a value that was read has the form that `roster_of` makes."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("optimizer"), str) and isinstance(one.get("groups"), int)
        for one in value
    )


def is_owners(value: Any) -> bool:
    """Whether a value that was read has the form that `GroupOwners.runs` makes."""
    return (
        isinstance(value, list)
        and len(value) % 2 == 0
        and all(isinstance(number, int) and number >= 0 for number in value)
    )


def require_roster(own: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], where: str) -> None:
    """Reject a store or checkpoint (`where`) that was made with other optimizers; `stored` is empty for one alone."""
    if [(one["optimizer"], one["groups"]) for one in own] != [(one["optimizer"], one["groups"]) for one in stored]:
        had, has = _listed(stored), _listed(own)
        raise ConfigError(
            f"{where} was made with {had}, and offload() was given {has}: give those of the run, in their order"
        )


# More runs than a model of thousands of layers has: a commit holds 128 KiB of options at most.
_RUNS_MAX = 4096


class GroupOwners:
    """Which group has each parameter, as it is committed and compared: stored options go to groups by their number.

    It is committed as runs, in the order of the parameters' names: a group's number, the count of parameters of that
    group that follow each other, and so on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """`names` are those of the parameters, by id; a rank has only those of which it has rows."""
        groups = optimizer.param_groups
        owned = [(id(one), number) for number, group in enumerate(groups) for one in group["params"]]
        self._owners = dict(sorted((names[one], number) for one, number in owned if one in names))
        self._count = len(groups)

    def runs(self) -> list[int]:
        """The committed value; empty where there is one group alone, or too many runs."""
        runs = [(number, sum(1 for _ in run)) for number, run in groupby(self._owners.values())]
        return list(chain(*runs)) if self._count > 1 and len(runs) <= _RUNS_MAX else []

    def require_same(self, groups: int, runs: Sequence[int], where: str) -> None:
        """Reject stored options of so many `groups`, from `where`, if the groups had other parameters (see `runs`)."""
        # Another number of groups has a check of its own. A rank without rows of some parameters leaves the comparison
        # to the first rank, which has rows of all.
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
                f"{where} has its options (lr, weight_decay and so on) by group, and the groups had other parameters: "
                f"{'; '.join(moved[:3])}{'; and so on' if moved[3:] else ''}. Nothing was changed: make the optimizer "
                "with the groups that it had"
            )


def _listed(roster: Sequence[Mapping[str, Any]]) -> str:
    words = [f"{one['optimizer']} ({one['groups']} group{'' if one['groups'] == 1 else 's'})" for one in roster]
    return " and ".join(words) or "one optimizer"


def require_one_owner(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]) -> None:
    """Reject a parameter that several of the optimizers own."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for member in members_of(optimizer):
        for group in member.param_groups:
            for parameter in group["params"]:
                other = owners.setdefault(id(parameter), member)
                if other is not member:
                    name = next((name for name, one in named.items() if one is parameter), "a parameter")
                    raise ConfigError(
                        f"{name} is owned by two of the optimizers ({type(other).__name__} and "
                        f"{type(member).__name__}), and would be updated by both: give it to one of them"
                    )


class JoinedHooks(OrderedDict[int, Any]):
    """The hooks that are registered with the optimizer that is returned, and those of all originals."""

    def __init__(self, members: Iterable[dict[int, Any]]) -> None:
        super().__init__()
        self._members = tuple(members)

    def values(self) -> Any:
        """The hooks, those of the originals first, in their order."""
        return list(chain(*(member.values() for member in self._members), super().values()))


# Wrappers by their class, since neither library need be installed: the attribute that has the optimizer, and the call
# that wraps it.
_WRAPPERS = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): ("optimizer", "accelerator.prepare()"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"): ("_optimizer", "fabric.setup()"),
    ("lightning_fabric.wrappers", "_FabricOptimizer"): ("_optimizer", "fabric.setup()"),
}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that runs the steps, without the wrapper of accelerate or Fabric; those of a list as one."""
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
            f"{more}; give offload() the model and the optimizer before {call}, which then takes what it returns"
        )
    return getattr(optimizer, attribute)


def _more_than_steps(wrapper: Any) -> str | None:
    """What a wrapper does beside passing steps on, in words."""
    if hasattr(wrapper, "gradient_state"):
        if wrapper.scaler is not None:
            return "the AcceleratedOptimizer scales gradients (fp16)"
        steps = wrapper.gradient_state.num_steps
        return None if steps == 1 else f"the AcceleratedOptimizer steps after {steps} backwards alone"
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
    """Put the offloaded optimizer into the wrapper of the original, which then stays usable."""
    found = _wrapper(optimizer)
    if found is not None:
        setattr(optimizer, found[0], offloaded)
