"""Exchanges short messages between all ranks, agrees on commits, and names a rank that is gone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import distributed

from memascend.distributed.groups import Line, at_fault, left_by, let_go, make_group
from memascend.errors import ConfigError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.errors import MemascendError
    from memascend.storage import Store
    from memascend.storage.store import CommitOfRank


_T = TypeVar("_T")
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


@dataclass(frozen=True)
class Message:
    """What one rank sends to all others as its message of one number."""

    count: int  # its number
    kind: Literal["said", "failed", "lost"]  # failed: an error on this rank; lost: the others did not come
    about: str | None  # what it is said about; all ranks must talk of the same
    value: Any  # a JSON value, or what happened, in words


class Failure(NamedTuple):
    """What ranks reported in place of what was asked."""

    ranks: tuple[int, ...]  # those that failed; none where ranks lost others alone
    reasons: str  # of each rank, in words


class Exchange:
    """What ranks say to each other beside their computing, over a group of gloo of its own.

    Every rank sends to every other one, so a rank that died or hangs is known by its number. After that no message
    counts any more: some ranks may have heard what others have not. torch's TCPStore would not do: who waits on it for
    a rank that died waits for all of the time.

    Attributes:
        rank: which one this is.
        size: how many there are.
        timeout: seconds that a rank waits for the others.
        broken: what is raised from now on, since the ranks talk no more.
        failure: the last that some rank reported.
    """

    def __init__(self, timeout: float) -> None:
        """Make the group; all ranks do so together."""
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.timeout = timeout
        self.broken: RankError | None = None
        self.failure: Failure | None = None
        self._group: Any = make_group(timeout)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._line: Line | None = None
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
        heard = self._heard("said", about, said)
        if any(one.kind == "failed" for one in heard):
            assert self.failure is not None
            ranks, reasons = self.failure
            raise RankError(f"{_named(ranks)} failed, and {remedy} ({reasons})", ranks=ranks)
        return [one.value for one in heard]

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank has found, a JSON value, in the order of ranks; all ranks ask it together."""
        return self.tell("the findings", mine)

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return any(self.everyone(flag))

    def union(self, words: Iterable[str]) -> set[str]:
        """What any rank says."""
        return {word for theirs in self.everyone(sorted(words)) for word in theirs}

    def together(self, do: Callable[[], _T], other: Callable[[str], MemascendError] = ConfigError) -> _T:
        """Do what may be refused. Where one rank's is, no rank goes on, and each says whose it was.

        Raises:
            MemascendError: another rank refused; as `other` makes it.
        """
        known = self.failure
        try:
            done = do()
            self.everyone(None)
        except BaseException as error:
            if self.failure is known:
                self.fail(error)
            elif isinstance(error, RankError) and self.rank not in error.ranks:
                assert self.failure is not None
                who = f"rank {error.ranks[0]} refused, and so do all ranks"
                raise other(f"{who} ({self.failure.reasons})") from error
            raise
        return done

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """What this rank does among others: where it fails by itself, they hear of it instead of waiting."""
        known = self.failure
        try:
            yield
        except BaseException as error:
            if self.failure is known:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others what happened here, whatever they wait for; it is raised anyway, and nothing by this."""
        if self.broken is not None:
            return
        try:
            heard = self._heard("failed", None, shortened(error))
        except RankError as others:
            error.add_note(f"the other ranks: {others}")
            return
        if sum(one.kind == "failed" for one in heard) > 1:
            assert self.failure is not None
            error.add_note(f"several ranks failed: {self.failure.reasons}")

    def lost(self, where: str, within: float) -> RankError:
        """Tell the others that they did not come, and hear within so many seconds where they are; what to raise."""
        if self.broken is None:
            try:
                self._heard("lost", None, where, within)
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
                ranks=() if self.failure is None else self.failure.ranks,
            )

    def line(self) -> Line:
        """How rows go to the first rank; all ranks make it together.

        Raises:
            RankError: a rank was gone when rows were gathered before.
        """
        if self._line is None:
            self._line = Line(self.timeout)
        if self._line.broken is not None:
            raise self._line.broken
        return self._line

    def _heard(
        self, kind: Literal["said", "failed", "lost"], about: str | None, value: Any, within: float | None = None
    ) -> list[Message]:
        """What each rank has sent as its message of this number."""
        if self.broken is not None:
            raise self.broken
        self._count += 1
        own = Message(self._count, kind, about, value)
        heard: dict[int, Message] = {self.rank: own}
        # Of the ranks that did not take part, why.
        lost: dict[int, str] = {}
        until = time.monotonic() + (self.timeout if within is None else within)
        talk = threading.Thread(target=self._talk, args=(_encoded(vars(own)), heard, lost, until), daemon=True)
        talk.start()
        try:
            while talk.is_alive():
                talk.join(_INTERRUPT_SECONDS)
        except BaseException:
            self.broken = RankError(f"rank {self.rank} was interrupted while all ranks talked", ranks=(self.rank,))
            raise
        self._require_all(own, heard, lost)
        told = {rank: one for rank, one in sorted(heard.items()) if one.kind != "said"}
        if told:
            failed = tuple(rank for rank, one in told.items() if one.kind == "failed")
            reasons = "; ".join(f"rank {rank}: {told[rank].value}" for rank in failed or told)
            self.failure = Failure(failed, reasons)
        if any(one.kind == "lost" for one in told.values()):
            assert self.failure is not None
            self.end(self.failure.reasons)
            assert self.broken is not None
            raise self.broken
        return [heard[rank] for rank in range(self.size)]

    def _require_all(self, own: Message, heard: dict[int, Message], lost: dict[int, str]) -> None:
        """Talk no more where ranks are lost, or speak of something else."""
        # Who failed, or lost the others, says so whatever they ask.
        asked = {one.about for one in heard.values()} - {None}
        strange = {
            rank: f"it is at message {one.count}, {one.about!r}, and this one, {self.rank}, at {own.count}, "
            f"{own.about!r}: every rank must make the same calls"
            for rank, one in heard.items()
            if one.count != own.count or (len(asked) > 1 and one.about != own.about)
        }
        if lost or strange:
            # Others that lose this one ask because of whom, while it asks the same of those it lost.
            left_by(lost)
            self.broken = self._gone(lost, strange, str(own.about or own.value))
            raise self.broken

    def close(self) -> None:
        """Let all groups go: others that still talk hear that this rank is gone."""
        if self._group is None:
            return
        if self._line is not None:
            self._line.close()
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

    def _talk(self, message: torch.Tensor, heard: dict[int, Message], lost: dict[int, str], until: float) -> None:
        """Fill `heard` and `lost`; a thread of its own, as gloo's waits do not look at signals."""
        rooms = {rank: torch.empty(_MESSAGE_BYTES, dtype=torch.uint8) for rank in self._others}
        first, rest = message[:_MESSAGE_BYTES], message[_MESSAGE_BYTES:]
        self._move(rooms, dict.fromkeys(self._others, first), lost, until)
        lengths = {rank: _length(rooms[rank]) - _MESSAGE_BYTES for rank in rooms if rank not in lost}
        rests = {rank: torch.empty(length, dtype=torch.uint8) for rank, length in lengths.items() if length > 0}
        self._move(rests, dict.fromkeys(lengths, rest) if rest.numel() else {}, lost, until)
        for rank in lengths.keys() - lost.keys():
            heard[rank] = Message(**_decoded(torch.cat([rooms[rank], *([rests[rank]] if rank in rests else [])])))

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


class Alone:
    """The only rank: what it says it hears."""

    rank, size = 0, 1

    def tell(self, about: str, said: Any) -> list[Any]:
        """What each rank says; see `Exchange.tell`."""
        del about
        return [said]


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
        try:
            with self.exchange.part():
                yield
        except BaseException:
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
