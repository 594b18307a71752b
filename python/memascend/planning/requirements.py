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

__all__ = ["Requirements"]


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a run needs memory for.

    Attributes:
        units: in the order of the forward.
        sizes: of the store that holds them.
        gradients: how they are kept: "ram" needs memory for all of them, the others for the largest.
        largest_gradient: bytes of it.
        all_gradients: bytes of all of them.
        whole_bytes: what an optimizer needs that updates whole parameters.
        activation_chunks: {bytes: count} of those through which checkpointed activations go to storage.
        activation_group: further ones, so many at a time, in which they stay where there is room; 0: all go.
        activation_groups: how many of these keep the disk out of it, as far as anybody can say beforehand.
        staging: where a device computes, the chunks, {bytes: count}, that lie between it and storage, by owner; units
            and gradients are then in its memory. None: the host computes.
        segment: units that a checkpoint segment recomputes together.
        update_values: whether an update reads the values: "resident" where their unit was evicted (the compact state),
            "read" always (values of 32 bits), "never" (the state has a master of its own).
        trained: the names of the parameters that a step changes.
        gradient_bytes: of each of those.
        applies: updates of held entries are applied in memory, and nothing of them is written before the end.
        log: what a log of their gradients could be, where they are durable each step; None where none is kept.
        by_rows: units that are embeddings of which a forward reads the rows that it needs: they have no memory.
        rows_bytes: what those are read through, and their gradients made in.
    """

    units: Sequence[Unit]
    sizes: Sizes
    gradients: Literal["auto", "fused", "ssd", "ram"]
    largest_gradient: int
    all_gradients: int
    whole_bytes: int = 0
    activation_chunks: Mapping[int, int] = field(default_factory=dict)
    activation_group: int = 0
    activation_groups: int = 0
    staging: Mapping[str, Mapping[int, int]] | None = None
    segment: int = 1
    update_values: Literal["resident", "read", "never"] = "resident"
    trained: Collection[str] = ()
    gradient_bytes: Mapping[str, int] = field(default_factory=dict)
    applies: bool = False
    log: Log | None = None
    by_rows: Collection[str] = ()
    rows_bytes: int = 0

    @property
    def group_bytes(self) -> int:
        """One further group of chunks for activations."""
        return arena_bytes(
            {nbytes: self.activation_group for nbytes in self.activation_chunks if self.activation_group}
        )

    def stored_bytes(self, unit: Unit) -> int:
        """The values of a unit on storage, and in a lease."""
        return self.sizes.unit_bytes.get(unit.name, unit.nbytes)

    def bytes_of(self, unit: Unit) -> int:
        """The values of a unit in memory: none of an embedding that is read by rows."""
        return 0 if unit.name in self.by_rows else self.stored_bytes(unit)

    def trained_bytes(self, unit: Unit) -> int:
        """The values of a unit that a step changes."""
        return self.stored_bytes(unit) - unit.frozen_bytes
