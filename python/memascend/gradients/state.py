"""Names the states of one parameter's gradient, and the moves between them."""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal


class State(Enum):
    """Where a gradient is, and whether an update by it is staged."""

    # There is none, or one in memory that no staged update uses. Here and in the next state `p.grad` has no handle.
    NONE = auto()
    # In memory; step() staged an update by it, and has not committed.
    MEMORY_STAGED = auto()
    # On storage, for step() to use.
    STORED = auto()
    # On storage; an update by it is staged.
    STORED_STAGED = auto()
    # Gone into an update that is staged.
    TAKEN = auto()
    # Gone into an update of a step that is over: committed, or skipped for an overflow.
    SPENT = auto()

    # Asked for each parameter many times in a step: Enum's own is a call of Python.
    __hash__ = object.__hash__

    @property
    def staged(self) -> bool:
        """Whether an update is staged and not committed."""
        return self in {State.MEMORY_STAGED, State.STORED_STAGED, State.TAKEN}

    @property
    def stored(self) -> bool:
        """Whether the gradient lies on storage."""
        return self in {State.STORED, State.STORED_STAGED}


Move = Literal["store", "change", "take", "stage", "unstage", "end", "drop"]

_MOVES: dict[Move, dict[State, State]] = {
    "store": {State.NONE: State.STORED},
    # More of it came, or it was replaced.
    "change": {State.STORED: State.STORED},
    "take": {State.NONE: State.TAKEN},
    "stage": {State.NONE: State.MEMORY_STAGED, State.STORED: State.STORED_STAGED},
    # The staged update was discarded, and what it was made of is still there.
    "unstage": {State.MEMORY_STAGED: State.NONE, State.STORED_STAGED: State.STORED},
    # The step was committed, or skipped.
    "end": {State.MEMORY_STAGED: State.NONE, State.STORED_STAGED: State.STORED, State.TAKEN: State.SPENT},
    "drop": dict.fromkeys(State, State.NONE),
}


def moved(name: str, state: State, move: Move) -> State:
    """The state after a move, which has to be one that this state allows."""
    after = _MOVES[move].get(state)
    assert after is not None, f"{move!r} of the gradient of {name!r}, which is {state.name}"
    return after
