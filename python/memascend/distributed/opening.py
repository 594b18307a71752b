"""Opens the stores of all ranks at one commit.

[Note: One common commit] A store's two roots name the newest commits of the store. Ranks are never more than one commit
apart (see `Agreement`), so at least one commit is in the roots of all undamaged stores. All ranks exchange the contents
of their roots (`seen_at`). To resume, each rank then opens its store at the newest commit that all ranks have
(`_drop_lagging_replicas` has an exception): with existing="resume", or with existing="previous" if this rank's newest
commit is missing on another rank. If a rank has lost its store, and another rank with the same rows has a store,
`Refill` fills a new store from that store.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memascend.distributed.agreement import Agreement
from memascend.distributed.control_plane import shortened
from memascend.errors import ConfigError, CorruptionError, MemascendError, RankError, StorageError
from memascend.plan.decision import file_of
from memascend.storage import commits, look
from memascend.text import paths_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.rows import Layout
    from memascend.storage import Store


# A field in the hyperparameters of a store's first commit. The field lists the stores that the new stores replace. The
# stores whose values were read are first in the list.
EARLIER = "earlier"
# The number of a run's first commit on several ranks; commits of a single process have number 0.
_FIRST = 1
# The value of `Stores.count` for the store of a single process.
_OF_ONE = 1


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The stores in a folder that were written with the same number of ranks, as read before any store was opened."""

    count: int  # the number of ranks that shard the rows of a replica
    all_owners: Mapping[int, int]  # by old rank: the present rank that reads the old rank's store
    # By old rank: the result of `seen_at` for its store. The entry "description" has the result of `describe_store`.
    all_seen: Mapping[int, Mapping[str, Any]]

    @cached_property
    def numbers(self) -> dict[int, int]:
        """By shard: the old rank whose store is read. Of all stores of the shard, this store has the newest commit."""
        ranks = sorted(self.all_seen, key=lambda rank: (-self._newest(rank), rank))
        return {rank % self.count: rank for rank in reversed(ranks)}

    def _newest(self, rank: int) -> int:
        """Returns the number of the newest commit of an old rank's store; -1 if it has no commit or is unverified."""
        one = self.all_seen[rank]
        return -1 if _is_unverified(one) else max((commit["number"] for commit in one["commits"]), default=-1)

    @property
    def redundant(self) -> list[int]:
        """The old ranks whose stores are not needed once the run has resumed from the stores in `numbers`.

        A store is not needed if the run has resumed from this store, if this store has no commit or is unverified, or
        if the newest commit of this store is also in the store from which the run has resumed.
        """
        known = {shard: [commit["identity"] for commit in one["commits"]] for shard, one in self.seen.items()}
        return [
            rank
            for rank, one in self.all_seen.items()
            if rank == self.numbers[rank % self.count]
            or not one["commits"]
            or _is_unverified(one)
            or one["commits"][0]["identity"] in known[rank % self.count]
        ]

    @property
    def owners(self) -> dict[int, int]:
        """By shard: the present rank that reads the shard's store."""
        return {shard: self.all_owners[rank] for shard, rank in self.numbers.items()}

    @property
    def seen(self) -> dict[int, Mapping[str, Any]]:
        """By shard: the result of `seen_at` for the shard's store."""
        return {shard: self.all_seen[rank] for shard, rank in self.numbers.items()}

    @property
    def missing(self) -> list[int]:
        """The shards whose store is missing, has no commit, or is unverified."""
        return [rank for rank in range(self.count) if rank not in self.seen or self._is_empty(rank)]

    @property
    def is_unfilled(self) -> bool:
        """True if a store in `seen` has no commit or is unverified, and no store has more than the first commit.

        No rank has then made a step, because no rank stages a second commit before all ranks have the first commit.
        """
        numbers = [commit["number"] for one in self.seen.values() for commit in one["commits"]]
        return any(map(self._is_empty, self.seen)) and all(number <= _FIRST for number in numbers)

    @property
    def description(self) -> Mapping[str, Any] | None:
        """The result of `describe_store` for the first store that exists; None if that store cannot be opened."""
        first = min(rank for rank, one in self.seen.items() if one["commits"] or one["error"])
        description: Mapping[str, Any] | None = self.seen[first]["description"]
        return description

    def named(self, number: int | None) -> dict[str, Any]:
        """Returns the identity of commit `number` of these stores.

        For the store of a single process `number` is None, and the identity has the store's id and step.
        """
        if number is None:
            description = self.description or {}
            return {"ranks": self.count, "run": description.get("uuid"), "number": description.get("step")}
        return {"ranks": self.count, "run": self.seen[0]["commits"][0]["run"], "number": number}

    def are(self, identity: Mapping[str, Any]) -> bool:
        """True if `identity`, a result of `named()`, identifies these stores, even if some of them were removed."""
        if self.count == _OF_ONE:
            return self.description is not None and self.named(None) == identity
        return all(
            any((one["run"], one["number"]) == (identity["run"], identity["number"]) for one in seen["commits"])
            for rank, seen in self.seen.items()
            if not self._is_empty(rank)
        )

    def _is_empty(self, rank: int) -> bool:
        # An empty file names no commit, and neither does a store whose first write did not finish. The commits of an
        # unverified store do not count.
        one = self.seen[rank]
        return _is_unverified(one) or (not one["commits"] and (not one["there"] or not one["filled"]))


def describe_store(file: Path) -> dict[str, Any] | None:
    """Returns a store's id and step, and the identities of the stores that it replaced; None if opening fails."""
    try:
        with look(file) as store:
            hyperparameters = store.hyperparameters
            known = hyperparameters.get(EARLIER) if isinstance(hyperparameters, dict) else None
            return {"uuid": store.info()["uuid"], "step": store.step, EARLIER: known or []}
    except (StorageError, ConfigError, CorruptionError):
        return None


def superseded_by(found: Iterable[Stores]) -> dict[int, Mapping[str, Any]]:
    """Returns, by number of old ranks, the identity of the stores that newer, complete stores replaced."""
    by_count = {one.count: one for one in found}
    outlived: dict[int, Mapping[str, Any]] = {}
    for one in by_count.values():
        # An incomplete set of stores replaces no other set, because some rows are missing.
        for identity in () if one.missing or one.description is None else one.description[EARLIER]:
            other = by_count.get(identity["ranks"])
            if other is not None and other is not one and other.are(identity):
                outlived[other.count] = identity
    return outlived


Existing = Literal["refuse", "resume", "replace", "previous"]
_Path = str | os.PathLike[str]
_NOTHING = "holds no store"
_UNFILLED = (
    "the store has no state, because its first write did not finish or its contents are lost; give existing='replace'"
)
_NOT_OPENED = "the stores were not opened"
_ANEW = (
    "bring back the stores of all ranks, or give existing='replace' on all ranks to begin a new run; give also "
    "checkpoint=FOLDER to begin it at the step that optimizer.save() wrote to this folder"
)
_BEHIND = (
    "move away all stores of the replica that the run left behind, so that they are filled from another replica, or "
    "give existing='replace' on all ranks to begin a new run"
)
AS_THEY_WERE = (
    "number the hosts as before (torchrun --node-rank 0, 1, ... with --master-addr; leave out --rdzv-backend and "
    "--rdzv-endpoint, with which torchrun numbers the hosts itself), or move each store to the path of its rank"
)
# The identity of new stores, which have no commit.
_NO_IDENTITY = bytes(16)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How this rank opens its store, so that all ranks begin at one commit."""

    exchange: Exchange  # exchanges values between the ranks
    existing: Existing  # the argument `existing` of `Store.create` on this rank
    run: bytes  # the run's id
    number: int  # the number of the commit to open; 0 for new stores
    identity: bytes  # the identity of that commit; zeros for new stores
    nonce: bytes  # random bytes that the first rank draws at each opening
    layout: Layout
    lost: Mapping[int, int] = field(default_factory=dict)  # by rank that has lost its store: the rank that fills it

    def open(self, make: Callable[[Existing], Store], earlier: bytes | None = None) -> tuple[Store, Agreement]:
        """Opens the store by `make`, and drops a commit newer than the chosen commit, before any rank stages a step.

        If `make` opens the commit before the newest commit, `Store.go_back()` drops the newest commit. `earlier` is the
        identity of the commit from which new stores are filled; None if new stores are not filled from a commit.

        Raises:
            RankError: another rank could not open its store, or is gone; all stores keep the commit to open.
            StorageError: the store was changed after the ranks had chosen the commit.
        """
        store = None
        try:
            with self.exchange.part():
                store = make(self.existing)
                self._require_unchanged(store)
                self.exchange.all_gather("opened", None, remedy=_NOT_OPENED)
                store.go_back()
                self.exchange.all_gather("went back", None, remedy=_NOT_OPENED)
        except BaseException:
            if store is not None:
                if store.created:
                    store.forsake()
                store.end()
                store.close()
            raise
        before = self.identity if self.number or earlier is None else earlier
        return store, Agreement(self.exchange, store, self.run, self.number, before, self.nonce, self.layout)

    def _require_unchanged(self, store: Store) -> None:
        if self.exchange.rank in self.lost:
            return
        found = store.info()
        there = (found["run"], found["common"], found["identity"] or _NO_IDENTITY.hex())
        if self.number and there != (self.run.hex(), self.number, self.identity.hex()):
            raise StorageError(
                "the store was changed while the ranks agreed on which commit to open, probably by another run: end "
                "that run, and start this run again"
            )


def choose(
    paths: _Path | Sequence[_Path] | None,
    exchange: Exchange,
    existing: Existing,
    layout: Layout,
    others: Mapping[int, Sequence[str]] | None = None,
) -> Opening:
    """Chooses the commit at which each rank opens its store. Writes nothing; a collective call.

    If `paths` is None, the store is temporary. `others` has, by rank, the paths on this rank's host at which there may
    be a store of another rank: this host may have had other ranks in an earlier start of the run. A rank that has lost
    its store gets a new store, which is filled from the store of a rank with the same rows.

    Raises:
        ConfigError: only some ranks have a store, stores belong to other ranks, to several runs or to a single process,
            a store was not filled completely, no commit is on all ranks, or `existing` rejects the stores.
        CorruptionError: a root of a store is damaged; the error says whether existing="previous" can open a commit.
        RankError: a rank's store cannot be opened, or a rank is gone.
    """
    # All ranks use the random bytes that the first rank drew.
    drawn = exchange.all_gather("a new run", os.urandom(16).hex())[0]
    seen = exchange.all_gather(
        "the stores", {**seen_at(paths), "others": sorted(map(list, _places(others or {}).items()))}
    )
    missing = {rank: _NOTHING for rank, one in enumerate(seen) if not one["there"]}
    if missing:
        _require_none_elsewhere(seen, others or {}, exchange)
    nonce = bytes.fromhex(drawn)
    opening = Opening(
        exchange=exchange,
        existing="refuse",
        run=nonce,
        number=0,
        identity=_NO_IDENTITY,
        nonce=nonce,
        layout=layout,
    )
    if existing == "replace":
        return replace(opening, existing="replace")
    lost = {} if existing == "refuse" else _lost(seen, layout)
    kept = {rank: one for rank, one in enumerate(seen) if rank not in lost}
    _require_read(kept)
    if len(missing) == len(seen):
        if existing == "previous":
            raise ConfigError(
                "no rank has a store, but existing='previous' works only with existing stores: correct storage=, or "
                "leave existing= out"
            )
        return opening
    if existing == "refuse":
        there = {rank: "already has a store" for rank, one in enumerate(seen) if one["there"]}
        raise ConfigError(
            f"{_listed(there)}: give existing='resume' to continue, or existing='replace' to begin a new run"
        )
    if missing.keys() - lost.keys():
        begun = {(commit["number"], commit["run"]) for one in kept.values() for commit in one["commits"]}
        is_first = len(begun) == 1 and next(iter(begun))[0] == _FIRST
        if existing == "resume" and is_first and not lost and all(seen[rank]["pending"] for rank in missing):
            # Some ranks do not have the first commit, so no rank has made a step.
            require_own(kept, layout.shards)
            return replace(opening, existing="replace")
        raise ConfigError(
            f"{_listed(missing)}, and other ranks do; nothing was changed. If the run had another number of ranks, "
            "start that number of ranks: a run resumes with another number of ranks only if storage= is one folder for "
            f"all ranks. Otherwise {_ANEW}"
        )
    require_own(kept, layout.shards)
    run, number, identity = _common(kept, existing, _ANEW if layout.replicas == 1 else _BEHIND)
    if existing == "resume":
        number, identity, lost = _drop_lagging_replicas(kept, layout, number, identity, lost)
    opening = replace(opening, run=run, number=number, identity=identity, lost=lost)
    if exchange.rank in lost:
        return replace(opening, existing="replace")
    own = seen[exchange.rank]["commits"][0]
    # "resume" opens the newest commit, and "previous" opens the commit before the newest. After a close, both roots may
    # name one commit, which is then the newest.
    newest = is_at(own, number, identity) and seen[exchange.rank]["damage"] is None
    return replace(opening, existing="resume" if newest else "previous")


def _drop_lagging_replicas(
    seen: Mapping[int, dict[str, Any]], layout: Layout, number: int, identity: bytes, lost: dict[int, int]
) -> tuple[int, bytes, dict[int, int]]:
    """Returns the number and identity of the commit to open, and the ranks whose stores are filled.

    Usually returns the arguments. The exception: the last replicas did not make the newest commit, and all other
    replicas made it. Then all ranks open the newest commit, and the stores of the last replicas are filled from the
    first replica. The last replicas cannot be from another continuation of the run, because the roots of all other
    ranks also name the commit of the last replicas.
    """
    newest = {rank: one["commits"][0] for rank, one in seen.items()}
    ahead = {rank for rank, one in newest.items() if one["number"] == number + 1}
    first = next(iter(sorted(ahead)), None)
    replicas = len(ahead) // layout.shards
    if first is None or not 0 < replicas < layout.replicas or ahead != {*range(replicas * layout.shards)}:
        return number, identity, lost
    left = [rank for rank in range(layout.size) if rank not in ahead]
    return number + 1, bytes.fromhex(newest[first]["identity"]), {rank: rank % layout.shards for rank in left}


def _is_unverified(one: Mapping[str, Any]) -> bool:
    """True if a store was filled from another replica's store and has not been read back yet."""
    runs = {(commit["run"] != _NO_IDENTITY.hex(), commit["number"]) for commit in one["commits"]}
    return runs == {(True, 0)}


def _lost(seen: list[dict[str, Any]], layout: Layout) -> dict[int, int]:
    """Returns the ranks whose stores must be filled, each with the rank that fills its store.

    Leaves out a rank if no rank with the same rows has a completely filled store.
    """
    whole = [rank for rank, one in enumerate(seen) if any(commit["number"] for commit in one["commits"])]
    lost = {}
    for rank, one in enumerate(seen):
        if rank in whole or (one["there"] and one["filled"] and not _is_unverified(one)):
            continue
        source = next((peer for peer in replace(layout, rank=rank).peers if peer in whole), None)
        if source is not None:
            lost[rank] = source
    return lost


def seen_at(paths: _Path | Sequence[_Path] | None) -> dict[str, Any]:
    """Returns the commits that a store's roots name, or the error of reading the roots.

    "there" is False if no store exists. "pending" is True if then the file of an unfinished store exists. "filled" is
    False if the store exists but has no commit.
    """
    seen: dict[str, Any] = {"there": True, "filled": True, "commits": [], "damage": None, "error": None, "at": None}
    seen["pending"] = False
    if paths is None:
        return {**seen, "there": False}
    seen["at"] = f"{', '.join(paths_listed(paths))} on {socket.gethostname()}"
    try:
        found = commits(paths)
    except (MemascendError, OSError) as error:
        return {**seen, "error": shortened(error)}
    if found is None:
        # The file of a store has this name until its first root is written.
        pending = all(Path(f"{file_of(path)}.new").exists() for path in paths_listed(paths))
        return {**seen, "there": False, "pending": pending}
    named, damage = found
    if not named:
        return {**seen, "filled": False, "error": f"{', '.join(paths_listed(paths))}: {_UNFILLED}"}
    known = [{**one._asdict(), "run": one.run.hex(), "identity": one.identity.hex()} for one in named]
    return {**seen, "commits": known, "damage": damage and damage[:400]}


def common_of(seen: list[dict[str, Any]]) -> tuple[int, bytes]:
    """Returns number and identity of the newest commit that all stores have; `seen` has the `seen_at` of each store.

    Raises:
        RankError: a store cannot be read.
        ConfigError: no commit is in all stores, a store is not filled, or the stores belong to several runs.
        CorruptionError: a root of a store is damaged.
    """
    by_rank = dict(enumerate(seen))
    _require_read(by_rank)
    return _common(by_rank, "resume")[1:]


def _require_read(seen: Mapping[int, dict[str, Any]]) -> None:
    unread = {rank: one["error"] for rank, one in seen.items() if one["error"] is not None}
    if unread:
        raise RankError(f"{_listed(unread)}; nothing was changed on any rank", ranks=tuple(unread))


def require_own(seen: Mapping[int, dict[str, Any]], count: int) -> None:
    """Rejects a store whose commits name a rank with other rows than the rank under which `seen` has the store.

    `count` ranks shard the rows.
    """
    known = {rank: whose for rank, one in seen.items() if (whose := _owner_in(one)) is not None}
    apart = {
        rank: f"{seen[rank]['at']} is the store of {_rank_of(whose)}"
        for rank, whose in known.items()
        if whose[1] != count or whose[0] % count != rank % count
    }
    if not apart:
        return
    if len(set(known.values())) < len(known):
        instead = "a store was copied to the path of another rank's store: bring the other store back"
    elif all(ranks == count for _, ranks in known.values()):
        instead = AS_THEY_WERE
    else:
        instead = (
            "start the number of ranks that the run had: a run resumes with another number of ranks only if storage= "
            "is one folder for all ranks"
        )
    raise ConfigError(f"{_listed(apart)}; nothing was changed: {instead}")


def _owner_in(one: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the rank and the number of ranks that the commits of a store name; None if no commit names them."""
    return next(((commit["rank"], commit["ranks"]) for commit in one["commits"] if commit["ranks"]), None)


def _rank_of(whose: tuple[int, int]) -> str:
    return f"rank {whose[0]} of {whose[1]}"


def _places(others: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Returns, by rank, the first path of the rank's store, with the name of this host."""
    return {rank: f"{socket.gethostname()}:{os.path.realpath(places[0])}" for rank, places in others.items()}


def _require_none_elsewhere(
    seen: list[dict[str, Any]], others: Mapping[int, Sequence[str]], exchange: Exchange
) -> None:
    """Rejects the call if a host has a store of a rank that found no store, or of a rank that does not exist.

    A new run must not begin while such a store exists.
    """
    # Only one rank reads each store, because reading a store locks it.
    looks: dict[str, tuple[int, int]] = {}
    for seer, one in enumerate(seen):
        for rank, place in one["others"]:
            if rank >= len(seen) or not seen[rank]["there"]:
                looks.setdefault(place, (seer, rank))
    if not looks:
        return
    own = [rank for seer, rank in looks.values() if seer == exchange.rank]
    reports = exchange.all_gather("stores of other ranks", [[rank, seen_at(others[rank])] for rank in own])
    found = [(rank, one) for each in reports for rank, one in each if one["there"] and one["filled"]]
    if not found:
        return
    there = "; ".join(
        f"{one['at']} is the store of {_rank_of(_owner_in(one) or (rank, len(seen)))}" for rank, one in found
    )
    missing = {rank: f"{_NOTHING} at {one['at']}" for rank, one in enumerate(seen) if not one["there"]}
    raise ConfigError(
        f"{_listed(missing)}, and there are stores of other ranks: {there}; nothing was changed: {AS_THEY_WERE}; to "
        "begin a new run, move the stores of other ranks away"
    )


def is_at(commit: dict[str, Any], number: int, identity: bytes) -> bool:
    """True if a commit from `seen_at` has this number and identity."""
    return bool(commit["number"] == number and commit["identity"] == identity.hex())


def _common(seen: Mapping[int, dict[str, Any]], existing: Existing, remedy: str = _ANEW) -> tuple[bytes, int, bytes]:
    """Returns the run's id, and the number and identity of the commit that all ranks open."""
    runs = {one["commits"][0]["run"] for one in seen.values()}
    damaged = {rank: one["damage"] for rank, one in seen.items() if one["damage"] is not None}
    alone = {
        rank: "its newest commit is of a single process, or its store was not filled completely"
        for rank, one in seen.items()
        if not one["commits"][0]["number"]
    }
    if alone:
        raise ConfigError(
            f"{_listed(alone)}; nothing was changed: {_ANEW}; to continue the run of a single process, call "
            "optimizer.save(folder) in a single process, and start all ranks with checkpoint=folder"
        )
    if len(runs) > 1:
        of = {rank: f"run {one['commits'][0]['run'][:8]}" for rank, one in seen.items()}
        raise ConfigError(f"the stores belong to several runs: {_listed(of)}; nothing was changed: {_ANEW}")
    (run,) = runs
    have = {
        rank: {(one["number"], one["identity"]) for one in each["commits"] if one["run"] == run}
        for rank, each in seen.items()
    }
    both = set.intersection(*have.values())
    if damaged and existing != "previous":
        left = f"existing='previous' opens commit {max(both)[0]}, which all ranks have" if both else _ANEW
        raise CorruptionError(f"{_listed(damaged)}; nothing was changed: {left}")
    if existing == "previous" and not damaged:
        both = _without_newest(both)
    if not both:
        of = {
            rank: "has " + ", ".join(f"{number} ({identity[:8]})" for number, identity in sorted(commits))
            for rank, commits in have.items()
        }
        why = ""
        if set.intersection(*({number for number, _ in commits} for commits in have.values())):
            why = ", because the run was continued more than once, and these stores are from different continuations"
        raise ConfigError(f"no commit is on all ranks{why}: {_listed(of)}; nothing was changed: {remedy}")
    number, identity = max(both)
    return bytes.fromhex(run), number, bytes.fromhex(identity)


def _without_newest(commits: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Returns the commits before the newest one. Raises ConfigError if the newest commit is the only one."""
    ordered = sorted(commits)
    if len(ordered) == 1:
        raise ConfigError(
            f"commit {ordered[0][0]} is the only commit that all ranks have, and existing='previous' opens an earlier "
            "commit: pass existing='resume'; nothing was changed"
        )
    return set(ordered[:-1])


def _listed(ranks: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {what}" for rank, what in ranks.items())
