"""Examines both commits of a store, damaged or not; writes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memascend import _core
from memascend.engine.store import Store
from memascend.paths import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit as it lies on storage.

    Attributes:
        generation: counts commits; None where its root is damaged.
        step: committed steps; None where its catalog is damaged.
        pieces: how many pieces of it are whole.
        nbytes: their bytes.
        damages: what is damaged where, the first of it.
        others: how many damages more there are.
    """

    generation: int | None
    step: int | None
    pieces: int
    nbytes: int
    damages: tuple[str, ...]
    others: int

    @property
    def whole(self) -> bool:
        """Whether every byte of it is as it was written."""
        return not self.damages


@dataclass(frozen=True, kw_only=True)
class NamedCommit:
    """A commit as its root names it.

    Attributes:
        generation: counts commits of this store.
        run: the run of several ranks that it belongs to; zeros where it belongs to none.
        number: of this commit, the same on all ranks of that run.
        identity: what tells it from the commit of that number in another continuation of the run, the same on all
            ranks; zeros where an earlier version made it, which did not say the ranks either.
        rank: whose store it is.
        ranks: of how many; 0 where that is not known.
        kept: False while a run with durability "none" goes on.
    """

    generation: int
    run: bytes
    number: int
    identity: bytes
    rank: int
    ranks: int
    kept: bool


def commits(
    paths: _Path | Sequence[_Path], *, backend: Literal["auto", "io_uring", "threads"] = "auto"
) -> tuple[list[NamedCommit], str | None] | None:
    """The commits that the roots of a store name, the newest first, and what is wrong with a damaged root.

    Nothing else is read, and nothing written. No commits where its first write did not finish; None where there is no
    store.

    Raises:
        StorageError: a store is there and cannot be opened: a device lacks, another process has it.
        CorruptionError: what both commits need is damaged.
    """
    found = _core.store_commits(listed(paths), backend)
    if found is None:
        return None
    named, damage = found
    return [
        NamedCommit(generation=at, run=run, number=number, identity=identity, rank=rank, ranks=ranks, kept=kept)
        for at, (run, number, identity, rank, ranks), kept in named
    ], damage


def examine(
    paths: _Path | Sequence[_Path],
    progress: Callable[[int, int], object] | None = None,
    *,
    backend: Literal["auto", "io_uring", "threads"] = "auto",
) -> list[Commit]:
    """Read and check both commits of a store; `progress(done, all)` hears of bytes.

    Returns:
        What may be the newest first: a root that is damaged, or the newer commit. One, where only one was ever made.

    Raises:
        StorageError: there is no store, or none that could be looked at.
        CorruptionError: what both commits need is damaged.
    """
    return [
        Commit(
            generation=found["generation"],
            step=found["step"],
            pieces=found["pieces"],
            nbytes=found["bytes"],
            damages=tuple(found["damages"]),
            others=found["others"],
        )
        for found in _core.store_examine(listed(paths), backend, progress)
    ]


def look(paths: _Path | Sequence[_Path], *, backend: Literal["auto", "io_uring", "threads"] = "auto") -> Store:
    """Open a store to be looked at, at its newest commit whose catalog is whole, also where `Store.open` refuses.

    Nothing can be staged in it, and closing it changes nothing.

    Raises:
        StorageError: there is no store.
        CorruptionError: no catalog is whole.
    """
    return Store(_core.store_look(listed(paths), backend))
