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

    from memascend.distributed.control_plane import Agreement


# Called before a commit takes effect; raises if not all ranks have staged it.
Agree = Callable[[], object]
# The id of a run (16 bytes), the number and identity (16 bytes) of a commit, the rank, and the number of ranks.
CommitOfRank = tuple[bytes, int, bytes, int, int]
# The commit of a store or of its engine: step, user value, hyperparameters.
CommitOfOne = Callable[[int, str | None, str | None, CommitOfRank | None, Agree | None], int]
_RESCUE = "is gone with the end of this run; keep it with optimizer.save(folder)"
_LOST = {
    "deleted": f"was deleted while its store was in use: what is in it {_RESCUE}",
    "moved": "was moved while its store was in use: what was committed is in it, under the name that it has now",
    "truncated": f"was truncated while its store was in use: what was behind its end {_RESCUE}",
    "replaced": f"is now another file than that of the store in use: unless that was moved, what is in it {_RESCUE}",
}
_Path = str | os.PathLike[str]


def pending_file(file: Path) -> Path:
    """The file of a new store until its first commit, which gives it the name of `file`."""
    return file.with_name(file.name + _core.PENDING_SUFFIX)


def not_as_written(path: str, what: str) -> CorruptionError:
    """The error for a store whose checksums are right and whose contents no version of memascend writes."""
    return CorruptionError(
        f"{path}: {what}. The checksum is right, so another program wrote that; restore the store from a copy, or "
        "try existing='previous', which opens the commit before",
        path=path,
    )


class Store(_core.Store):
    """State on SSD: every commit is all of a step or none of it, and every byte that is read is verified."""

    __slots__ = ("_shared",)

    def __init__(self, *_: Any) -> None:
        """See `create` and `open`."""
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
        """Make a store, for the caller to fill and commit; or resume an existing store, whose own values then count.

        A new one (`created`) is at generation 0. Before its first commit it cannot be opened.

        Args:
            paths: a folder, a file or a raw block device, or several, over which it is striped.
            records: its contents, grouped by unit.
            optimizer: the optimizer's name; a store of another one is rejected.
            existing: what to do with an existing store: refuse it, resume its last committed step, replace it, or go
                back to the commit before, which keeps the newest one until `go_back()`; nothing can be staged before.
            durability: "step": commits survive a loss of power; "none": no commit survives before `close()`.
            chunk_elements: elements of a chunk, a multiple of 2,048, and of 4,096 where a record of more elements has
                values of one byte; None: see `chunk_elements_of`.

        Raises:
            ConfigError: an argument is wrong, or an existing store does not fit or is refused by `existing`.
            StorageError: a device is full, foreign or in use; nothing was changed.
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
        """Open the last committed step of an existing store, or the commit before it.

        "previous" is for a store whose newest commit is damaged or unwanted. It first verifies every byte of the other
        commit, and changes nothing if a byte is wrong. Then it drops the newest commit durably. It works until the next
        step begins, since each step overwrites the commit before the last.

        Raises:
            ConfigError: "previous", and only one commit was ever made.
            StorageError: there is no store, or it is unfinished, unclosed, of another version, or misses a device.
            CorruptionError: it is damaged; the message says where, and whether the other commit may be whole.
        """
        if existing not in ("resume", "previous"):
            raise ConfigError(f"a store is opened with existing='resume' or 'previous', not {existing!r}")
        store = cls(paths_listed(paths), None, [], "", CHUNK_ELEMENTS, existing, durability)
        try:
            store.go_back()
        except BaseException:
            store.close()
            raise
        return store

    def difference(self, records: Sequence[Record], *, optimizer: str) -> str | None:
        """How the store differs from these records and this optimizer, in words; None if it fits."""
        units, described = description(records)
        return self.difference_of(described, units, optimizer, chunk_elements_of(records))

    @property
    def user_state(self) -> Any:
        """The JSON value of the last commit; None if it has none."""
        return self._committed_json("user")

    @property
    def hyperparameters(self) -> Any:
        """The hyperparameters of the last commit; None if it has none."""
        return self._committed_json("hyperparameters")

    def _committed_json(self, which: Literal["user", "hyperparameters"]) -> Any:
        info = self.info()
        try:
            return json.loads(info[which] or "null")
        except (ValueError, RecursionError) as error:
            what = {"user": "user_state", "hyperparameters": "the hyperparameters"}[which]
            raise not_as_written(info["devices"][0], f"{what} of step {info['step']} are no JSON: {error}") from error

    def records(self) -> list[dict[str, Any]]:
        """Each record: "name", "buffer", "unit", "dtype", "shape", "step", "version", "staged", "compact", "state".

        Also "unit_offset", where its values begin in the bytes of its unit, and "order" and "spill" as in `Record`.
        """
        return list(self.each_record())

    def each_record(self) -> Iterator[dict[str, Any]]:
        """The same one at a time: a list of thousands takes megabytes, which Python does not return to the system."""
        return map(self.record_at, range(self.count()))

    def read(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A copy of a record as the last commit left it: its values, and its state by name.

        Raises:
            CorruptionError: the bytes on storage are not those that were written.
        """
        values, state = room_for(self.record(name))
        tensors = (values, *state.values())
        self.read_at(self.index(name), [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
        return values, state

    def scan(self, names: Sequence[str], visit: Callable[[str, list[Part]], object]) -> None:
        """Read records in this order, as the last commit left them, in memory that does not grow with them.

        `visit` is called with a name and the parts of a chunk: values and state of the same elements. State of another
        shape is passed in calls of its own. The memory of the parts is reused after the call. `visit` must not commit.

        Raises:
            CorruptionError: the bytes on storage are not those that were written.
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
        """Make all staged records live at once; None keeps the committed value. Returns the generation."""
        return self.make_live(self.commit_as, step, user_state, hyperparameters)

    def share(self, commits: Agreement) -> None:
        """Make later commits together with other ranks."""
        self._shared = commits

    @property
    def shared(self) -> Agreement:
        """What makes commits together with other ranks."""
        assert self._shared is not None
        return self._shared

    def make_live(self, commit: CommitOfOne, step: int, user_state: Any, hyperparameters: Any) -> int:
        """Commit by `commit`, the store's or its engine's, together with the other ranks if there are any."""
        said = (step, _json_of(user_state), _json_of(hyperparameters))
        if self._shared is None:
            return commit(*said, None, None)
        return self._shared.commit(lambda run, agree: commit(*said, run, agree))

    def preparing(self) -> AbstractContextManager[None]:
        """Around the work before a commit: if it fails, the other ranks are notified instead of waiting."""
        return contextlib.nullcontext() if self._shared is None else self._shared.step()

    def close(self) -> None:
        """Keep commits, drop staged records, and close the devices. A second call does nothing.

        Raises:
            StorageError: its file was deleted, moved or replaced meanwhile; all devices are closed nevertheless.
        """
        lost = self.lost()
        super().close()
        if lost is not None:
            raise lost

    def lost(self) -> StorageError | None:
        """The error for a file that its path does not name any more; None if all files are in place."""
        found = self.lost_file()
        if found is None:
            return None
        path, what = found
        return StorageError(f"{path} {_LOST[what]}", errno=errno.ENOENT, path=os.fspath(path))


def _json_of(value: Any) -> str | None:
    """A value as text; None stays None."""
    try:
        return None if value is None else json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"only JSON values can be committed: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit on storage, with its damage."""

    generation: int | None  # counts commits; None if its root is damaged
    step: int | None  # committed steps; None if its catalog is damaged
    extents: int  # the number of extents that are whole
    nbytes: int  # their bytes
    damages: list[str]  # descriptions of the first damages
    others: int  # the number of further damages

    @property
    def whole(self) -> bool:
        """Whether every byte of it is as it was written."""
        return not self.damages


class NamedCommit(NamedTuple):
    """A commit as its root names it."""

    generation: int  # counts commits of this store
    run: bytes  # the id of its run of several ranks; zeros for a single process
    number: int  # of this commit, the same on all ranks of that run
    # Distinguishes it from commits with this number in other continuations of the run, the same on all ranks; zeros for
    # a single process.
    identity: bytes
    rank: int  # of the store
    ranks: int  # 0 for a single process
    kept: bool  # False while a run with durability "none" continues


def commits(paths: _Path | Sequence[_Path]) -> tuple[list[NamedCommit], str | None] | None:
    """The commits that the roots of a store name, the newest first, and what is wrong with a damaged root.

    Nothing else is read, and nothing is written. The list is empty if the first write did not finish, or if the file is
    empty. None: there is no store.

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
    """Read and verify both commits of a store; `progress(done, all)` is called with bytes.

    Returns:
        First the commit that may be the newest: one with a damaged root, else the newer one. Only one if only one was
        ever made.

    Raises:
        StorageError: there is no store, or it cannot be opened.
        CorruptionError: a part that both commits need is damaged.
    """
    found = _core.store_examine(paths_listed(paths), progress)
    return [Commit(nbytes=one.pop("bytes"), **one) for one in found]


def newest(paths: Sequence[str]) -> tuple[dict[str, Any], int] | None:
    """The hyperparameters and the step of a store's newest commit; None where there is no store, or no commit yet.

    Raises:
        StorageError, CorruptionError: as `commits` and `look` do.
    """
    files = [Path(path) for path in paths]
    if not any(file.is_block_device() or (file.is_file() and file.stat().st_size) for file in files):
        return None
    named = commits(paths)
    if named is None or not named[0]:
        # Blank, or without a first commit.
        return None
    with look(paths) as store:
        return store.hyperparameters or {}, store.step


def look(paths: _Path | Sequence[_Path]) -> Store:
    """Open a store for reading, at its newest commit whose catalog is whole, even if `Store.open` would reject it.

    Nothing can be staged in it, and closing it changes nothing on storage.

    Raises:
        StorageError: there is no store.
        CorruptionError: no catalog is whole.
    """
    return Store(paths_listed(paths), None, [], "", CHUNK_ELEMENTS, "look", "step")
