"""Bundles what residency is built from: the memory of units, the plan's limits, listeners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from memascend.memory import Arena
    from memascend.residency.placeholder import Place
    from memascend.residency.unit_slot import Home, UnitRead


class Memory(Protocol):
    """The memory of units, and the way there; see `device.unit_memory`."""

    arena: Arena

    def begin(self, name: str, base: torch.Tensor) -> UnitRead:
        """Begin to bring a unit into a lease of the arena."""

    def held(self, name: str) -> torch.Tensor:
        """The bytes of a unit that is held, as the last commit left them."""

    @property
    def held_epoch(self) -> int:
        """While it stays the same, what `held` gave is what the last commit left."""

    def spoil(self, name: str) -> None:
        """Somebody wrote to a parameter of a unit that is held."""

    def used(self, base: torch.Tensor) -> None:
        """The caller is about to compute with a unit's bytes."""

    def require_usable(self) -> None:
        """Refuse, before anything is done, where nobody may compute with them."""


class Stages(Protocol):
    """Follows the micro-batches of a step; see `microbatches`, which is in a room above this."""

    def arrive(self, homes: Iterable[Home]) -> None:
        """A module or a backward is about to use units; other micro-batches may be computed before it goes on."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who hears of what is done with units."""

    borrowed: Callable[[Iterable[Place]], None]  # parameters are touched outside of their modules
    used: Callable[[], None]  # the use of a unit has ended


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the run does now."""

    busy: Callable[[], bool]  # updates are under way, which may hold units until they are done
    computes: Callable[[], bool]  # this thread is inside of the model's forward
    updates: Callable[[], bool]  # an update has begun of a step that is not committed


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the plan lets units have."""

    lookahead: int  # how many units ahead of the one in use are fetched
    slots: dict[int, int]  # the arena's classes, {bytes: count}
    option: str  # what the user sets the budget by
    larger: Callable[[int], int]  # a budget that has more room, where a unit of so many bytes finds none
    # Takes memory for one more unit of so many bytes, and tells how many; None where a budget was given.
    add: Callable[[int], int] | None
