"""Defines what a step reads and writes: bytes by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Traffic:
    """What a step moves."""

    read: dict[str, int]  # bytes by kind
    written: dict[str, int]  # bytes by kind
    held: float = 0.0  # the part of what is trained that is held: it is updated in `step()`, and not as it streams

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.read.values()) + sum(self.written.values())


def with_log(
    written: Mapping[str, int], logged: tuple[int, int, int], steps: int, *, back: bool = False
) -> dict[str, int]:
    """What a step writes where so many bytes of values, state and gradients are in a log; `back`: without it again."""
    found = dict(written)
    if not steps:
        return found
    values, state, gradients = logged
    sign = -1 if back else 1
    for kind, nbytes in (("values", values), ("state", state)):
        # A part of them is written whole each step.
        found[kind] = found.get(kind, 0) - sign * (nbytes - nbytes // steps)
    found["log"] = found.get("log", 0) + sign * gradients
    return found
