"""Exchanges short messages between all ranks, agrees on commits, and names a rank that is gone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from memascend.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memascend.storage import Store
    from memascend.storage.store import CommitOfRank


_Answer = TypeVar("_Answer")


# How often who waits for others looks for them.
_LOOK_SECONDS = 0.01


# How long those that did not meet are waited for, of all the time: each has waited as long as the others.
_PART_AFTER = 0.25


_SECONDS_AFTER_MAX = 5.0


# How long the word of a rank is waited for that may just have left; one that died sends none.
_WORD_SECONDS = 0.5


# The number of ranks of which each has one other.
_PAIR = 2


# What a rank says that has met all others.
_MADE = "made"


class _Next:
    """The number of the group that is made next; all ranks count alike."""

    number = 0


def make_group(timeout: float, ranks: Sequence[int] | None = None) -> Any:
    """A group; all ranks make it together.

    gloo does not say who is missing, so the ranks look for each other first, over the store that torch's own group was
    made with, and once more where they did not meet all the same.

    Args:
        timeout: seconds that one waits for another, those included in which they look for who is missing.
        ranks: in their order; None: all.

    Raises:
        RankError: they do not meet; it names who is missing, unless the store is gone, too.
    """
    members = None if ranks is None else list(ranks)
    number, group, why = _Next.number, None, "it did not come"
    _Next.number += 1
    after = min(timeout * _PART_AFTER, _SECONDS_AFTER_MAX)
    missing: tuple[int, ...] = ()
    try:
        missing = _missing(number, "begins", "here", timeout)
        until = time.monotonic() + timeout
        if not missing:
            group, why = _met(members, timeout - after)
            # One that has met all others may be ahead of one that waits for who died.
            seconds = max(after, until - time.monotonic())
            missing = _missing(number, "ends", why if group is None else _MADE, seconds)
            if not missing and _all_said(number, "ends", _MADE):
                return group
    except RuntimeError as error:
        why = f"{why}; the store of the process group does not answer: {str(error).splitlines()[0][:200]}"
    let_go(group)
    left_by(missing)
    named = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
    raise RankError(
        f"{named} is gone, or did not come within {timeout:g} s, before all ranks could talk; nothing was changed "
        f"({why})",
        ranks=missing,
    )


def left_by(blamed: Iterable[int]) -> None:
    """Say that this rank takes part in nothing any more, because of others: who waits for it in vain names those."""
    key, said = _left(_Next.number, distributed.get_rank()), json.dumps(sorted(blamed))
    # Where the store is gone nobody waits.
    with contextlib.suppress(RuntimeError):
        _answered(lambda: _store().set(key, said), 2 * _WORD_SECONDS)


def at_fault(missing: Iterable[int], number: int | None = None) -> tuple[int, ...]:
    """Of ranks that are missing those that did not leave because of others, and those because of whom the rest left.

    Call `left_by()` first, where others may ask the same about this one.

    Args:
        missing: there is one at least.
        number: of the group for which they were waited; None: of the next, for ranks that talk in one they have.
    """
    gone, own = {*missing}, distributed.get_rank()
    if distributed.get_world_size() == _PAIR:
        # There is nobody else.
        return tuple(gone)
    asked = _Next.number if number is None else number
    left: dict[int, list[int]] = {}

    def silent() -> set[int]:
        known = dict(left)
        return gone.union(*known.values()) - known.keys() - {own}

    def listen() -> None:
        # Where the store is gone what is known has to do.
        with contextlib.suppress(RuntimeError):
            store, until = _store(), time.monotonic() + _WORD_SECONDS
            while silent() and time.monotonic() < until:
                for rank in silent():
                    if store.check([_left(asked, rank)]):
                        left[rank] = json.loads(store.get(_left(asked, rank)))
                time.sleep(_LOOK_SECONDS)

    # The store may be in a process that hangs.
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    listening.join(2 * _WORD_SECONDS)
    return tuple(sorted(silent() or gone))


def _met(members: list[int] | None, seconds: float) -> tuple[Any, str]:
    """The group, or why there is none. gloo may try for several times as long as it is told."""
    # Of whoever comes first: the group, or None, which gives it up.
    met: dict[str, Any] = {}
    why = f"no group within {seconds:g} s"

    def make() -> None:
        nonlocal why
        try:
            group = distributed.new_group(members, backend="gloo", timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            why = str(error).splitlines()[0][:200]
            return
        if met.setdefault("group", group) is not group:
            let_go(group)

    making = threading.Thread(target=make, daemon=True)
    making.start()
    making.join(seconds)
    return met.setdefault("group", None), why


def _missing(number: int, moment: str, said: str, seconds: float) -> tuple[int, ...]:
    """The ranks that do not come to this moment of making a group within so many seconds; others hear what is said."""
    keys, until = _keys(number, moment), time.monotonic() + seconds

    def look() -> list[int]:
        store = _store()
        store.set(keys[distributed.get_rank()], said)
        while not store.check(keys):
            if time.monotonic() > until:
                return [rank for rank, key in enumerate(keys) if not store.check([key])]
            time.sleep(_LOOK_SECONDS)
        return []

    missing = _answered(look, seconds + _WORD_SECONDS)
    return at_fault(missing, number) if missing else ()


def _all_said(number: int, moment: str, said: str) -> bool:
    keys = _keys(number, moment)
    return _answered(lambda: all(_store().get(key) == said.encode() for key in keys), _WORD_SECONDS)


def _answered(ask: Callable[[], _Answer], seconds: float) -> _Answer:
    """What the store of the process group answers: it may be in a process that hangs, and then waits for ever.

    Raises:
        RuntimeError: it does not answer within so many seconds, or failed.
    """
    answers: list[_Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
            errors.append(error)

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise RuntimeError(f"no answer within {seconds:g} s")
    return answers[0]


def _left(number: int, rank: int) -> str:
    return f"memascend/{number}/left/{rank}"


def _keys(number: int, moment: str) -> list[str]:
    return [f"memascend/{number}/{moment}/{rank}" for rank in range(distributed.get_world_size())]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001


def let_go(group: Any) -> None:
    """Leave a group; who waits in it for this rank waits no longer. None, and twice, are fine."""
    if group is not None:
        # Of what the user destroyed nothing is left.
        with contextlib.suppress(ValueError, AssertionError):
            distributed.destroy_process_group(group)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory, as gloo moves it."""
    return tensor.reshape(-1).view(torch.uint8)


# The way on after a step that no rank has committed.
DISCARDED = "the step is discarded on all ranks: call zero_grad() on each, and continue"


# Bytes of a message that is sent as one: a few numbers, and the text of an error. What is longer follows.
_MESSAGE_BYTES = 4096


# In front of it: how many bytes there are in all.
_LENGTH_BYTES = 8


_TEXT_CHARACTERS_MAX = 600


# How often a wait for others looks whether somebody pressed Ctrl-C.
_INTERRUPT_SECONDS = 0.05


# What is waited for at least where others took all of the time: their messages may be there.
_SECONDS_MIN = 0.01


_TAG = 23


_Works = dict[int, "distributed.Work | RuntimeError | None"]


class Exchange:
    """What ranks say to each other beside their computing, over a group of gloo of its own.

    Every rank sends to every other one, so a rank that died or hangs is known by its number. After that no message
    counts any more: some ranks may have heard what others have not.
    """

    def __init__(self, timeout: float) -> None:
        """Make the group; all ranks do so together.

        Args:
            timeout: seconds that a rank waits for the others.
        """
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.timeout = timeout
        self._group: Any = make_group(timeout)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self.broken: RankError | None = None
        # How often some rank told the others of a failure; of the last one, whose it was, and what was said.
        self.failures = 0
        self.failed: tuple[int, ...] = ()
        self.reasons = ""
        self._count = 0

    def tell(self, about: str, said: Any, *, remedy: str = DISCARDED) -> list[Any]:
        """Send `said` to all others, and return what each rank said, by rank, once all of them have heard this one.

        Args:
            about: what for: all ranks must talk of the same.
            said: a JSON value.
            remedy: what an error says of the way on, where another rank failed.

        Raises:
            RankError: a rank did not answer in time, is gone, or speaks of something else; or it failed, after which
                they talk on.
        """
        told = self._told({"about": about, "said": said})
        if any(one["failed"] is not None for one in told):
            raise RankError(f"{_named(self.failed)} failed, and {remedy} ({self.reasons})", ranks=self.failed)
        return [one["said"] for one in told]

    def fail(self, error: BaseException) -> None:
        """Tell the others what happened here, whatever they wait for; it is raised anyway, and nothing by this."""
        if self.broken is not None:
            return
        try:
            told = self._told({"failed": shortened(error)})
        except RankError as others:
            error.add_note(f"the other ranks: {others}")
            return
        if sum(one["failed"] is not None for one in told) > 1:
            error.add_note(f"several ranks failed: {self.reasons}")

    def lost(self, where: str, within: float) -> RankError:
        """Tell the others that they did not come, and hear within so many seconds where they are; what to raise."""
        if self.broken is None:
            try:
                self._told({"lost": where}, within)
            except RankError as error:
                return error
        assert self.broken is not None
        return self.broken

    def end(self, why: str) -> None:
        """Talk no more."""
        if self.broken is None:
            self.broken = RankError(
                "the step ended on all ranks, and none commits any more: start all of them again, and the run resumes "
                f"at the last step of all ({why})",
                ranks=self.failed,
            )

    def _told(self, message: dict[str, Any], within: float | None = None) -> list[dict[str, Any]]:
        """What each rank has sent as its message of this number."""
        if self.broken is not None:
            raise self.broken
        self._count += 1
        own = {"count": self._count, "about": None, "said": None, "failed": None, "lost": None, **message}
        heard: dict[int, dict[str, Any]] = {}
        lost: dict[int, str] = {}
        until = time.monotonic() + (self.timeout if within is None else within)
        talk = threading.Thread(target=self._talk, args=(_encoded(own), heard, lost, until), daemon=True)
        talk.start()
        try:
            while talk.is_alive():
                talk.join(_INTERRUPT_SECONDS)
        except BaseException:
            self.broken = RankError(f"rank {self.rank} was interrupted while all ranks talked", ranks=(self.rank,))
            raise
        heard[self.rank] = own
        # Who failed, or lost the others, says so whatever they ask.
        asked = {one["about"] for one in heard.values()} - {None}
        strange = {
            rank: f"it is at message {one['count']}, {one['about']!r}, and this one, {self.rank}, at {self._count}, "
            f"{own['about']!r}: every rank must make the same calls"
            for rank, one in heard.items()
            if one["count"] != self._count or (len(asked) > 1 and one["about"] != own["about"])
        }
        if lost or strange:
            # Others that lose this one ask because of whom, while it asks the same of those it lost.
            left_by(lost)
            self.broken = self._gone(lost, strange, str(own["about"] or own["lost"] or own["failed"]))
            raise self.broken
        said = {rank: one["failed"] or one["lost"] for rank, one in sorted(heard.items())}
        if any(said.values()):
            self.failures += 1
            self.failed = tuple(rank for rank, one in sorted(heard.items()) if one["failed"] is not None)
            told = {rank: said[rank] for rank in self.failed or said if said[rank] is not None}
            self.reasons = "; ".join(f"rank {rank}: {words}" for rank, words in told.items())
        if any(one["lost"] is not None for one in heard.values()):
            self.end(self.reasons)
            assert self.broken is not None
            raise self.broken
        return [heard[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Let the group go: others that still talk hear that this rank is gone."""
        if self._group is None:
            return
        group, self._group = self._group, None
        self.broken = self.broken or RankError("the ranks do not talk any more: the run was closed", ranks=())
        let_go(group)

    def _gone(self, lost: dict[int, str], strange: dict[int, str], about: str) -> RankError:
        ranks = at_fault(lost) if lost else tuple(sorted(strange))
        if len(self._others) > 1 and len(ranks) == len(self._others) == len(lost):
            named = "every other rank is gone: this one came too late, or its network failed"
        else:
            named = _named(ranks)
        why = {rank: (lost or strange).get(rank, "others lost it") for rank in ranks}
        because = {rank: f"it ended because of {_named(ranks)}" for rank in lost if rank not in ranks}
        reasons = "; ".join(f"{rank}: {words}" for rank, words in sorted({**why, **because}.items()))
        return RankError(
            f"{named} did not take part within {self.timeout:g} s ({about}): the step ended on all ranks, and none "
            f"commits any more; start all of them again, and the run resumes at the last step of all ({reasons})",
            ranks=ranks,
        )

    def _talk(
        self, message: torch.Tensor, heard: dict[int, dict[str, Any]], lost: dict[int, str], until: float
    ) -> None:
        """Fill `heard` and `lost`; a thread of its own, as gloo's waits do not look at signals."""
        rooms = {rank: torch.empty(_MESSAGE_BYTES, dtype=torch.uint8) for rank in self._others}
        first, rest = message[:_MESSAGE_BYTES], message[_MESSAGE_BYTES:]
        self._move(rooms, dict.fromkeys(self._others, first), lost, until)
        lengths = {rank: _length(rooms[rank]) - _MESSAGE_BYTES for rank in rooms if rank not in lost}
        rests = {rank: torch.empty(length, dtype=torch.uint8) for rank, length in lengths.items() if length > 0}
        self._move(rests, dict.fromkeys(lengths, rest) if rest.numel() else {}, lost, until)
        for rank in lengths.keys() - lost.keys():
            heard[rank] = _decoded(torch.cat([rooms[rank], *([rests[rank]] if rank in rests else [])]))

    def _move(
        self, into: dict[int, torch.Tensor], out: dict[int, torch.Tensor], lost: dict[int, str], until: float
    ) -> None:
        """Receive from some ranks and send to some; those with whom it failed are `lost`."""
        receiving: _Works = {rank: self._begun(distributed.irecv, room, rank) for rank, room in into.items()}
        sending: _Works = {rank: self._begun(distributed.isend, message, rank) for rank, message in out.items()}
        for works in (receiving, sending):
            for rank, work in works.items():
                why = _waited(work, until)
                if why is not None:
                    lost.setdefault(rank, why)

    def _begun(self, begin: Any, memory: torch.Tensor, rank: int) -> Any:
        try:
            return begin(memory, rank, group=self._group, tag=_TAG)
        except RuntimeError as error:
            return error


def _waited(work: distributed.Work | RuntimeError | None, until: float) -> str | None:
    """Why it did not come to its end; None where it did."""
    try:
        if isinstance(work, RuntimeError):
            raise work
        if work is not None:
            work.wait(timedelta(seconds=max(_SECONDS_MIN, until - time.monotonic())))
    except RuntimeError as error:
        return "no answer in time" if "Timed out" in str(error) else "its process ended, or its connection"
    return None


def _encoded(message: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(message).encode()
    length = max(_MESSAGE_BYTES, _LENGTH_BYTES + len(text))
    return torch.frombuffer(
        bytearray(length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length - _LENGTH_BYTES)), dtype=torch.uint8
    )


def _length(memory: torch.Tensor) -> int:
    return int.from_bytes(bytes(memory[:_LENGTH_BYTES].tolist()), "little")


def _decoded(memory: torch.Tensor) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(bytes(memory[_LENGTH_BYTES:].tolist()))
    return message


def _named(ranks: Iterable[int]) -> str:
    return "rank " + ", rank ".join(map(str, sorted(ranks)))


def shortened(error: BaseException) -> str:
    """An error as others are told of it."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "..."


_IDENTITY_BYTES = 16


# The way on after a commit of which some ranks may have the root.
_UNKNOWN = "some ranks may have the step: start all of them again, and the run resumes at the last that all have"


class Agreement:
    """The commits of one run that several ranks make together. See `SharedCommits` of the engine.

    Nobody stages a step before all have written the root of the one before. So ranks are never more than one commit
    apart, and the two slots of each store hold the newest that all of them have.
    """

    def __init__(self, exchange: Exchange, run: bytes, number: int, identity: bytes, nonce: bytes) -> None:
        """Agree on what comes after a commit that all ranks have.

        Args:
            exchange: how the ranks talk.
            run: which run it is, 16 bytes, the same on all ranks.
            number: of the last commit, the same on all ranks; 0 before the first.
            identity: of the last commit, or of the one that first values are from; the same on all ranks.
            nonce: drawn at this opening, the same on all ranks: what another opening of the same stores commits has
                other identities.
        """
        self.exchange = exchange
        self.run = run
        self.number = number
        self.identity = identity
        self._nonce = nonce
        self._store: Store | None = None

    def lead(self, store: Store) -> None:
        """Take charge of the commits of this rank's store."""
        self._store = store
        store.share(self)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What leads to a commit: where it fails on this rank, the others hear of it instead of waiting."""
        known = self.exchange.failures
        try:
            yield
        except BaseException as error:
            if self.exchange.failures == known:
                self.exchange.fail(error)
            if self.exchange.broken is not None:
                self._end()
            raise

    def commit(self, make: Callable[[CommitOfRank, Callable[[], object]], int]) -> int:
        """Make a commit on all ranks, or on none.

        Raises:
            RankError: a rank failed. Where it could say so before any root was written, the step can be discarded and
                tried again on all ranks. Otherwise nobody commits any more, by `close()` either.
        """
        number = self.number + 1
        said = self.identity + self._nonce + number.to_bytes(8, "little")
        identity = hashlib.blake2b(said, digest_size=_IDENTITY_BYTES).digest()
        agreed = False

        def agree() -> None:
            nonlocal agreed
            self._ask("staged", number, DISCARDED)
            agreed = True

        with self.step():
            try:
                generation = make((self.run, number, identity, self.exchange.rank, self.exchange.size), agree)
                self._ask("written", number, _UNKNOWN)
            except BaseException:
                if agreed:
                    # All write their roots now, and this one failed, or another: who has it is known after reopening.
                    self._end()
                raise
        self.number, self.identity = number, identity
        return generation

    def _ask(self, phase: str, number: int, remedy: str) -> None:
        """Hear whether all ranks are as far; raise where one is not."""
        numbers = self.exchange.tell(phase, number, remedy=remedy)
        apart = {rank: other for rank, other in enumerate(numbers) if other != number}
        if apart:
            self._end()
            raise RankError(f"commit {number} of rank {self.exchange.rank} meets others: {apart}", ranks=tuple(apart))

    def _end(self) -> None:
        """Leave on storage what is there: which commit all ranks have is found when they are opened again."""
        if self._store is not None:
            self._store.end()
