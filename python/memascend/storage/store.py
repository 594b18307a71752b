"""Opens, reads, fills, examines and commits a store of training state on SSD."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from memascend import _core
from memascend.errors import ConfigError, CorruptionError, StorageError
from memascend.storage.entries import (
    CHUNK_ELEMENTS,
    Entry,
    Part,
    chunk_elements_of,
    description,
    json_of,
    require_laid_out,
    room_for,
    shown_to,
    tensors_of,
)
from memascend.text import paths_listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch


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


_RESCUE = "is gone with the end of this run; keep it with optimizer.save(folder)"


_LOST = {
    "deleted": f"was deleted while its store was in use: what is in it {_RESCUE}",
    "moved": "was moved while its store was in use: what was committed is in it, under the name that it has now",
    "truncated": f"was truncated while its store was in use: what was behind its end {_RESCUE}",
    "replaced": f"is now another file than that of the store in use: unless that was moved, what is in it {_RESCUE}",
}


def loss(path: Path, what: str) -> StorageError:
    """The error: `what` is "deleted", "moved", "truncated" or "replaced"."""
    return StorageError(f"{path} {_LOST[what]}", errno=errno.ENOENT, path=os.fspath(path))


_Path = str | os.PathLike[str]


def not_as_written(path: str, what: str) -> CorruptionError:
    """That a store's checksums are right, and what it says is not what any version of memascend writes."""
    return CorruptionError(
        f"{path}: {what}. The checksum is right, so another program wrote that; restore the store from a copy, or "
        "try existing='previous', which opens the commit before",
        path=path,
    )


class Store(_core.Store):
    """State on SSD: every commit is all of a step or none of it, and every byte that is read was checked."""

    __slots__ = ("_is_temporary", "_shared")

    def __init__(self, *_: Any) -> None:
        """See `create` and `open`."""
        self._is_temporary = False
        self._shared: SharedCommits | None = None

    @classmethod
    def create(  # noqa: PLR0913 - options are keywords
        cls,
        paths: _Path | Sequence[_Path],
        entries: Sequence[Entry],
        *,
        optimizer: str = "AdamW",
        existing: Literal["refuse", "resume", "replace", "previous"] = "refuse",
        durability: Literal["step", "close", "none"] = "step",
        chunk_elements: int | None = None,
        stripe: int | None = None,
        backend: Literal["auto", "io_uring", "threads"] = "auto",
        fill: bool = True,
    ) -> Self:
        """Make a store and fill it, as step 0; or resume the one that is there, whose own values then stand.

        Args:
            paths: a folder, a file or a raw block device, or several, over which it is striped.
            entries: what it holds, grouped by unit.
            optimizer: whose state it is; a store of another one is refused.
            existing: what to do where a store is already: refuse, resume its last committed step, replace it, or go
                back to the commit before, as `open` does.
            durability: "step": commits survive a loss of power; "close": the death of the process; "none": nothing is
                kept before `close()`.
            chunk_elements: elements of a chunk, a multiple of 2,048, and of 4,096 where an entry of more elements has
                values of one byte; None: as many as have their state in one request.
            stripe: bytes that lie together on one of several devices.
            backend: how the devices are driven.
            fill: False leaves a store that was made now unfilled, at generation 0, for the caller to fill and commit:
                its entries may be on the meta device. Until its first commit nobody can open it. With "previous" it
                leaves the newest commit there, too, until `go_back()`; nothing can be staged before.

        Raises:
            ConfigError: an argument is wrong, or a store is there that does not fit or that `existing` refuses.
            StorageError: a device is full, foreign or in use; nothing was changed.
            CorruptionError: the store that is there is damaged; the message says where.
        """
        units, described = description(entries)
        if fill:
            for entry in entries:
                for tensor in (entry.values, *entry.state.values()):
                    require_laid_out(entry.name, tensor, entry.order if tensor.shape == entry.values.shape else None)
        chunk = chunk_elements_of(entries) if chunk_elements is None else chunk_elements
        store = cls(paths_listed(paths), described, units, optimizer, chunk, existing, durability, stripe, backend)
        if fill:
            store._settled()
        if store.created and fill:
            for entry in entries:
                store.stage(entry.name, entry.values, entry.state, step=0)
            store.commit(0)
        return store

    @classmethod
    def open(
        cls,
        paths: _Path | Sequence[_Path],
        *,
        existing: Literal["resume", "previous"] = "resume",
        durability: Literal["step", "close", "none"] = "step",
        backend: Literal["auto", "io_uring", "threads"] = "auto",
    ) -> Self:
        """Open the last committed step of the store that is there, or the commit before it.

        "previous" is for a store whose newest commit is damaged, or unwanted. It reads and checks every byte of the
        other commit first, and changes nothing if one is not whole; then the newest is given up for good. The step that
        follows a commit is written over the one before it, so it works until that step begins.

        Raises:
            ConfigError: "previous", and only one commit was ever made.
            StorageError: there is no store, or it is unfinished, unclosed, of another version, or misses a device.
            CorruptionError: it is damaged; the message says where, and whether the other commit may be whole.
        """
        if existing not in ("resume", "previous"):
            raise ConfigError(f"a store is opened with existing='resume' or 'previous', not {existing!r}")
        store = cls(paths_listed(paths), None, [], "", CHUNK_ELEMENTS, existing, durability, None, backend)
        store._settled()
        return store

    def _settled(self) -> None:
        try:
            self.go_back()
        except BaseException:
            self.close()
            raise

    def difference(self, entries: Sequence[Entry], *, optimizer: str) -> str | None:
        """In which way it is no store of these entries and this optimizer, in words; None where it is one."""
        units, described = description(entries)
        return self.difference_of(described, units, optimizer, chunk_elements_of(entries))

    @property
    def user_state(self) -> Any:
        """The JSON value that was committed last; None where there was none."""
        return self._committed_json("user")

    @property
    def hyperparameters(self) -> Any:
        """The hyperparameters that were committed last; None where there were none."""
        return self._committed_json("hyperparameters")

    def _committed_json(self, which: Literal["user", "hyperparameters"]) -> Any:
        info = self.info()
        try:
            return json.loads(info[which] or "null")
        except (ValueError, RecursionError) as error:
            what = {"user": "user_state", "hyperparameters": "the hyperparameters"}[which]
            raise not_as_written(info["devices"][0], f"{what} of step {info['step']} are no JSON: {error}") from error

    def entries(self) -> list[dict[str, Any]]:
        """Each entry: "name", "buffer", "unit", "dtype", "shape", "step", "version", "staged", "compact", "state".

        Also "unit_offset", where its values begin in the bytes of its unit, and "order" and "spill" as in `Entry`.
        """
        return list(self.each_entry())

    def each_entry(self) -> Iterator[dict[str, Any]]:
        """The same one at a time: what is known of thousands takes megabytes, which Python keeps once it had them."""
        return map(self.entry_at, range(self.count()))

    def stage(
        self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None, *, step: int
    ) -> None:
        """Stage a whole entry, as its update number `step`; `commit()` makes it live.

        Of a compact entry, `state` is the compact one, or what `compact_of` makes it from.
        """
        tensors = tensors_of(self.entry(name), values, state or {})
        self.stage_at(self.index(name), step, [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])

    def read(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A copy of an entry as the last commit left it: its values, and its state by name.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        values, state = room_for(self.entry(name))
        tensors = (values, *state.values())
        self.read_at(self.index(name), [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
        return values, state

    def scan(self, names: Sequence[str], visit: Callable[[str, list[Part]], object]) -> None:
        """Read entries in this order, as the last commit left them, in memory that does not grow with them.

        `visit` is called with a name and parts that belong together: of a chunk, the values and the state of the same
        elements; tensors of another shape come by themselves. The parts stand on memory that is taken again after the
        call. It must not commit.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        entries = {self.index(name): self.entry(name) for name in names}
        self.scan_at(list(entries), shown_to(visit, entries))

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Make all that is staged live at once; None leaves what was committed before. Returns the generation."""
        return self.make_live(self.commit_as, step, user_state, hyperparameters)

    def share(self, commits: SharedCommits) -> None:
        """Have its commits made together with other ranks from now on."""
        self._shared = commits

    def make_live(self, commit: CommitOfOne, step: int, user_state: Any, hyperparameters: Any) -> int:
        """Commit by the store's own `commit` or its engine's; with the other ranks, where it is shared with some."""
        said = (step, json_of(user_state), json_of(hyperparameters))
        if self._shared is None:
            return commit(*said, None, None)
        return self._shared.commit(lambda run, agree: commit(*said, run, agree))

    def preparing(self) -> AbstractContextManager[None]:
        """Around all that leads to a commit: where it fails here, the other ranks do not wait for this one."""
        return contextlib.nullcontext() if self._shared is None else self._shared.step()

    def set_first_elements(self, firsts: Mapping[str, int]) -> None:
        """Say, once and before any update, where entries begin that are rows of parameters.

        What is rounded by chance depends on an element's number in the whole parameter. A store knows it by itself,
        but for one that an earlier version made.
        """
        self.set_first_elements_at([firsts.get(entry["name"], 0) for entry in self.each_entry()])

    def close(self) -> None:
        """Keep what was committed, drop what is only staged, and let go of the devices. Twice is fine.

        Raises:
            StorageError: its file was deleted, moved or replaced meanwhile; everything was let go of all the same.
        """
        lost = self.lost()
        super().close()
        if lost is not None:
            raise lost

    def become_temporary(self) -> None:
        """Its file is about to have no name on purpose: that it has none is no loss."""
        self._is_temporary = True

    def lost(self) -> StorageError | None:
        """What became of a file of it that its path does not name any more; None where all is as it was."""
        found = None if self._is_temporary else self.lost_file()
        return loss(*found) if found else None


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
    found = _core.store_commits(paths_listed(paths), backend)
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
        for found in _core.store_examine(paths_listed(paths), backend, progress)
    ]


def look(paths: _Path | Sequence[_Path], *, backend: Literal["auto", "io_uring", "threads"] = "auto") -> Store:
    """Open a store to be looked at, at its newest commit whose catalog is whole, also where `Store.open` refuses.

    Nothing can be staged in it, and closing it changes nothing.

    Raises:
        StorageError: there is no store.
        CorruptionError: no catalog is whole.
    """
    return Store(paths_listed(paths), None, [], "", CHUNK_ELEMENTS, "look", "step", None, backend)
