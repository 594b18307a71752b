"""Opens the stores of all ranks at the newest commit that all of them have."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memascend.distributed.control_plane import Agreement, shortened
from memascend.errors import ConfigError, CorruptionError, MemascendError, RankError, StorageError
from memascend.plan.decision import file_of
from memascend.storage import commits, look
from memascend.text import paths_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.rows import Layout
    from memascend.storage import Store


# The field of a first commit's hyperparameters that lists the stores it replaces, the ones that were read first.
EARLIER = "earlier"
# The number of a run's first commit; commits of a single process have none.
_FIRST = 1
_OF_ONE = 1


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The stores of one number of ranks, in one folder."""

    count: int  # of ranks that divide the rows of a replica
    all_owners: Mapping[int, int]  # by old rank, the present rank that reads its store
    # By old rank, the contents of its roots: see `seen_at`; and, as "said", what `told_by` returns.
    all_seen: Mapping[int, Mapping[str, Any]]

    @cached_property
    def numbers(self) -> dict[int, int]:
        """For each share of the rows the first old rank whose store has them."""
        ranks = sorted(self.all_seen, key=lambda rank: (-self._newest(rank), rank))
        return {rank % self.count: rank for rank in reversed(ranks)}

    def _newest(self, rank: int) -> int:
        """The number of the newest commit; 0 for a single process, less where there is none of the run."""
        one = self.all_seen[rank]
        return -1 if _is_unverified(one) else max((commit["number"] for commit in one["commits"]), default=-1)

    @property
    def redundant(self) -> list[int]:
        """The old ranks whose stores are those of `numbers`, or have no commit that these have not."""
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
        """The present ranks that read these."""
        return {shard: self.all_owners[rank] for shard, rank in self.numbers.items()}

    @property
    def seen(self) -> dict[int, Mapping[str, Any]]:
        """The contents of their roots."""
        return {shard: self.all_seen[rank] for shard, rank in self.numbers.items()}

    @property
    def missing(self) -> list[int]:
        """The ranks whose store is missing or has no commit."""
        return [rank for rank in range(self.count) if rank not in self.seen or self._is_empty(rank)]

    @property
    def is_unfilled(self) -> bool:
        """Whether some have no first commit: no rank stages its second commit before all have the first."""
        numbers = [commit["number"] for one in self.seen.values() for commit in one["commits"]]
        return any(map(self._is_empty, self.seen)) and all(number <= _FIRST for number in numbers)

    @property
    def said(self) -> Mapping[str, Any] | None:
        """What the first store says of itself; None if it cannot be opened."""
        first = min(rank for rank, one in self.seen.items() if one["commits"] or one["error"])
        said: Mapping[str, Any] | None = self.seen[first]["said"]
        return said

    def named(self, number: int | None) -> dict[str, Any]:
        """The identity of a commit of these stores; a single process's has its store's id and step."""
        if number is None:
            said = self.said or {}
            return {"ranks": self.count, "run": said.get("uuid"), "number": said.get("step")}
        return {"ranks": self.count, "run": self.seen[0]["commits"][0]["run"], "number": number}

    def are(self, identity: Mapping[str, Any]) -> bool:
        """Whether they are stores of this identity; some of those may have been removed."""
        if self.count == _OF_ONE:
            return self.said is not None and self.named(None) == identity
        return all(
            any((one["run"], one["number"]) == (identity["run"], identity["number"]) for one in seen["commits"])
            for rank, seen in self.seen.items()
            if not self._is_empty(rank)
        )

    def _is_empty(self, rank: int) -> bool:
        # An empty file and a store whose first write did not finish name no commit.
        one = self.seen[rank]
        return _is_unverified(one) or (not one["commits"] and (not one["there"] or not one["filled"]))


def told_by(file: Path) -> dict[str, Any] | None:
    """Id, step and replaced stores of a store; None if it cannot be opened."""
    try:
        with look(file) as store:
            said = store.hyperparameters
            known = said.get(EARLIER) if isinstance(said, dict) else None
            return {"uuid": store.info()["uuid"], "step": store.step, EARLIER: known or []}
    except (StorageError, ConfigError, CorruptionError):
        return None


def outlived_by(found: Iterable[Stores]) -> dict[int, Mapping[str, Any]]:
    """The stores, all of them filled, that complete newer ones replaced: by number of ranks, their identities."""
    by_count = {one.count: one for one in found}
    outlived: dict[int, Mapping[str, Any]] = {}
    for one in by_count.values():
        # Stores of which some are missing replace nothing, since not all of their rows are there.
        for identity in () if one.missing or one.said is None else one.said[EARLIER]:
            other = by_count.get(identity["ranks"])
            if other is not None and other is not one and other.are(identity):
                outlived[other.count] = identity
    return outlived


Existing = Literal["refuse", "resume", "replace", "previous"]
_Path = str | os.PathLike[str]
_NOTHING = "holds no store"
_UNFILLED = "it holds no state, as its first write did not finish or what it held is lost; give existing='replace'"
_NOT_OPENED = "the stores were not opened"
_ANEW = (
    "bring back what is missing, or give existing='replace' on all ranks to begin anew, with checkpoint=FOLDER at the "
    "step that optimizer.save() wrote there"
)
_BEHIND = (
    "move away the stores of a replica that the run left behind, and they are filled from another one, or give "
    "existing='replace' to begin anew on all ranks"
)
AS_THEY_WERE = (
    "number the hosts as before (torchrun --node-rank 0, 1, ... with --master-addr, and without --rdzv-backend and "
    "--rdzv-endpoint, under which torchrun numbers them itself), or move each store to where its rank looks for it"
)
# The identity where there is no commit.
_NO_IDENTITY = bytes(16)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How this rank opens its store, so that all ranks are at one commit."""

    exchange: Exchange  # between the ranks
    existing: Existing  # as in `Store.create`; "previous" if this rank is ahead of others
    run: bytes  # the run's id
    number: int  # of the commit that is opened; 0 for new stores
    identity: bytes  # of that commit; zeros for new stores
    nonce: bytes  # of this opening
    layout: Layout
    lost: Mapping[int, int] = field(default_factory=dict)  # ranks without a store, and those that fill them

    def open(self, make: Callable[[Existing], Store], earlier: bytes | None = None) -> tuple[Store, Agreement]:
        """Open the store by `make`, and drop commits that not all ranks have, before any rank stages.

        If `make` opens the commit before the newest, the newest stays until `Store.go_back()`. `earlier` is the
        identity of the commit that new stores are filled from, if any.

        Raises:
            RankError: another rank could not open its store; nothing was changed on any.
        """
        store = None
        try:
            with self.exchange.part():
                store = make(self.existing)
                self._require_unchanged(store)
                self.exchange.tell("opened", None, remedy=_NOT_OPENED)
                store.go_back()
                self.exchange.tell("went back", None, remedy=_NOT_OPENED)
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
                "the store was changed while the ranks agreed on which commit to open, so another run uses it: end "
                "that run, and start again"
            )


def choose(
    paths: _Path | Sequence[_Path] | None,
    exchange: Exchange,
    existing: Existing,
    layout: Layout,
    others: Mapping[int, Sequence[str]] | None = None,
) -> Opening:
    """Choose the commit at which each rank opens its store. Writes nothing; all ranks call it together.

    Without `paths` the store is temporary. `others`: places on this rank's host, by the rank whose store would be
    there. A rank that had another number on this host may have left a store in such a place. A rank that has lost its
    store gets a new one, which is filled from that of a rank with the same rows.

    Raises:
        ConfigError: only some ranks have a store, stores belong to other ranks or to several runs, or `existing`
            rejects them.
        CorruptionError: a root of a rank is damaged; existing="previous" opens the commit that is whole on all ranks.
        RankError: a rank's store cannot be opened, or a rank is gone.
    """
    # All ranks use the bytes that the first one drew.
    drawn = exchange.tell("a new run", os.urandom(16).hex())[0]
    seen = exchange.tell("the stores", {**seen_at(paths), "others": sorted(map(list, _places(others or {}).items()))})
    missing = {rank: _NOTHING for rank, one in enumerate(seen) if not one["there"]}
    if missing:
        _require_none_elsewhere(seen, others or {}, exchange)
    nonce = bytes.fromhex(drawn)
    anew = Opening(
        exchange=exchange,
        existing="refuse",
        run=nonce,
        number=0,
        identity=_NO_IDENTITY,
        nonce=nonce,
        layout=layout,
    )
    if existing == "replace":
        return replace(anew, existing="replace")
    lost = {} if existing == "refuse" else _lost(seen, layout)
    kept = {rank: one for rank, one in enumerate(seen) if rank not in lost}
    _require_read(kept)
    if len(missing) == len(seen):
        if existing == "previous":
            raise ConfigError(
                "there is no store on any rank, and existing='previous' opens one that exists: correct storage=, or "
                "leave existing= out"
            )
        return anew
    if existing == "refuse":
        there = {rank: "a store is there already" for rank, one in enumerate(seen) if one["there"]}
        raise ConfigError(f"{_listed(there)}: open them with existing='resume', or give existing='replace'")
    if missing.keys() - lost.keys():
        begun = {(commit["number"], commit["run"]) for one in kept.values() for commit in one["commits"]}
        is_first = len(begun) == 1 and next(iter(begun))[0] == _FIRST
        if existing == "resume" and is_first and not lost and all(seen[rank]["pending"] for rank in missing):
            # The ranks were killed before all had the first commit of their run, so that none has stepped.
            require_own(kept, layout.shards)
            return replace(anew, existing="replace")
        raise ConfigError(
            f"{_listed(missing)}, and others do; nothing was changed. If the run had another number of ranks, start "
            f"that number: only a run in one folder, given to all ranks, resumes with another number. Otherwise {_ANEW}"
        )
    require_own(kept, layout.shards)
    run, number, identity = _common(kept, existing, _ANEW if layout.replicas == 1 else _BEHIND)
    if existing == "resume":
        number, identity, lost = _left_out(kept, layout, number, identity, lost)
    anew = replace(anew, run=run, number=number, identity=identity, lost=lost)
    if exchange.rank in lost:
        return replace(anew, existing="replace")
    own = seen[exchange.rank]["commits"][0]
    # After a close, both roots may name the same commit.
    newest = is_at(own, number, identity) and seen[exchange.rank]["damage"] is None
    return replace(anew, existing="resume" if newest else "previous")


def _left_out(
    seen: Mapping[int, dict[str, Any]], layout: Layout, number: int, identity: bytes, lost: dict[int, int]
) -> tuple[int, bytes, dict[int, int]]:
    """The commit to open, and the ranks to fill for it, where the last replicas took no part in the newest one.

    They have the commit before it, so that all could go back a step, which the others have made. Their stores are not
    of another continuation: the others name the commit that they have, too.
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
    """Whether a store was filled from another replica's, and not yet read again."""
    runs = {(commit["run"] != _NO_IDENTITY.hex(), commit["number"]) for commit in one["commits"]}
    return runs == {(True, 0)}


def _lost(seen: list[dict[str, Any]], layout: Layout) -> dict[int, int]:
    """The ranks without a store, or with one that was not filled to its end, and ranks that have the same rows."""
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
    """The contents of a store's roots, or the error on reading them; a store that is not "filled" has no commit."""
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
        # Until its first root a store of one file has this name.
        pending = all(Path(f"{file_of(path)}.new").exists() for path in paths_listed(paths))
        return {**seen, "there": False, "pending": pending}
    named, damage = found
    if not named:
        return {**seen, "filled": False, "error": f"{', '.join(paths_listed(paths))}: {_UNFILLED}"}
    known = [{**one._asdict(), "run": one.run.hex(), "identity": one.identity.hex()} for one in named]
    return {**seen, "commits": known, "damage": damage and damage[:400]}


def common_of(seen: list[dict[str, Any]]) -> tuple[int, bytes]:
    """Number and identity of the newest commit that all of some stores have, from `seen_at` of each.

    Raises:
        RankError, ConfigError, CorruptionError: there is none.
    """
    by_rank = dict(enumerate(seen))
    _require_read(by_rank)
    return _common(by_rank, "resume")[1:]


def _require_read(seen: Mapping[int, dict[str, Any]]) -> None:
    unread = {rank: one["error"] for rank, one in seen.items() if one["error"] is not None}
    if unread:
        raise RankError(f"{_listed(unread)}; nothing was changed on any rank", ranks=tuple(unread))


def require_own(seen: Mapping[int, dict[str, Any]], count: int) -> None:
    """Reject stores whose commits name other rows than their rank has, which `count` ranks divide."""
    known = {rank: whose for rank, one in seen.items() if (whose := _whose(one)) is not None}
    apart = {
        rank: f"{seen[rank]['at']} is the store of {_rank_of(whose)}"
        for rank, whose in known.items()
        if whose[1] != count or whose[0] % count != rank % count
    }
    if not apart:
        return
    if len(set(known.values())) < len(known):
        instead = "a store was copied over another one: bring that one back"
    elif all(ranks == count for _, ranks in known.values()):
        instead = AS_THEY_WERE
    else:
        instead = "start as many ranks as before: another number resumes only if all ranks are given one folder"
    raise ConfigError(f"{_listed(apart)}; nothing was changed: {instead}")


def _whose(one: dict[str, Any]) -> tuple[int, int] | None:
    """Rank and number of ranks that the commits of a store name; None if none names them."""
    return next(((commit["rank"], commit["ranks"]) for commit in one["commits"] if commit["ranks"]), None)


def _rank_of(whose: tuple[int, int]) -> str:
    return f"rank {whose[0]} of {whose[1]}"


def _places(others: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Unique names of the places of other ranks, by rank."""
    return {rank: f"{socket.gethostname()}:{os.path.realpath(places[0])}" for rank, places in others.items()}


def _require_none_elsewhere(
    seen: list[dict[str, Any]], others: Mapping[int, Sequence[str]], exchange: Exchange
) -> None:
    """Reject the call if a rank finds no store and the host of another rank has it: no run begins anew beside that."""
    # Only one rank looks at each store, since this locks it.
    looks: dict[str, tuple[int, int]] = {}
    for seer, one in enumerate(seen):
        for rank, place in one["others"]:
            if rank >= len(seen) or not seen[rank]["there"]:
                looks.setdefault(place, (seer, rank))
    if not looks:
        return
    own = [rank for seer, rank in looks.values() if seer == exchange.rank]
    told = exchange.tell("stores of other ranks", [[rank, seen_at(others[rank])] for rank in own])
    found = [(rank, one) for each in told for rank, one in each if one["there"] and one["filled"]]
    if not found:
        return
    there = "; ".join(
        f"{one['at']} is the store of {_rank_of(_whose(one) or (rank, len(seen)))}" for rank, one in found
    )
    missing = {rank: f"{_NOTHING} at {one['at']}" for rank, one in enumerate(seen) if not one["there"]}
    raise ConfigError(
        f"{_listed(missing)}, and there are stores of other ranks: {there}; nothing was changed: {AS_THEY_WERE}; to "
        "begin anew, move them away"
    )


def is_at(commit: dict[str, Any], number: int, identity: bytes) -> bool:
    """Whether a commit from `seen_at` has this number and identity."""
    return bool(commit["number"] == number and commit["identity"] == identity.hex())


def _common(seen: Mapping[int, dict[str, Any]], existing: Existing, remedy: str = _ANEW) -> tuple[bytes, int, bytes]:
    """The run's id, and number and identity of the commit that all ranks open."""
    runs = {one["commits"][0]["run"] for one in seen.values()}
    damaged = {rank: one["damage"] for rank, one in seen.items() if one["damage"] is not None}
    alone = {rank: "belongs to no run" for rank, one in seen.items() if not one["commits"][0]["number"]}
    if alone:
        raise ConfigError(
            f"the newest commit of {_listed(alone)} of several ranks: {_ANEW}; to go on from one process, call "
            "optimizer.save(folder) there, and begin with checkpoint=folder"
        )
    if len(runs) > 1:
        of = {rank: f"is of run {one['commits'][0]['run'][:8]}" for rank, one in seen.items()}
        raise ConfigError(f"the stores are of several runs: {_listed(of)}; nothing was changed: {_ANEW}")
    (run,) = runs
    have = {
        rank: {(one["number"], one["identity"]) for one in each["commits"] if one["run"] == run}
        for rank, each in seen.items()
    }
    both = set.intersection(*have.values())
    if damaged and existing != "previous":
        left = f"existing='previous' opens commit {max(both)[0]}, which the roots of all name" if both else _ANEW
        raise CorruptionError(f"{_listed(damaged)}; nothing was changed: {left}")
    if existing == "previous" and not damaged:
        both -= {max(both, default=(0, ""))}
    if not both:
        of = {
            rank: "has " + ", ".join(f"{number} ({identity[:8]})" for number, identity in sorted(commits))
            for rank, commits in have.items()
        }
        why = ""
        if set.intersection(*({number for number, _ in commits} for commits in have.values())):
            why = ", as the run was continued more than once, and these stores are of several of its continuations"
        raise ConfigError(f"no commit is there on every rank{why}: {_listed(of)}; nothing was changed: {remedy}")
    number, identity = max(both)
    return bytes.fromhex(run), number, bytes.fromhex(identity)


def _listed(ranks: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {what}" for rank, what in ranks.items())
