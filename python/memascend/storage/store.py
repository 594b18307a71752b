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
from memascend.memory import PAGE_BYTES
from memascend.storage.entries import (
    CHUNK_ELEMENTS,
    Descriptions,
    Entry,
    Part,
    chunk_elements_of,
    description,
    json_of,
    place_of,
    require,
    require_laid_out,
    scan_of,
)
from memascend.text import Closing, paths_listed

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


class Fetch:
    """A unit on its way into memory; `Store.fetch` makes it. Any thread may use it.

    Until the device is done with it the slots that it reads are not written: the step after the next commit waits for
    that. Dropping it waits for the device.
    """

    __slots__ = ("_core",)

    def __init__(self, core: _core.Fetch) -> None:
        self._core = core

    def wait(self) -> int:
        """Wait for the device, without the GIL, and check every byte. Ctrl-C ends the wait, not the read.

        Returns:
            The newest version among its entries (the generation that wrote it). Waiting again says the same again.

        Raises:
            StorageError: the device failed.
            CorruptionError: what is on storage is not what was written; the message names entry and chunk.
        """
        return self._core.wait()

    def done(self) -> bool:
        """Whether the device is done with it, well or not. Never waits."""
        return self._core.done()


class Checkers:
    """Threads that check parts of units as they come, so that nobody computes checksums who has copies to begin.

    They end when this and every part that they check are gone.
    """

    __slots__ = ("core",)

    def __init__(self, threads: int) -> None:
        """As many threads, or as many as can be had; with none, whoever waits for a part checks it."""
        self.core = _core.Checkers(threads)

    @property
    def threads(self) -> int:
        """Threads that there are."""
        return self.core.threads


class UnitParts:
    """A unit that is read part by part; `Store.parts` makes it. All parts are of one commit.

    Until each was read once, or it and every read of it are gone, the slots that it reads are not written: the step
    after the next commit waits for that.
    """

    __slots__ = ("_checkers", "_core", "_places")

    def __init__(self, core: _core.Parts, checkers: Checkers | None = None) -> None:
        self._core = core
        self._places = core.places()
        self._checkers = None if checkers is None else checkers.core

    def places(self) -> list[tuple[int, int]]:
        """Where each part begins in the unit, and its bytes."""
        return self._places

    def begin(self, index: int, into: torch.Tensor) -> _core.PartFetch:
        """Begin to read a part into a contiguous uint8 CPU tensor of its size, before all other I/O that waits.

        The tensor is held until the end. What comes back has `wait()`, which checks every byte and raises as
        `Fetch.wait` does, and `done()`; dropping it waits for the device.
        """
        require("a part", into, "uint8", [self._places[index][1]], None)
        return self._core.begin(index, *place_of(into), self._checkers)


_Path = str | os.PathLike[str]


def not_as_written(path: str, what: str) -> CorruptionError:
    """That a store's checksums are right, and what it says is not what any version of memascend writes."""
    return CorruptionError(
        f"{path}: {what}. The checksum is right, so another program wrote that; restore the store from a copy, or "
        "try existing='previous', which opens the commit before",
        path=path,
    )


class Store(Closing):
    """State on SSD: every commit is all of a step or none of it, and every byte that is read was checked."""

    __slots__ = ("_core", "_is_temporary", "_shared", "_units", "descriptions")

    def __init__(self, core: _core.Store) -> None:
        self._core = core
        self._is_temporary = False
        self._shared: SharedCommits | None = None
        self._units: list[str] = core.info()["units"]
        self.descriptions = Descriptions(self.each_entry())

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
        core = _core.Store(
            paths_listed(paths), described, units, optimizer, chunk, existing, durability, stripe, backend
        )
        store = cls(core)
        if fill:
            store._settled()
        if core.created and fill:
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
        store = cls(_core.Store(paths_listed(paths), None, [], "", CHUNK_ELEMENTS, existing, durability, None, backend))
        store._settled()
        return store

    def go_back(self) -> None:
        """Give the newest commit up for good, where the one before it was opened without that."""
        self._core.go_back()

    def _settled(self) -> None:
        try:
            self.go_back()
        except BaseException:
            self.close()
            raise

    def difference(self, entries: Sequence[Entry], *, optimizer: str) -> str | None:
        """In which way it is no store of these entries and this optimizer, in words; None where it is one."""
        units, described = description(entries)
        return self._core.difference(described, units, optimizer, chunk_elements_of(entries))

    @property
    def created(self) -> bool:
        """Whether it was made now."""
        return self._core.created

    @property
    def step(self) -> int:
        """Committed steps."""
        return int(self._core.info()["step"])

    @property
    def user_state(self) -> Any:
        """The JSON value that was committed last; None where there was none."""
        return self._committed_json("user")

    @property
    def hyperparameters(self) -> Any:
        """The hyperparameters that were committed last; None where there were none."""
        return self._committed_json("hyperparameters")

    def _committed_json(self, which: Literal["user", "hyperparameters"]) -> Any:
        info = self._core.info()
        try:
            return json.loads(info[which] or "null")
        except (ValueError, RecursionError) as error:
            what = {"user": "user_state", "hyperparameters": "the hyperparameters"}[which]
            raise not_as_written(info["devices"][0], f"{what} of step {info['step']} are no JSON: {error}") from error

    def info(self) -> dict[str, Any]:
        """What is known of it: "uuid", "generation", "step", "optimizer", "units", "devices" and sizes in bytes.

        Of a store of several ranks also "run", "common" and "identity": the run's id, the commit's number and what
        tells it from that of another continuation, the same on all ranks; and "rank" of "ranks".
        """
        return self._core.info()

    def entries(self) -> list[dict[str, Any]]:
        """Each entry: "name", "buffer", "unit", "dtype", "shape", "step", "version", "staged", "compact", "state".

        Also "unit_offset", where its values begin in the bytes of its unit, and "order" and "spill" as in `Entry`.
        """
        return list(self.each_entry())

    def entry(self, name: str) -> dict[str, Any]:
        """One of them."""
        return self._core.entry(self.index(name))

    def each_entry(self) -> Iterator[dict[str, Any]]:
        """The same one at a time: what is known of thousands takes megabytes, which Python keeps once it had them."""
        return map(self._core.entry, range(self._core.count()))

    def stage(
        self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None, *, step: int
    ) -> None:
        """Stage a whole entry, as its update number `step`; `commit()` makes it live.

        Of a compact entry, `state` is the compact one, or what `compact_of` makes it from.
        """
        tensors = self.descriptions.tensors(name, values, state or {})
        self._core.stage(self.index(name), step, [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])

    def read(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A copy of an entry as the last commit left it: its values, and its state by name.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        values, state = self.descriptions.room(name)
        tensors = (values, *state.values())
        self._core.read(self.index(name), [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
        return values, state

    def scan(self, names: Sequence[str], visit: Callable[[str, list[Part]], object]) -> None:
        """Read entries in this order, as the last commit left them, in memory that does not grow with them.

        `visit` is called with a name and parts that belong together: of a chunk, the values and the state of the same
        elements; tensors of another shape come by themselves. The parts stand on memory that is taken again after the
        call. It must not commit.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        self._core.scan(*scan_of(self.descriptions, names, visit))

    def hold(self, names: Sequence[str], *, registered: bool = False) -> None:
        """Hold entries in memory from now on; what was held before is not any more. Nothing is read before `refresh`.

        It takes "entry_bytes" of `sizes` for each, until the store is closed: `registered`, in memory that a device
        copies from, where that can be had.

        Raises:
            ConfigError: there is no such entry.
            MemoryLimitError: the machine or its cgroup does not have the memory; nothing is held.
        """
        self._core.hold([self.index(name) for name in names], registered)

    def refresh(self, names: Sequence[str], progress: Callable[[int, int], object] | None = None) -> None:
        """Read what is held of some entries where it is not in memory; `progress(done, all)` hears of bytes.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        self._core.refresh([self.index(name) for name in names], progress)

    def keep_log(self, names: Sequence[str], steps: int) -> int:
        """Log the gradients of held entries from now on, instead of writing them each step; how many steps find room.

        Each of these entries is then written whole once in so many steps. Files grow by what the log lacks; with less
        room there are fewer steps, and 0 means that there is none. The entries have `spill`, gradients of that dtype,
        and updates of the engine's own kernels.

        Raises:
            UsageError: with durability "none" a store keeps no log.
        """
        return self._core.keep_log([self.index(name) for name in names], steps)

    def write_applied(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Write what only memory and the log have of held entries, as a part of the last step: the log ends with it."""
        self._core.write_applied(progress)

    def give_up(self) -> None:
        """Give up what only memory has, where it has something: the store stays unclosed, which opening it says."""
        self._core.give_up()

    def held_unit(self, unit: str) -> torch.Tensor | None:
        """The values of a unit where they are held, as the last commit left them; None where not all of it is held.

        Each entry is at its "unit_offset" of the bytes. An update changes them where they lie.
        """
        import torch

        lent = self._core.held_unit(self._units.index(unit))
        return None if lent is None else torch.frombuffer(lent, dtype=torch.uint8)

    @property
    def held_epoch(self) -> int:
        """While it stays the same, what `held_unit` gave is what the last commit left."""
        return self._core.held_epoch

    def spoil(self, name: str) -> None:
        """Say that somebody wrote to the values of a held entry in memory: `refresh` reads them again."""
        self._core.spoil(self.index(name))

    def fetch(self, unit: str, into: torch.Tensor) -> Fetch:
        """Begin to read the values of a unit, as the last commit left them, before all other I/O that waits.

        They go `into` a contiguous uint8 CPU tensor of as many bytes as `sizes` says, which begins on a page. Each
        entry is at its "unit_offset". It is held until the end, and must not be touched before.

        Raises:
            ConfigError: there is no such unit, or the memory does not fit.
            StorageError: the device refused; or the store is closed (UsageError).
        """
        number = self._number_of(unit)
        if str(into.dtype) != "torch.uint8" or into.device.type != "cpu" or not into.is_contiguous():
            raise ConfigError("a unit is fetched into a contiguous uint8 tensor on the CPU")
        if into.data_ptr() % PAGE_BYTES:
            raise ConfigError(f"the memory that a unit is fetched into must begin on a page of {PAGE_BYTES} bytes")
        return Fetch(self._core.fetch(number, into.data_ptr(), into.nbytes, into.untyped_storage()))

    def parts(self, unit: str, bytes_max: int, checkers: Checkers | None = None) -> UnitParts:
        """The values of a unit, as the last commit left them, in parts of at most so many bytes; reads nothing yet.

        `checkers` check them as they come; without, whoever waits for one does.

        Raises:
            ConfigError: there is no such unit, or a piece of it is larger than a part may be.
        """
        return UnitParts(_core.Parts(self._core, self._number_of(unit), bytes_max), checkers)

    def _number_of(self, unit: str) -> int:
        if unit not in self._units:
            raise ConfigError(f"the store has no unit {unit!r}")
        return self._units.index(unit)

    def counters(self) -> dict[str, Any]:
        """Since it was opened: "fetches", "fetched_bytes", "held_bytes", "wait_seconds" in `Fetch.wait`, and all I/O.

        "held_bytes" were taken from held entries, and not read from storage. "read_bytes" and "written_bytes" count
        every transfer of the volume, those of fetches and updates too.
        """
        return self._core.counters()

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Make all that is staged live at once; None leaves what was committed before. Returns the generation."""
        return self.make_live(self._core.commit, step, user_state, hyperparameters)

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
        self._core.set_first_elements([firsts.get(entry["name"], 0) for entry in self.each_entry()])

    def end(self) -> None:
        """Have nothing written any more, by `close()` either: what is committed stays as it is."""
        self._core.end()

    def discard(self, name: str | None = None) -> None:
        """Forget all that is staged, or what is staged of one entry."""
        self._core.discard(None if name is None else self.index(name))

    def check_log(self) -> None:
        """Check what `Engine.replay` reads, which does it too: where others have to know it before any of them writes.

        Raises:
            CorruptionError: a gradient of the log, or the state that it is applied to, is not what was written.
        """
        self._core.check_log()

    def verify(self, progress: Callable[[int, int], object] | None = None) -> tuple[int, int]:
        """Read and check everything that is live: pieces and bytes. `progress(done, all)` hears of bytes.

        Raises:
            CorruptionError: the first piece that is not.
        """
        return self._core.verify(progress)

    def damaged(self) -> list[str]:
        """Damaged copies of labels and description, in words; the first commit after an open repairs them."""
        return self._core.damaged()

    def close(self) -> None:
        """Keep what was committed, drop what is only staged, and let go of the devices. Twice is fine.

        Raises:
            StorageError: its file was deleted, moved or replaced meanwhile; everything was let go of all the same.
        """
        lost = self.lost()
        self._core.close()
        if lost is not None:
            raise lost

    def forsake(self) -> None:
        """Have what was made for it, where there was nothing, removed by `close()`, before anybody else can have it."""
        self._core.forsake()

    def become_temporary(self) -> None:
        """Its file is about to have no name on purpose: that it has none is no loss."""
        self._is_temporary = True

    def lost(self) -> StorageError | None:
        """What became of a file of it that its path does not name any more; None where all is as it was."""
        found = None if self._is_temporary else self._core.lost()
        return loss(*found) if found else None

    def index(self, name: str) -> int:
        """The number of an entry."""
        return self.descriptions.index(name)


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
    return Store(_core.store_look(paths_listed(paths), backend))
