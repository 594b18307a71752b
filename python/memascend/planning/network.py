"""Counts what one of several ranks receives from the others, and what is gathered of all of them at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """What one rank receives of the others, and sends to them, for one forward and backward, in bytes."""

    forward: int  # values that are gathered for the forward
    backward: int  # values that are gathered once more; what belongs to no block stays from the forward
    gradients: int  # parts of gradients
    # Whole parameters and gradients that torch holds at once: what belongs to no block, two blocks of values, and the
    # gradients of one with the parts that were received.
    gathered: int

    @property
    def total(self) -> int:
        """All that is received."""
        return self.forward + self.backward + self.gradients
