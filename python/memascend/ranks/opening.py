"""Opens the stores of all ranks at the newest commit that all of them have."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from memascend.engine import commits
from memascend.errors import ConfigError, CorruptionError, MemascendError, RankError, StorageError
from memascend.paths import listed
from memascend.ranks.agreement import Agreement
from memascend.ranks.exchange import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.engine import Store
    from memascend.ranks.exchange import Exchange

Existing = Literal["refuse", "resume", "replace", "previous"]
_Path = str | os.PathLike[str]
_NOTHING = "holds no store"
_UNFILLED = "its first write did not finish, so it holds no state; give existing='replace'"
_ANEW = "give existing='replace' to begin anew on all ranks, or bring back what is missing"


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How this rank opens its store, so that all ranks are at one commit."""

    exchange: Exchange  # how the ranks talk
    existing: Existing  # as `Store.create` takes it; "previous" where this rank is ahead of others
    run: bytes  # which run it is
    number: int  # of the commit that is opened; 0 where the stores are made

    def open(self, make: Callable[[Existing], Store]) -> tuple[Store, Agreement]:
        """Open the store by `make`, and give up on every rank what not all have, before any rank stages.

        `make` leaves the newest commit there until `Store.go_back()`, where it opens the one before.

        Raises:
            RankError: another rank could not open its store; nothing was changed on any.
        """
        store, about, told = None, "opened", False
        try:
            store = make(self.existing)
            self._require_unchanged(store)
            told = True
            _told(self.exchange, about, None)
            about, told = "went back", False
            store.go_back()
            told = True
            _told(self.exchange, about, None)
        except BaseException as error:
            with contextlib.suppress(RankError):
                if not told:
                    _told(self.exchange, about, error)
            if store is not None:
                if store.created:
                    store.forsake()
                store.end()
                store.close()
            raise
        agreement = Agreement(self.exchange, self.run, self.number)
        agreement.lead(store)
        return store, agreement

    def _require_unchanged(self, store: Store) -> None:
        found = store.info()
        if self.number and (found["run"], found["common"]) != (self.run.hex(), self.number):
            raise StorageError("the store was changed while the ranks agreed on what to open")


def choose(paths: _Path | Sequence[_Path] | None, exchange: Exchange, existing: Existing) -> Opening:
    """Look at the stores of all ranks, and say which commit each opens. Writes nothing; all ranks call it together.

    Without `paths` the store is a temporary one.

    Raises:
        ConfigError: stores are there on some ranks and not on others, or not of one run; or `existing` refuses them.
        CorruptionError: a root of a rank is damaged; existing="previous" opens the commit that all have whole.
        RankError: a rank's store cannot be opened, or a rank is gone.
    """
    # What only one of them draws is the same for all.
    drawn = exchange.tell("a new run", os.urandom(16).hex())[0]
    seen = exchange.tell("what is there", seen_at(paths))
    unread = {rank: one["error"] for rank, one in enumerate(seen) if one["error"] is not None}
    if existing == "replace":
        return Opening(exchange=exchange, existing="replace", run=bytes.fromhex(drawn), number=0)
    if unread:
        raise RankError(f"{_listed(unread)}; nothing was changed on any rank", ranks=tuple(unread))
    missing = {rank: _NOTHING for rank, one in enumerate(seen) if not one["there"]}
    if len(missing) == len(seen):
        if existing == "previous":
            raise ConfigError("there is no store on any rank: existing='previous' opens one that is there")
        return Opening(exchange=exchange, existing="refuse", run=bytes.fromhex(drawn), number=0)
    if existing == "refuse":
        there = {rank: "a store is there already" for rank, one in enumerate(seen) if one["there"]}
        raise ConfigError(f"{_listed(there)}: open them with existing='resume', or give existing='replace'")
    if missing:
        raise ConfigError(
            f"{_listed(missing)}, and others do; nothing was changed. If the run had another number of ranks, start "
            f"that number: only one folder that is given to all ranks goes on with others. Else {_ANEW}"
        )
    run, number = _common(seen, existing)
    own = seen[exchange.rank]["commits"]
    # The second root of a run that was closed may be of the same commit as the first.
    newest = own[0]["number"] == number and seen[exchange.rank]["damage"] is None
    return Opening(exchange=exchange, existing="resume" if newest else "previous", run=run, number=number)


def seen_at(paths: _Path | Sequence[_Path] | None) -> dict[str, Any]:
    """What the roots of a store name, or why that cannot be said; one that is not "filled" never had a commit."""
    seen = {"there": True, "filled": True, "commits": [], "damage": None, "error": None}
    if paths is None:
        return {**seen, "there": False}
    try:
        found = commits(paths)
    except (MemascendError, OSError) as error:
        return {**seen, "error": shortened(error)}
    if found is None:
        return {**seen, "there": False}
    named, damage = found
    if not named:
        return {**seen, "filled": False, "error": f"{', '.join(listed(paths))}: {_UNFILLED}"}
    known = [{"run": one.run.hex(), "number": one.number} for one in named]
    return {**seen, "commits": known, "damage": damage and damage[:400]}


def common_of(seen: list[dict[str, Any]]) -> int:
    """The newest commit that all of some stores have, by what `seen_at` says of each.

    Raises:
        RankError, ConfigError, CorruptionError: they have none.
    """
    unread = {rank: one["error"] for rank, one in enumerate(seen) if one["error"] is not None}
    if unread:
        raise RankError(f"{_listed(unread)}; nothing was changed on any rank", ranks=tuple(unread))
    return _common(seen, "resume")[1]


def _common(seen: list[dict[str, Any]], existing: Existing) -> tuple[bytes, int]:
    """The run and the commit that all ranks open."""
    runs = {one["commits"][0]["run"] for one in seen}
    damaged = {rank: one["damage"] for rank, one in enumerate(seen) if one["damage"] is not None}
    alone = {rank: "belongs to no run" for rank, one in enumerate(seen) if not one["commits"][0]["number"]}
    if alone:
        raise ConfigError(f"the newest commit of {_listed(alone)} of several ranks: {_ANEW}")
    if len(runs) > 1:
        of = {rank: f"is of run {one['commits'][0]['run'][:8]}" for rank, one in enumerate(seen)}
        raise ConfigError(f"the stores are of several runs: {_listed(of)}; nothing was changed: {_ANEW}")
    (run,) = runs
    have = [{one["number"] for one in each["commits"] if one["run"] == run} for each in seen]
    both = set.intersection(*have)
    if damaged and existing != "previous":
        left = f"existing='previous' opens commit {max(both)}, which the roots of all name" if both else _ANEW
        raise CorruptionError(f"{_listed(damaged)}; nothing was changed: {left}")
    if existing == "previous" and not damaged:
        both -= {max(both, default=0)}
    if not both:
        of = {rank: f"has {sorted(numbers)}" for rank, numbers in enumerate(have)}
        raise ConfigError(f"no commit is there on every rank: {_listed(of)}; nothing was changed: {_ANEW}")
    return bytes.fromhex(run), max(both)


def _told(exchange: Exchange, about: str, error: BaseException | None) -> None:
    """Hear whether all ranks have come so far."""
    answers = exchange.tell(about, None if error is None else shortened(error))
    failed = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    if failed and error is None:
        raise RankError(f"the stores were not opened: {_listed(failed)}", ranks=tuple(failed))


def _listed(ranks: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {what}" for rank, what in ranks.items())
