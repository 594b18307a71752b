"""Opens, reads, examines and commits a store of training state on SSD."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from memascend import _core
from memascend.errors import ConfigError, CorruptionError, StorageError
from memascend.storage.records import (
    CHUNK_ELEMENTS,
    Part,
    Record,
    chunk_elements_of,
    description,
    room_for,
)
from memascend.text import paths_listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch

    from memascend.distributed.agreement import Agreement


# A function that the store calls before a commit takes effect; it raises if not all ranks have staged the commit.
Agree = Callable[[], object]
# The id of a run (16 bytes), the number and identity (16 bytes) of a commit, the rank, and the number of ranks of one
# replica.
CommitOfRank = tuple[bytes, int, bytes, int, int]
# `commit_as` of a store or of its engine: takes the step, user state and hyperparameters as JSON texts, and with
# several ranks a `CommitOfRank` and an `Agree`; returns the generation.
CommitOfOne = Callable[[int, str | None, str | None, CommitOfRank | None, Agree | None], int]
_RESCUE = "is lost when this run ends; call optimizer.save(folder) to keep it"
# The texts of the error that `Store.lost` returns, by the result of `lost_file()`. In the error, the file's path
# precedes the text.
_LOST = {
    "deleted": f"was deleted while its store was in use: the data in it {_RESCUE}",
    "moved": "was moved while its store was in use: all committed steps are in the file under its new name",
    "truncated": f"was truncated while its store was in use: the data after its new end {_RESCUE}",
    "replaced": "was replaced by another file while its store was in use: unless the store's file was moved, its data "
    f"{_RESCUE}",
}
_Path = str | os.PathLike[str]


def pending_file(file: Path) -> Path:
    """Returns the path that a new store's only file has until the first commit, which renames the file to `file`."""
    return file.with_name(file.name + _core.PENDING_SUFFIX)


def foreign_contents_error(path: str, what: str) -> CorruptionError:
    """Makes the error for a store that has right checksums, but contents that no version of memascend writes."""
    return CorruptionError(
        f"{path}: {what}. The checksum is right, so another program wrote these contents. Restore the store from a "
        "copy, or pass existing='previous' to open the commit before the last",
        path=path,
    )


class Store(_core.Store):
    """Training state on SSD: commits are atomic, and each read verifies checksums."""

    __slots__ = ("_shared",)

    def __init__(self, *_: Any) -> None:
        """To get a store, call `create` or `open`: both pass their arguments to `__new__`, which makes the store."""
        self._shared: Agreement | None = None

    @classmethod
    def create(
        cls,
        paths: _Path | Sequence[_Path],
        records: Sequence[Record],
        *,
        optimizer: str = "AdamW",
        existing: Literal["refuse", "resume", "replace", "previous"] = "refuse",
        durability: Literal["step", "none"] = "step",
        chunk_elements: int | None = None,
    ) -> Self:
        """Creates a store, or opens an existing one, as `existing` says.

        A new store (`created` is True) is at generation 0. The caller must fill all records and commit. Until that
        first commit no process can open it. An existing store keeps its values.

        Args:
            paths: a folder, a file or a raw block device, or several of them, over which the store is striped.
            records: the contents of the store, grouped by unit.
            optimizer: the optimizer's name; a store of another optimizer is rejected, except with "replace".
            existing: what to do with an existing store. "refuse" raises. "resume" opens its last committed step.
                "replace" creates a new store in its place. "previous" opens the commit before the last; storage keeps
                the last commit until `go_back()` drops it, and nothing can be staged before that.
            durability: "step": commits survive a loss of power. "none": commits are kept only after `close()`.
            chunk_elements: elements of a chunk, a multiple of 2,048; a multiple of 4,096 if a record has one-byte
                values and more than one chunk; None: as `chunk_elements_of` returns.

        Raises:
            ConfigError: an argument is wrong, or an existing store does not fit, or `existing` does not allow an
                existing store.
            StorageError: a device is full, is in use or has foreign contents, or the existing store is unclosed or of
                another version; nothing was changed.
            CorruptionError: the existing store is damaged; the message says where.
        """
        units, described = description(records)
        chunk = chunk_elements_of(records) if chunk_elements is None else chunk_elements
        return cls(paths_listed(paths), described, units, optimizer, chunk, existing, durability)

    @classmethod
    def open(
        cls,
        paths: _Path | Sequence[_Path],
        *,
        existing: Literal["resume", "previous"] = "resume",
        durability: Literal["step", "none"] = "step",
    ) -> Self:
        """Opens an existing store at its last committed step, or with `existing="previous"` at the commit before it.

        "previous" is for a store whose newest commit is damaged or unwanted. `open` first verifies every byte of the
        commit before the last, and changes nothing if a byte is wrong. Then `open` drops the newest commit durably.
        "previous" works until the next step begins, since each step overwrites the commit before the last.

        Raises:
            ConfigError: `existing` has another value, or is "previous" although the store has only one commit.
            StorageError: no store exists at `paths`, or the store is unfinished, unclosed or of another version, or one
                of its devices is missing.
            CorruptionError: the store is damaged; the message says where, and whether the other commit may be
                undamaged.
        """
        if existing not in ("resume", "previous"):
            raise ConfigError(f"existing must be 'resume' or 'previous' when a store is opened, not {existing!r}")
        store = cls(paths_listed(paths), None, [], "", CHUNK_ELEMENTS, existing, durability)
        try:
            store.go_back()
        except BaseException:
            store.close()
            raise
        return store

    def difference(self, records: Sequence[Record], *, optimizer: str) -> str | None:
        """Describes how the store differs from these records and this optimizer; returns None if it fits."""
        units, described = description(records)
        return self.difference_of(described, units, optimizer, chunk_elements_of(records))

    @property
    def user_state(self) -> Any:
        """The user's JSON value in the last commit; None if the commit has none."""
        return self._committed_json("user")

    @property
    def hyperparameters(self) -> Any:
        """The hyperparameters in the last commit; None if the commit has none."""
        return self._committed_json("hyperparameters")

    def _committed_json(self, which: Literal["user", "hyperparameters"]) -> Any:
        info = self.info()
        try:
            return json.loads(info[which] or "null")
        except (ValueError, RecursionError) as error:
            what = {"user": "user_state", "hyperparameters": "the hyperparameters"}[which]
            raise foreign_contents_error(
                info["devices"][0], f"{what} of step {info['step']} cannot be read as JSON: {error}"
            ) from error

    def records(self) -> list[dict[str, Any]]:
        """Returns all records as dicts.

        Among the keys are "name", "buffer", "unit", "dtype", "shape", "step", "version" and "staged". "unit_offset" is
        the offset of the values in the bytes of the unit. "compact" and "state" describe the optimizer state; "order"
        and "spill" have the values of `Record.order` and `Record.spill`.
        """
        return list(self.each_record())

    def each_record(self) -> Iterator[dict[str, Any]]:
        """Yields the dicts of `records()` one at a time.

        A list of thousands of records takes megabytes, which Python does not return to the system.
        """
        return map(self.record_at, range(self.count()))

    def read(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Reads a record of the last commit; returns its values, and its state tensors by name.

        Raises:
            StorageError: a device failed.
            CorruptionError: a checksum does not match.
        """
        values, state = room_for(self.record(name))
        tensors = (values, *state.values())
        self.read_at(self.index(name), [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
        return values, state

    def scan(self, names: Sequence[str], visit: Callable[[str, list[Part]], object]) -> None:
        """Reads records of the last commit in the order of `names`, chunk by chunk, in a fixed amount of memory.

        `scan` calls `visit` for each chunk, with the record's name and the parts of the chunk: values and state of the
        same elements. State that is not cut into chunks is passed in separate calls after the record's chunks. The
        memory of the parts is reused after each call. `visit` must not commit.

        Raises:
            StorageError: a device failed.
            CorruptionError: a checksum does not match.
        """
        import torch

        records = {self.index(name): self.record(name) for name in names}
        tensors = {
            index: [("", record["dtype"]), *((of, dtype) for of, dtype, _ in record["state"])]
            for index, record in records.items()
        }

        def show(index: int, lent: list[tuple[int, int, Any]]) -> None:
            parts = []
            for tensor, first, memory in lent:
                of, dtype = tensors[index][tensor]
                values = torch.frombuffer(memory, dtype=getattr(torch, dtype))
                parts.append(Part(of, first // values.itemsize, values))
            visit(records[index]["name"], parts)

        self.scan_at(list(records), show)

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Commits all staged records as `step` in one atomic write; returns the new generation.

        None for `user_state` or `hyperparameters` keeps the value of the last commit.
        """
        return self.commit_with_ranks(self.commit_as, step, user_state, hyperparameters)

    def share(self, commits: Agreement) -> None:
        """Sets the agreement by which later commits are made together with other ranks."""
        self._shared = commits

    @property
    def shared(self) -> Agreement:
        """The agreement that `share` set, which makes commits together with other ranks."""
        assert self._shared is not None
        return self._shared

    def commit_with_ranks(self, commit: CommitOfOne, step: int, user_state: Any, hyperparameters: Any) -> int:
        """Commits by `commit` (`commit_as` of the store or of its engine), together with the other ranks, if any."""
        arguments = (step, _json_of("user_state", user_state), _json_of("hyperparameters", hyperparameters))
        if self._shared is None:
            return commit(*arguments, None, None)
        return self._shared.commit(lambda run, agree: commit(*arguments, run, agree))

    def preparing(self) -> AbstractContextManager[None]:
        """Returns a context manager for the work before a commit. On an exception, it notifies the waiting ranks."""
        return contextlib.nullcontext() if self._shared is None else self._shared.step()

    def close(self) -> None:
        """Keeps commits, drops staged records, and closes the devices. A second call does nothing.

        Raises:
            StorageError: the store's file was deleted, moved, truncated or replaced while it was open; all devices are
                closed nevertheless.
        """
        lost = self.lost()
        super().close()
        if lost is not None:
            raise lost

    def lost(self) -> StorageError | None:
        """Returns the error for a deleted, moved, truncated or replaced file; None if all files are in place."""
        found = self.lost_file()
        if found is None:
            return None
        path, what = found
        return StorageError(f"{path} {_LOST[what]}", errno=errno.ENOENT, path=os.fspath(path))


def _json_of(name: str, value: Any) -> str | None:
    """Serialises a value as JSON; returns None for None, which keeps the committed value."""
    try:
        return None if value is None else json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be stored as JSON: {error}; use only dicts, lists, text, numbers, True, False and None"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The result of verifying one commit of a store."""

    generation: int | None  # number of the commit; None if its root is damaged
    step: int | None  # number of committed steps; None if the commit's root or catalog is damaged
    extents: int  # number of extents, and of chunks of the gradient log, with a correct checksum
    nbytes: int  # bytes of these extents and chunks
    damages: list[str]  # descriptions of the first damages
    others: int  # number of damages that `damages` does not list

    @property
    def whole(self) -> bool:
        """True if the commit has no damage."""
        return not self.damages


class NamedCommit(NamedTuple):
    """A commit as its root page describes it."""

    generation: int  # number of the commit in this store
    run: bytes  # id of the run of several ranks that made the commit; zeros for a single process
    number: int  # number of the commit in that run, the same on all ranks
    # Hash of the commit's history, the same on all ranks. If a run was resumed twice from an earlier commit, two
    # commits may have the same `number`, but they have different identities. Zeros for a single process.
    identity: bytes
    rank: int  # rank that owns the store
    ranks: int  # number of ranks of one replica, which divide the rows; 0 for a single process
    # False if later commits in memory may have overwritten the commit on storage. This is so under durability "none",
    # until the store is closed.
    kept: bool


def commits(paths: _Path | Sequence[_Path]) -> tuple[list[NamedCommit], str | None] | None:
    """Returns the commits that the roots of a store name, newest first, and an error text if a root is damaged.

    `commits` reads only labels, roots and description, and writes nothing. The list is empty if the store's first write
    did not finish, or if the file is empty. The result is None if no store exists at `paths`.

    Raises:
        StorageError: the store cannot be opened: a device is missing, or another process uses it.
        CorruptionError: a part that both commits need is damaged.
    """
    found = _core.store_commits(paths_listed(paths))
    if found is None:
        return None
    named, damage = found
    return [NamedCommit(generation, *of_rank, kept) for generation, of_rank, kept in named], damage


def examine(paths: _Path | Sequence[_Path], progress: Callable[[int, int], object] | None = None) -> list[Commit]:
    """Reads and verifies both commits of a store, and calls `progress(done, all)` with numbers of bytes.

    Returns:
        Both commits, or the only one. A commit with a damaged root is listed first, because it may be the newest;
        otherwise the commit with the higher generation is listed first.

    Raises:
        StorageError: no store exists at `paths`, or it cannot be opened.
        CorruptionError: a part that both commits need is damaged.
    """
    found = _core.store_examine(paths_listed(paths), progress)
    return [Commit(nbytes=one.pop("bytes"), **one) for one in found]


def newest(paths: Sequence[str]) -> tuple[dict[str, Any], int] | None:
    """Returns the hyperparameters and the step of a store's newest commit; None if no store or no commit exists.

    Raises:
        StorageError, CorruptionError: as `commits` and `look` do.
    """
    files = [Path(path) for path in paths]
    if not any(file.is_block_device() or (file.is_file() and file.stat().st_size) for file in files):
        return None
    named = commits(paths)
    if named is None or not named[0]:
        # The paths have no store, or a store whose first write did not finish.
        return None
    with look(paths) as store:
        return store.hyperparameters or {}, store.step


def look(paths: _Path | Sequence[_Path]) -> Store:
    """Opens a store read-only at its newest commit with an undamaged root and catalog.

    Also opens a store that `Store.open` rejects because its newest commit is damaged or its run was not closed.
    `Engine` can stage nothing in this store, and `close()` changes nothing on storage.

    Raises:
        StorageError: no store exists at `paths`, or it cannot be opened.
        CorruptionError: no commit has an undamaged root and catalog.
    """
    return Store(paths_listed(paths), None, [], "", CHUNK_ELEMENTS, "look", "step")
