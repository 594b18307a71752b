"""Defines what a run needs memory for: what a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from memascend.planning.slot_classes import arena_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from memascend.engine import Sizes
    from memascend.planning.log import Log
    from memascend.planning.units import Unit


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a run needs memory for."""

    units: Sequence[Unit]  # in the order of the forward
    sizes: Sizes  # of the store that holds them
    # How they are kept: "ram" needs memory for all of them, the others for the largest.
    gradients: Literal["auto", "fused", "ssd", "ram"]
    largest_gradient: int  # bytes of it
    all_gradients: int  # bytes of all of them
    whole_bytes: int = 0  # what an optimizer needs that updates whole parameters
    # {bytes: count} of those through which checkpointed activations go to storage.
    activation_chunks: Mapping[int, int] = field(default_factory=dict)
    activation_group: int = 0  # further ones, so many at a time, in which they stay where there is room; 0: all go
    activation_groups: int = 0  # how many of these keep the disk out of it, as far as anybody can say beforehand
    # Where a device computes, the chunks, {bytes: count}, that lie between it and storage, by owner; units and
    # gradients are then in its memory. None: the host computes.
    staging: Mapping[str, Mapping[int, int]] | None = None
    segment: int = 1  # units that a checkpoint segment recomputes together
    # Whether an update reads the values: "resident" where their unit was evicted (the compact state), "read" always
    # (values of 32 bits), "never" (the state has a master of its own).
    update_values: Literal["resident", "read", "never"] = "resident"
    trained: Collection[str] = ()  # the names of the parameters that a step changes
    gradient_bytes: Mapping[str, int] = field(default_factory=dict)  # of each of those
    # Updates of held entries are applied in memory, and nothing of them is written before the end.
    applies: bool = False
    # What a log of their gradients could be, where they are durable each step; None where none is kept.
    log: Log | None = None

    @property
    def group_bytes(self) -> int:
        """One further group of chunks for activations."""
        return arena_bytes(
            {nbytes: self.activation_group for nbytes in self.activation_chunks if self.activation_group}
        )

    def bytes_of(self, unit: Unit) -> int:
        """The values of a unit on storage, and in a lease."""
        return self.sizes.unit_bytes.get(unit.name, unit.nbytes)

    def trained_bytes(self, unit: Unit) -> int:
        """The values of a unit that a step changes."""
        return self.bytes_of(unit) - unit.frozen_bytes
