"""Tells which of the stores in one folder a run goes on from: those of several numbers of ranks may be there.

A run that goes over to another number of ranks has the old stores and the new ones for a while, and a kill leaves both.
The first commit of the new ones names the stores that they were made from, and those that these had outlived. So what
may be removed is known, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.engine import look
from memascend.errors import ConfigError, CorruptionError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# In the hyperparameters of a first commit: the stores that it stands for, the ones that were read first.
EARLIER = "earlier"
# The number of a run's first commit; that of a single process has none.
_FIRST = 1
_OF_ONE = 1


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The stores of one number of ranks, in one folder."""

    count: int  # of ranks
    owners: Mapping[int, int]  # by old rank, which of now reads its store
    seen: Mapping[int, Mapping[str, Any]]  # by old rank, what its roots name: see `seen_at`

    @property
    def missing(self) -> list[int]:
        """The ranks whose store is not there, or has no commit."""
        return [rank for rank in range(self.count) if rank not in self.seen or self._is_empty(rank)]

    @property
    def has_commits(self) -> bool:
        """Whether there is one on any rank."""
        return any(one["commits"] for one in self.seen.values())

    @property
    def is_unfilled(self) -> bool:
        """Whether not all have made their first commit: a rank stages its second one once all have the first."""
        numbers = [commit["number"] for one in self.seen.values() for commit in one["commits"]]
        return any(map(self._is_empty, self.seen)) and all(number <= _FIRST for number in numbers)

    @property
    def owned(self) -> list[int]:
        """By old rank, which of now reads its store, where all are there."""
        return [self.owners[rank] for rank in range(self.count)]

    def named(self, run: str, number: int) -> dict[str, Any]:
        """What tells a commit of theirs from any other: that of a single process by its store's id and its step."""
        return {"ranks": self.count, "run": run, "number": number}

    def are(self, identity: Mapping[str, Any], said: Mapping[str, Any] | None) -> bool:
        """Whether they are what is left of the stores of this identity; others of them may be removed by now."""
        if self.count == _OF_ONE:
            return said is not None and self.named(said["uuid"], said["step"]) == identity
        return all(
            any(
                commit["run"] == identity["run"] and commit["number"] == identity["number"] for commit in one["commits"]
            )
            for rank, one in self.seen.items()
            if not self._is_empty(rank)
        )

    def _is_empty(self, rank: int) -> bool:
        # A file of zeros is no store, and one whose first write did not finish names no commit.
        one = self.seen[rank]
        return not one["commits"] and (not one["there"] or not one["filled"])


def told_by(file: Path) -> dict[str, Any] | None:
    """What a store says of itself beside its roots; None where it cannot be looked at."""
    try:
        with look(file) as store:
            said = store.hyperparameters
            known = said.get(EARLIER) if isinstance(said, dict) else None
            return {"uuid": store.info()["uuid"], "step": store.step, EARLIER: known or []}
    except (StorageError, ConfigError, CorruptionError):
        return None


def outlived_by(found: Iterable[Stores], said: Mapping[int, Mapping[str, Any] | None]) -> dict[int, Mapping[str, Any]]:
    """By their number of ranks, the stores that others, which are whole, stand for; and the identity that they have.

    Args:
        found: stores that were filled.
        said: of the number of ranks, what `told_by` gave for one of its stores.
    """
    by_count = {one.count: one for one in found}
    outlived: dict[int, Mapping[str, Any]] = {}
    for count, one in by_count.items():
        told = said.get(count)
        if one.missing or told is None:
            # They may not stand for others: their own rows are not all there.
            continue
        for identity in told[EARLIER]:
            other = by_count.get(identity["ranks"])
            if other is not None and other is not one and other.are(identity, said.get(other.count)):
                outlived[other.count] = identity
    return outlived
