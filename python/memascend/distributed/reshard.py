"""Finds the stores of a run that had another number of ranks, and fills new stores with the rows in these stores."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from memascend.distributed.collectives import Collectives
from memascend.distributed.control_plane import Alone
from memascend.distributed.opening import (
    EARLIER,
    Stores,
    common_of,
    describe_store,
    is_at,
    require_own,
    seen_at,
    superseded_by,
)
from memascend.distributed.rows import Rows, is_in_blocks
from memascend.errors import ConfigError
from memascend.storage import Store, order_of, pending_file
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.rows import Layout

    # A parameter's name, values and state, and the number of its updates.
    First = tuple[str, torch.Tensor, dict[str, torch.Tensor], int]


_log = logging.getLogger("memascend")
_FOLDER = re.compile(r"rank-(\d{1,5})-of-(\d{1,5})")
_FOLDER_OF_REPLICA = re.compile(r"replica-(\d{1,5})")
_FILE = "memascend.store"
# The key of a parameter's number of updates, among the tensors of this parameter that move between ranks.
_STEP = "\0step"


def file_of_rank(folder: str, rank: int, count: int) -> Path:
    """Returns the file of a rank's store in a folder; `count` ranks shard the rows of a replica.

    The store of a single process is directly in the folder. Stores of other replicas than the first are in `replica-N`
    folders.
    """
    replica, shard = divmod(rank, count)
    of_replica = Path(folder, f"replica-{replica}") if replica else Path(folder)
    return of_replica / _FILE if count == 1 else of_replica / f"rank-{shard}-of-{count}" / _FILE


def left_over(folder: str, layout: Layout, used: Collection[str] = ()) -> list[Path]:
    """Returns the stores on this rank's host that have this rank's rows and belong to dropped replicas.

    Leaves out the stores in the folders `used`: a rank whose store is missing may use the store of a dropped replica.
    """
    there = stores_in(folder, layout.shards).items()
    of_others = [file for rank, file in there if rank >= layout.size and rank % layout.shards == layout.shard]
    return [file for file in of_others if f"{file.parent}/" not in used]


def stores_in(folder: str, count: int) -> dict[int, Path]:
    """Returns, by rank, the stores in a folder that were written with `count` ranks in a replica."""
    return {rank: file_of_rank(folder, rank, count) for rank, of in sorted(_there(folder)) if of == count}


class Earlier:
    """Stores of earlier runs with other numbers of ranks. A run resumes from these stores, or only removes them."""

    def __init__(
        self,
        folder: str,
        source: Stores | None,
        outlived: Sequence[tuple[Stores, Mapping[str, Any]]],
        exchange: Exchange | Alone,
        layout: Layout,
    ) -> None:
        """`source` has the stores that ranks read; None if ranks only remove stores.

        `outlived` has the stores that newer stores have replaced, each with its identity. No rank reads these stores.
        """
        self.exchange = exchange
        self.layout = layout
        self.rank, self.count = layout.rank, layout.shards
        # By shard of the old stores: `owners` has the present rank that reads the shard's store, and `files` has the
        # file of the store. These lists are empty if the run resumes from stores of the present number of ranks and
        # only removes other stores.
        self.owners = [] if source is None else [source.owners[rank] for rank in range(source.count)]
        self.files = (
            []
            if source is None
            else [file_of_rank(folder, source.numbers[rank], source.count) for rank in range(source.count)]
        )
        # By shard of the old stores: the stores that are open on this rank.
        self.stores: dict[int, Store] = {}
        # The identity of the commit at which the old stores are opened, and from which the new stores continue. Zeros
        # if each old store has all rows, and before `open()`.
        self.identity = bytes(16)
        # Stores of the present number of ranks are overwritten, not removed.
        others = [(one, identity) for one, identity in outlived if one.count != self.count]
        # The identities of the stores that the new stores replace. The first commit of the new stores contains this
        # list. `open` adds the identity of the stores that it opens.
        self.replaced_identities: list[Mapping[str, Any]] = [identity for _, identity in others]
        self._source = source
        replaced = [one for one, _ in others] if source is None else [source, *(one for one, _ in others)]
        self._useless = [
            (file_of_rank(folder, rank, one.count), one.all_owners[rank]) for one in replaced for rank in one.redundant
        ]
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Opens the stores that this rank reads, at the newest commit that the stores of all shards have.

        The stores stay locked until `close()`.
        """
        source = self._source
        assert source is not None
        each = [dict(source.seen[number]) for number in range(source.count)]
        require_own({source.numbers[rank]: one for rank, one in enumerate(each)}, source.count)
        common = None
        if source.count > 1:
            common, self.identity = common_of(each)
        for number in [number for number, owner in enumerate(self.owners) if owner == self.rank]:
            newest = common is None or is_at(source.seen[number]["commits"][0], common, self.identity)
            store = Store.open(self.files[number], existing="resume" if newest else "previous")
            self._open.callback(store.close)
            self.stores[number] = store
        self.replaced_identities = [source.named(common), *self.replaced_identities]

    def close(self) -> None:
        """Closes the stores."""
        self._open.close()

    def remove(self) -> None:
        """Removes old stores that are not needed (`Stores.redundant`), if this rank owns them (`Stores.all_owners`).

        Called once all ranks have opened the stores of the run.
        """
        self.close()
        for file in [file for file, owner in self._useless if owner == self.rank]:
            remove_store(file)
        if self._useless:
            _log.info(
                "the run continues with %d ranks, and stores of other numbers of ranks that it replaces are removed",
                self.layout.size,
            )


def remove_store(file: Path) -> None:
    """Removes a rank's store, and the folders of ranks and replicas that are then empty."""
    file.unlink(missing_ok=True)
    # Sync the folder: after a loss of power, the store must not reappear, because the run continues without it.
    descriptor = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    # `rmdir` fails for a folder that has other files, so this folder stays.
    with contextlib.suppress(OSError):
        for folder in file.parents:
            if not (_FOLDER.fullmatch(folder.name) or _FOLDER_OF_REPLICA.fullmatch(folder.name)):
                break
            folder.rmdir()


def find_earlier(folder: str, existing: str, exchange: Exchange | Alone, layout: Layout) -> Earlier | None:
    """Returns the stores of other numbers of ranks that a run resumes from, or only removes; None if there are none.

    Here, a number of ranks counts only the ranks of one replica, which shard its rows. A collective call.

    Raises:
        ConfigError: `existing` is not "resume", or the stores from which to resume are incomplete or not known.
    """
    count = layout.shards
    found = _found(folder, exchange, count)
    for one in [one for one in found.values() if one.is_unfilled]:
        if one.count != count:
            _log.warning(
                "not all stores of %d ranks in %s were filled, so the run does not resume from them: remove them if "
                "you do not need them",
                one.count,
                folder,
            )
            _require_harmless(one, [other for other in found.values() if not other.is_unfilled], existing)
        del found[one.count]
    others = sorted(of for of in found if of != count)
    if not others:
        return None
    if existing != "resume":
        raise ConfigError(
            f"stores of {' and of '.join(map(str, others))} ranks are in {folder}, and this run has {count} ranks "
            "(counting one replica): existing='resume' resumes from them; to begin a new run, move these stores away"
        )
    known = superseded_by(found.values())
    newest = [one for one in found.values() if one.count not in known]
    if len(newest) != 1:
        of = " and of ".join(map(str, sorted(found)))
        raise ConfigError(
            f"stores of {of} ranks are in {folder}, and no complete set of stores records which stores are the newest: "
            "move away all stores from which the run shall not resume; nothing was changed"
        )
    (source,) = newest
    outlived = [(found[of], identity) for of, identity in sorted(known.items())]
    if source.count == count:
        return Earlier(folder, None, outlived, exchange, layout)
    if source.missing:
        rank = source.missing[0]
        lacks = "holds no commit of the run" if rank in source.seen else "cannot be reached"
        raise ConfigError(
            f"the store of rank {rank} of {source.count} {lacks} ({file_of_rank(folder, rank, source.count)}): "
            "restore this file on the host of any rank; nothing was changed"
        )
    return Earlier(folder, source, outlived, exchange, layout)


def _found(folder: str, exchange: Exchange | Alone, count: int) -> dict[int, Stores]:
    """Returns the stores in the folder, by number of ranks; empty if no store is of another number than `count`."""
    seers: dict[int, dict[int, list[int]]] = {}
    for seer, each in enumerate(exchange.all_gather("the stores in the folder", _there(folder))):
        for number, of in each:
            seers.setdefault(of, {}).setdefault(number, []).append(seer)
    if not seers.keys() - {count}:
        return {}
    # Only one rank reads each store, because reading a store locks it.
    owners = {of: {number: who[number % len(who)] for number, who in each.items()} for of, each in seers.items()}
    own = [(of, number) for of, each in owners.items() for number, owner in each.items() if owner == exchange.rank]
    files = {(of, number): file_of_rank(folder, number, of) for of, number in sorted(own)}
    seen = [
        [of, number, {**seen_at(file), "description": describe_store(file)}] for (of, number), file in files.items()
    ]
    all_seen: dict[int, dict[int, Any]] = {of: {} for of in owners}
    for of, number, one in (one for each in exchange.all_gather("the contents of the stores", seen) for one in each):
        all_seen[of][number] = one
    return {of: Stores(count=of, all_owners=owners[of], all_seen=all_seen[of]) for of in sorted(owners)}


def _require_harmless(unfilled: Stores, filled: Sequence[Stores], existing: str) -> None:
    """Rejects a resume that would begin a new run, although some of the `unfilled` stores have a commit."""
    if existing != "resume" or filled or not any(one["commits"] for one in unfilled.seen.values()):
        return
    raise ConfigError(
        f"the store of rank {unfilled.missing[0]} of {unfilled.count} holds no state, but stores of other ranks hold "
        "state: its first write did not finish, or this store is missing or damaged; nothing was changed: restore this "
        "store from a copy, or give existing='replace' to begin a new run"
    )


def _there(folder: str) -> list[list[int]]:
    """Returns the stores in a folder, each as its rank and the number of ranks that shard the rows."""

    def names(of: str) -> list[str]:
        try:
            return sorted(os.listdir(of))  # noqa: PTH208
        except OSError:
            return []

    places = {0: folder}
    places |= {
        int(match[1]): f"{folder}/{match[0]}" for match in map(_FOLDER_OF_REPLICA.fullmatch, names(folder)) if match
    }
    found = [[replica, 1] for replica in places if _has_store(file_of_rank(folder, replica, 1))]
    for replica, place in places.items():
        for match in filter(None, map(_FOLDER.fullmatch, names(place))):
            shard, count = int(match[1]), int(match[2])
            if shard < count and _has_store(Path(place, match[0], _FILE)):
                found += [[replica * count + shard, count]]
    return found


def _has_store(file: Path) -> bool:
    # A store that was never filled counts, too, so that `find_earlier` can warn about it.
    return file.is_file() or pending_file(file).is_file()


class Passed(NamedTuple):
    """A tensor that moves from one rank to another."""

    source: int  # the rank that sends it
    target: int  # the rank that receives it
    sent: torch.Tensor | None  # on the source: the tensor; None on other ranks
    got: torch.Tensor | None  # on the target: the memory that receives the tensor; None on other ranks


class Transfer:
    """Moves tensors between ranks; all ranks call `move` together.

    A rank that fails must call `close`, so that the other ranks stop waiting for it.
    """

    def __init__(self, exchange: Exchange | Alone) -> None:
        """Makes the group; a collective call."""
        self._ranks, self._rank = range(exchange.size), exchange.rank
        self._collectives = None if isinstance(exchange, Alone) else Collectives(exchange)

    def move(self, pieces: Sequence[Passed]) -> None:
        """Moves all pieces that this rank sends or receives.

        Two ranks that exchange several pieces must list these pieces in the same order.

        Raises:
            RankError: a rank failed, or is gone.
        """
        out = [[one.sent for one in pieces if one.target == rank and one.sent is not None] for rank in self._ranks]
        into = [[one.got for one in pieces if one.source == rank and one.got is not None] for rank in self._ranks]
        for got, sent in zip(into[self._rank], out[self._rank], strict=True):
            got.copy_(sent)
        if self._collectives is None:
            return
        out[self._rank] = into[self._rank] = []
        given = torch.cat(
            [torch.empty(0, dtype=torch.uint8, device="cpu"), *(bytes_of(one.contiguous()) for one in chain(*out))]
        )
        coming, going = ([sum(one.nbytes for one in tensors) for tensors in each] for each in (into, out))
        taken = torch.empty(sum(coming), dtype=torch.uint8, device="cpu")
        self._collectives.meet(
            "moving rows", None, lambda group: distributed.all_to_all_single(taken, given, coming, going, group)
        )
        for got, values in zip(chain(*into), taken.split([one.nbytes for one in chain(*into)]), strict=True):
            got.copy_(values.clone().view(got.dtype).view(got.shape))

    def close(self) -> None:
        """Leaves the group, so that other ranks stop waiting for this rank."""
        if self._collectives is not None:
            self._collectives.close()


@dataclass(eq=False)
class EarlierValues:
    """Reads the first values of new stores from the rows in earlier stores."""

    earlier: Earlier
    shapes: Mapping[str, torch.Size]  # the shapes of whole parameters, equal on all ranks
    named: Mapping[str, torch.Tensor]  # this rank's rows of the parameters
    describe: Callable[[str], Mapping[str, torch.Tensor]]  # given a parameter's name, returns its state on meta
    optimizer: str  # the optimizer's title

    def __post_init__(self) -> None:
        earlier = self.earlier
        earlier.open()
        commits = {
            str(number): [
                store.step, store.user_state, store.hyperparameters,
                *((None, None) if number else (store.info()["optimizer"], _described(store))),
            ]
            for number, store in earlier.stores.items()
        }  # fmt: skip
        of = {
            int(number): one
            for each in earlier.exchange.all_gather("the commits of the stores", commits)
            for number, one in each.items()
        }
        self.step, self.user_state, self._hyperparameters, self._optimizer_there, self._there = of[0]
        # Take the user_state of the old shard with this rank's number. If there was no such shard, keep the user_state
        # of shard 0.
        if earlier.rank in of:
            self.user_state = of[earlier.rank][1]

    def check(self) -> None:
        """Rejects stores of another model or optimizer, before any write."""
        there = self._there
        if self._optimizer_there != self.optimizer:
            raise ConfigError(
                f"the earlier stores are of {self._optimizer_there}, and the optimizer is {self.optimizer}: give the "
                "optimizer that the run had. Nothing was changed"
            )
        for name, own in self.named.items():
            here = _description(own, self.describe(name))
            if name not in there:
                raise ConfigError(
                    f"the earlier stores have no {name!r}: give the model that the run had. Nothing was changed"
                )
            if there[name] != here:
                raise ConfigError(
                    f"{name!r} is {here} and was {there[name]} in the earlier stores (dtype, shape of a row, "
                    "state, whether dimensions are reordered): give the model and the options that the run had. "
                    "Nothing was changed"
                )
        missing = there.keys() - self.shapes.keys()
        if missing:
            raise ConfigError(
                f"the model has no {min(missing)!r}, which the earlier stores have: give the model that the run had. "
                "Nothing was changed"
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the last commit's hyperparameters, with the identities of the stores that the new stores replace."""
        return {**(self._hyperparameters or {}), EARLIER: self.earlier.replaced_identities}

    def parameters(self, units: Sequence[Any]) -> Generator[First, None, None]:
        """Yields each of this rank's parameters once; all ranks move the rows of all parameters in the same order."""
        del units
        with contextlib.closing(Transfer(self.earlier.exchange)) as transfer:
            for name, shape in self.shapes.items():
                into = self._room(name)
                transfer.move(self._pieces(name, shape, into))
                if into:
                    step = int(into.pop(_STEP))
                    yield name, into.pop(""), into, step

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a persistent buffer from the store of the first old shard to all ranks."""
        store, owner = self.earlier.stores.get(0), self.earlier.owners[0]
        sent = None if store is None else store.read(name)[0]
        got = torch.empty(tensor.shape, dtype=tensor.dtype)
        with contextlib.closing(Transfer(self.earlier.exchange)) as transfer:
            ranks = range(self.earlier.layout.size)
            transfer.move([Passed(owner, rank, sent, got if rank == self.earlier.rank else None) for rank in ranks])
        tensor.copy_(got)

    def _room(self, name: str) -> dict[str, torch.Tensor]:
        """Returns memory for this rank's part of a parameter; empty if the rank has no rows."""
        own = self.named.get(name)
        if own is None:
            return {}
        described = {"": own.detach(), **self.describe(name)}
        room = {of: torch.empty_like(tensor, device="cpu") for of, tensor in described.items()}
        return {**room, _STEP: torch.zeros((), dtype=torch.int64)}

    def _pieces(self, name: str, shape: torch.Size, into: Mapping[str, torch.Tensor]) -> list[Passed]:
        """Returns the pieces of a parameter that this rank sends or receives."""
        earlier = self.earlier
        rows = shape[0]
        olds = [_rows(rows, len(earlier.files), number) for number in range(len(earlier.files))]
        read = {number: self._read(number, name) for number in earlier.stores if olds[number][0] < olds[number][1]}
        pieces = []
        for rank in range(earlier.layout.size):
            start, end = _rows(rows, earlier.count, rank % earlier.count)
            first = True
            for number, (old_start, old_end) in enumerate(olds):
                low, high = max(start, old_start), min(end, old_end)
                if low >= high:
                    continue
                source = earlier.owners[number]
                sent = read.get(number, {}) if source == earlier.rank else {}
                got = into if rank == earlier.rank else {}
                tensors = sent or got
                for of in sorted(tensors):
                    if not first and Rows(tensors[""].shape, 0, len(tensors[""])).first_of(of, tensors[of]) is None:
                        # A tensor that is not sharded is equal in all old stores: only the first source sends it.
                        continue
                    out = _part(sent, of, low - old_start, high - old_start) if sent else None
                    room = _part(got, of, low - start, high - start) if got else None
                    pieces.append(Passed(source, rank, out, room))
                first = False
        return pieces

    def _read(self, number: int, name: str) -> dict[str, torch.Tensor]:
        store = self.earlier.stores[number]
        values, state = store.read(name)
        return {"": values, **state, _STEP: torch.tensor(store.record(name)["step"])}


def _rows(rows: int, count: int, rank: int) -> tuple[int, int]:
    """Returns the range of rows that `rank` has if FSDP2 shards `rows` rows among `count` ranks."""
    size = -(-rows // count)
    return min(rows, rank * size), min(rows, (rank + 1) * size)


def _part(tensors: Mapping[str, torch.Tensor], of: str, start: int, end: int) -> torch.Tensor:
    """Returns the part of a tensor for a range of rows. For state in blocks, the range must not split a block."""
    return Rows(tensors[""].shape, start, end - start).of(of, tensors[of])


def _description(values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> list[Any]:
    """Returns the properties of a parameter's rows that do not depend on the number of rows."""
    kinds = sorted([of, str(tensor.dtype), tensor.shape == values.shape] for of, tensor in state.items())
    # The order in which the dimensions are stored decides which elements a block of the state covers.
    reordered = any(map(is_in_blocks, state)) and order_of(values) is not None
    return [str(values.dtype), list(values.shape[1:]), kinds, reordered]


def _described(store: Store) -> dict[str, list[Any]]:
    """Returns the `_description` of each parameter in a store, by name."""
    found = {}
    for record in store.each_record():
        if record["buffer"]:
            continue
        shape, state = list(record["shape"]), record["state"]
        kinds = sorted([of, f"torch.{dtype}", list(own) == shape] for of, dtype, own in state)
        reordered = any(is_in_blocks(of) for of, _, _ in state) and record["order"] is not None
        found[record["name"]] = [f"torch.{record['dtype']}", shape[1:], kinds, reordered]
    return found
