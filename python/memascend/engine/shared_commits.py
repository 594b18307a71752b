"""Describes commits that several ranks make together, as store and engine see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# What is called before a commit counts; it raises where not all ranks are as far.
Agree = Callable[[], object]
# The id of a run, 16 bytes; number and identity (16 bytes) of a commit, the same on all ranks; which rank, of how many.
CommitOfRank = tuple[bytes, int, bytes, int, int]
# A store's own commit, or its engine's: step, user's value, hyperparameters.
CommitOfOne = Callable[[int, str | None, str | None, CommitOfRank | None, Agree | None], int]


class SharedCommits(Protocol):
    """Makes the commits of a store together with other ranks; a protocol, as who does is in a room above this one."""

    def step(self) -> AbstractContextManager[None]:
        """Around what leads to a commit: the others hear where it fails."""

    def commit(self, make: Callable[[CommitOfRank, Agree], int]) -> int:
        """Make one by `make`, and return the generation."""
