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

from memascend.distributed.groups import Line, at_fault, begin, left_by, let_go, lost_each_other, make_group
from memascend.distributed.rendezvous import WORD_SECONDS
from memascend.errors import ConfigError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.errors import MemascendError
    from memascend.storage import Store
    from memascend.storage.store import CommitOfRank


_T = TypeVar("_T")
# What to do after a step that no rank has committed.
DISCARDED = "the step is discarded on all ranks: call zero_grad() on each, and continue"
# Bytes of the first part of a message: enough for a few numbers and the text of an error. The rest follows.
_MESSAGE_BYTES = 4096
# A message begins with its length in bytes.
_LENGTH_BYTES = 8
_TEXT_CHARACTERS_MAX = 600
# How often a wait for other ranks checks for Ctrl-C.
_INTERRUPT_SECONDS = 0.05
# The shortest wait, even if other ranks took all of the time: the message may have arrived.
_SECONDS_MIN = 0.01
# The share of the timeout in which ranks report that they lost others, and how much later than this one they may begin.
_PART_OF_LOST = 0.1
_LATER_SECONDS = 10.0
_TAG = 23
_Works = dict[int, "distributed.Work | RuntimeError | None"]


@dataclass(frozen=True)
class Message:
    """The message with one number that a rank sends to all others."""

    count: int  # its number
    kind: Literal["said", "failed", "lost"]  # failed: an error on this rank; lost: other ranks did not take part
    about: str | None  # its subject, which must be the same on all ranks
    value: Any  # a JSON value, or the text of an error


class Failure(NamedTuple):
    """The ranks that reported an error instead of a value."""

    ranks: tuple[int, ...]  # the ranks that failed; empty if ranks only lost others
    reasons: str  # of each rank, in words


class Exchange:
    """Exchanges small JSON values between all ranks, over a gloo group of its own.

    Every rank sends to every other one, so a rank that died or hangs is known by its number. After that no message
    counts any more, since some ranks may have received messages that others have not. torch's TCPStore cannot replace
    this: a rank that waits on it for a dead rank waits until the timeout.

    Attributes:
        rank: of this process.
        size: the number of ranks.
        timeout: seconds that a rank waits for the others.
        broken: the error of every later call, once the exchange has ended.
        failure: the last failure that a rank reported.
    """

    def __init__(self, timeout: float) -> None:
        """Make the group; all ranks do so together. See `rendezvous.meet` for its errors."""
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.timeout = timeout
        self.broken: RankError | None = None
        self.failure: Failure | None = None
        begin(timeout)
        self._group: Any = make_group(timeout)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._line: Line | None = None
        self._count = 0

    def tell(self, about: str, said: Any, *, remedy: str = DISCARDED) -> list[Any]:
        """Send `said` to all other ranks, and return the values of all ranks, by rank.

        Args:
            about: the subject, which must be the same on all ranks.
            said: a JSON value.
            remedy: the text of an error that says what to do if another rank failed.

        Raises:
            RankError: a rank did not answer in time, is gone, or made another call; or a rank failed, and then later
                calls still work.
        """
        heard = self._heard("said", about, said)
        if any(one.kind == "failed" for one in heard):
            assert self.failure is not None
            ranks, reasons = self.failure
            raise RankError(f"{_named(ranks)} failed, and {remedy} ({reasons})", ranks=ranks)
        return [one.value for one in heard]

    def everyone(self, mine: Any) -> list[Any]:
        """The JSON values of all ranks, by rank; all ranks make this call together."""
        return self.tell("the findings", mine)

    def union(self, words: Iterable[str]) -> set[str]:
        """All words of all ranks."""
        return {word for theirs in self.everyone(sorted(words)) for word in theirs}

    def together(self, do: Callable[[], _T], other: Callable[[str], MemascendError] = ConfigError) -> _T:
        """Call `do` on all ranks. If it raises on one, all ranks raise, and the error names that rank.

        Raises:
            MemascendError: `do` raised on another rank; `other` makes the error.
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
        """Around work of all ranks: if this rank fails, the others are notified instead of waiting for it."""
        known = self.failure
        try:
            yield
        except BaseException as error:
            if self.failure is known:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks of an error, whatever they wait for; raises nothing itself."""
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
        """Notify all ranks that some did not take part; return the error to raise, after at most `within` seconds."""
        if self.broken is None:
            try:
                self._heard("lost", None, where, within)
            except RankError as error:
                return error
        assert self.broken is not None
        return self.broken

    def end(self, why: str) -> None:
        """End the exchange: every later call raises."""
        if self.broken is None:
            self.broken = RankError(
                "the step ended on all ranks, and none commits any more: start all of them again, and the run resumes "
                f"at the last step of all ({why})",
                ranks=() if self.failure is None else self.failure.ranks,
            )

    def line(self) -> Line:
        """The line that moves rows to the first rank; all ranks make it together.

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
        """Send the next message, and return that of each rank with the same number."""
        if self.broken is not None:
            raise self.broken
        self._count += 1
        own = Message(self._count, kind, about, value)
        heard: dict[int, Message] = {self.rank: own}
        # Ranks that did not take part, and the reasons.
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
            if not failed:
                self._name_apart([rank for rank in told if rank != self.rank], until)
        if any(one.kind == "lost" for one in told.values()):
            assert self.failure is not None
            self.end(self.failure.reasons)
            assert self.broken is not None
            raise self.broken
        return [heard[rank] for rank in range(self.size)]

    def _name_apart(self, ranks: list[int], until: float) -> None:
        """Name the ranks that lost each other, while this one talks to both; each of them notes it once it gave up."""
        assert self.failure is not None
        # This one lost nobody: ranks that look for notes need not wait for one of it.
        left_by(())
        part = self.timeout * _PART_OF_LOST
        seconds = max(0.0, min(until - time.monotonic(), part)) + min(part, _LATER_SECONDS)
        apart = lost_each_other(ranks, seconds) if len(ranks) > 1 else ()
        if apart:
            self.failure = Failure(apart, f"{_named(apart)} lost each other; {self.failure.reasons}")

    def _require_all(self, own: Message, heard: dict[int, Message], lost: dict[int, str]) -> None:
        """End the exchange if ranks are lost or made another call."""
        # A rank that failed, or lost others, reports this whatever the subject.
        asked = {one.about for one in heard.values()} - {None}
        strange = {
            rank: f"it is at message {one.count}, {one.about!r}, and this one, {self.rank}, at {own.count}, "
            f"{own.about!r}: every rank must make the same calls"
            for rank, one in heard.items()
            if one.count != own.count or (len(asked) > 1 and one.about != own.about)
        }
        if lost or strange:
            # Ranks that lose this one look up the ranks that it blames; it does the same for the ranks that it lost.
            left_by(lost)
            self.broken = self._gone(lost, strange, str(own.about or own.value))
            raise self.broken

    def close(self) -> None:
        """Leave all groups: ranks that still use them see that this one is gone."""
        if self._group is None:
            return
        if self._line is not None:
            self._line.close()
        group, self._group = self._group, None
        self.broken = self.broken or RankError("the ranks do not talk any more: the run was closed", ranks=())
        let_go(group)

    def _gone(self, lost: dict[int, str], strange: dict[int, str], about: str) -> RankError:
        everyone = len(self._others) > 1 and len(lost) == len(self._others)
        # Ranks that lost each other may give up later than this one.
        seconds = min(_LATER_SECONDS, self.timeout * _PART_OF_LOST) if everyone else WORD_SECONDS
        ranks = at_fault(lost, seconds=seconds) if lost else tuple(sorted(strange))
        named = _named(ranks)
        if everyone and len(ranks) > 1:
            apart = lost_each_other(lost, WORD_SECONDS)
            if apart:
                named = f"{_named(apart)}, which lost each other,"
            elif len(ranks) == len(lost):
                named = "every other rank is gone: this one came too late, or its network failed"
        why = {rank: (lost or strange).get(rank, "others lost it") for rank in ranks}
        because = {rank: f"it ended because of {_named(ranks)}" for rank in lost if rank not in ranks}
        reasons = "; ".join(f"{rank}: {words}" for rank, words in sorted({**why, **because}.items()))
        return RankError(
            f"{named} did not take part within {self.timeout:g} s ({about}): the step ended on all ranks, and none "
            f"commits any more; start all of them again, and the run resumes at the last step of all ({reasons})",
            ranks=ranks,
        )

    def _talk(self, message: torch.Tensor, heard: dict[int, Message], lost: dict[int, str], until: float) -> None:
        """Fill `heard` and `lost`, on a thread of its own: gloo's waits ignore signals."""
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
        """Receive from some ranks and send to some; ranks with which this failed are added to `lost`."""
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
    """The exchange of a single process."""

    rank, size = 0, 1

    def tell(self, about: str, said: Any) -> list[Any]:
        """The value of the only rank; see `Exchange.tell`."""
        del about
        return [said]


def _waited(work: distributed.Work | RuntimeError | None, until: float) -> str | None:
    """Why a transfer failed; None if it completed."""
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
    """The text of an error as other ranks get it."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "..."


_IDENTITY_BYTES = 16
# What to do after a commit of which some ranks may have the root.
_UNKNOWN = "some ranks may have the step: start all of them again, and the run resumes at the last that all have"


class Agreement:
    """The commits of one run that several ranks make together.

    No rank stages a step before all have written the root of the step before. So ranks are never more than one commit
    apart, and the two slots of each store hold the newest commit that all ranks have.
    """

    def __init__(self, exchange: Exchange, run: bytes, number: int, identity: bytes, nonce: bytes) -> None:
        """Agree on the commits after one that all ranks have.

        Args:
            exchange: between the ranks.
            run: the run's id, 16 bytes, the same on all ranks.
            number: of the last commit, the same on all ranks; 0 before the first.
            identity: of the last commit, or of the commit that first values are from; the same on all ranks.
            nonce: drawn at this opening, the same on all ranks. Commits of another opening of the same stores have
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
        """Around the work before a commit: if this rank fails, the others are notified instead of waiting."""
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
            RankError: a rank failed. If it reported this before any root was written, the step can be discarded and
                tried again on all ranks. Otherwise no rank commits any more, not by `close()` either.
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
                    # Roots were being written when a rank failed: reopening finds out which ranks have the commit.
                    self._end()
                raise
        self.number, self.identity = number, identity
        return generation

    def _ask(self, phase: str, number: int, remedy: str) -> None:
        """Check that all ranks are at the same commit."""
        numbers = self.exchange.tell(phase, number, remedy=remedy)
        apart = {rank: other for rank, other in enumerate(numbers) if other != number}
        if apart:
            self._end()
            raise RankError(f"commit {number} of rank {self.exchange.rank} meets others: {apart}", ranks=tuple(apart))

    def _end(self) -> None:
        """Write nothing more: reopening finds the newest commit that all ranks have."""
        if self._store is not None:
            self._store.end()
