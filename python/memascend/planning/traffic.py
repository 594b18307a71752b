"""Defines what a step reads and writes: bytes by kind."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(frozen=True)
class Traffic:
    """What a step moves.

    Attributes:
        read: bytes by kind.
        written: bytes by kind.
        held: the part of what is trained that is held: it is updated in `step()`, and not as it streams.
    """

    read: dict[str, int]
    written: dict[str, int]
    held: float = 0.0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.read.values()) + sum(self.written.values())
