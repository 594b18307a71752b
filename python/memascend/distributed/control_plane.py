"""Exchanges short messages between all ranks, and finds out which ranks are gone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import distributed

from memascend.distributed.groups import Line, Meeting, leave_group
from memascend.errors import ConfigError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.distributed.sharding import Sharding
    from memascend.errors import MemascendError


_T = TypeVar("_T")
# Advice in errors about a step that no rank has committed.
DISCARDED = "the step is discarded on all ranks: call zero_grad() on each rank, and continue"
_TEXT_CHARACTERS_MAX = 600
# Seconds between two checks for Ctrl-C while this rank waits for other ranks.
_INTERRUPT_SECONDS = 0.05
# The shortest wait for a message, in seconds. A rank waits at least this long, even if earlier waits have used up the
# timeout, because the message may have arrived already.
_SECONDS_MIN = 0.01
_TAG_WORD, _TAG_DETAIL, _TAG_NOTHING = range(23, 26)
# This share of the timeout, but at most `_DETAIL_SECONDS_MAX`, is reserved for whole messages. Whole messages show each
# rank which other rank is missing.
_PART_DETAIL = 0.25
_DETAIL_SECONDS_MAX = 5.0
# A rank that waits for a `Word` also looks for another rank's alarm: this many times within `_detail_seconds`.
_LOOKS = 8
# The size of a `Word`, and of the first part of a whole message. A `Word` has room for an exact sum of squares, which
# has 180 digits, and for a digest, which has 32 digits.
_WORD_BYTES = 512
DIGEST_BYTES = 16
# The state of a `Word`, which summarizes the messages of some ranks. `_SAME`: these ranks sent equal subjects and
# values. `_APART`: the messages differ, a rank failed, or the sums do not fit into a word. `_LOST`: a rank is missing,
# or has stopped waiting.
_SAME, _APART, _LOST = range(3)
# The content of a message. "value": a value. "failed": an error on the sender. "lost": the sender has found that other
# ranks did not take part.
_Kind = Literal["value", "failed", "lost"]


class Message(NamedTuple):
    """One rank's message to all other ranks. In one exchange, the messages of all ranks must have the same number."""

    number: int
    kind: _Kind
    about: str | None  # the subject, which must be the same on all ranks; None if `kind` is not "value"
    value: Any  # a JSON value, or the text of an error
    numbers: list[int]  # integers that are added over all ranks
    waited: float = 0.0  # seconds in the exchange before the sender sent its whole message


class Word(NamedTuple):
    """A summary, of fixed size, of the messages that some ranks send in one exchange.

    If the word of all ranks has the state `_SAME`, ranks exchange only words, and no whole messages.
    """

    state: int
    number: int
    digest: str  # of subject and value
    sums: list[int]

    @classmethod
    def of(cls, message: Message) -> Word:
        """Returns the word of one message."""
        data = json.dumps([message.about, message.value]).encode()
        digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
        state = _SAME if message.kind == "value" else _APART
        word = cls(state, message.number, digest, message.numbers)
        return word if len(json.dumps(word)) <= _WORD_BYTES else word.apart()

    def apart(self) -> Word:
        """Returns this word without sums, for messages that differ, and for sums that do not fit into a word.

        The state of the result is `_APART`, or `_LOST` if this word has that state.
        """
        return Word(max(self.state, _APART), self.number, self.digest, [])

    def and_of(self, other: Word) -> Word:
        """Returns one word, which summarizes all messages that the two words summarize."""
        state = max(self.state, other.state)
        if self[1:3] != other[1:3] or len(self.sums) != len(other.sums):
            return Word(state, *self[1:]).apart()
        word = Word(state, *self[1:3], [one + more for one, more in zip(self.sums, other.sums, strict=True)])
        return word if len(json.dumps(word)) <= _WORD_BYTES else word.apart()


def _padded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode().ljust(_WORD_BYTES)), dtype=torch.uint8)


def _room(nbytes: int = _WORD_BYTES) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def _has_arrived(room: torch.Tensor) -> bool:
    """True if `room` has a whole message: no message ends with a zero byte, and a connection delivers bytes in order.

    gloo may raise an error although the message has arrived: the sender has closed the connection before the wait
    returned. A sender may close its connections once it has received all messages.
    """
    return bool(room[-1])


def _json_in(room: torch.Tensor) -> Any:
    return json.loads(bytes(room.tolist()))


_LOST_WORD = Word(_LOST, 0, "", [])


class Failure(NamedTuple):
    """The last failure that ranks reported in an exchange."""

    ranks: tuple[int, ...]  # the ranks that failed; empty if ranks reported only that other ranks are lost
    reasons: str  # the reported error of each rank


class Exchange:
    """Exchanges small JSON values between all ranks, over a separate gloo group.

    In most steps all ranks send equal values. So ranks send one `Word` of fixed size each up a binomial tree, and the
    root sends the combined word of all ranks down the tree. If values differ, or a rank failed or is missing, each rank
    sends its whole `Message` to every other rank. Each rank then knows which rank died or hangs. After the loss of a
    rank the exchange ends, because some ranks may have received messages that other ranks have not received.

    The alternatives are worse. gloo's all_reduce is a ring, which takes 2 (W - 1) hops for W ranks. gloo's
    monitored_barrier names the missing rank only on rank 0. With torch's store, a rank waits for a dead rank until the
    timeout.
    """

    def __init__(self, timeout: float) -> None:
        """Makes the group; a collective call. Raises the errors of `rendezvous.meet` and of `Meeting.make_group`."""
        self.meeting = Meeting(timeout)
        self.rank, self.size = self.meeting.rank, self.meeting.size
        self.timeout = timeout
        # The error that `all_gather` and its callers raise after the exchange has ended; None before.
        self.broken: RankError | None = None
        # The last failure that a rank reported.
        self.failure: Failure | None = None
        self._group: Any = self.meeting.make_group(timeout)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        # This rank's parent and children in a binomial tree with root 0. Ranks of one host have close numbers, so they
        # are also close in the tree.
        self._parent = self.rank & (self.rank - 1)
        steps = [1 << power for power in range(self.size.bit_length())]
        below = [self.rank + step for step in steps if self.rank % (2 * step) == 0]
        self._children = [rank for rank in below if rank < self.size]
        # The handles of the sends of words: for the previous message, and for this message. Sends for earlier messages
        # are complete, because a rank that answers has received all earlier words.
        self._sending: tuple[list[Any], list[Any]] = ([], [])
        self._detail_seconds = min(timeout * _PART_DETAIL, _DETAIL_SECONDS_MAX)
        # Moves rows from each rank to the first rank.
        self.line = Line(self.meeting, timeout)
        self._count = 0
        # The lists that `add` returned since the last message. The next message replaces their numbers by the sums over
        # all ranks.
        self._adding: list[list[int]] = []

    def all_gather(self, about: str, value: Any, *, remedy: str = DISCARDED) -> list[Any]:
        """Sends the JSON value `value` to all other ranks; returns the values of all ranks, by rank.

        `about` is the subject, which must be the same on all ranks. `remedy` is the advice in the error if another rank
        failed.

        Raises:
            RankError: a rank failed; later calls still work. Or the exchange has ended, for example because a rank did
                not answer in time, is gone, or made a different call.
        """
        received = self._messages("value", about, value)
        if any(one.kind == "failed" for one in received):
            assert self.failure is not None
            ranks, reasons = self.failure
            raise RankError(f"{ranks_text(ranks)} failed, and {remedy} ({reasons})", ranks=ranks)
        return [one.value for one in received]

    def add(self, numbers: Iterable[int]) -> list[int]:
        """Sends integers with the next message. The exchange of that message adds the integers over all ranks.

        After the next message, the returned list has the sums. All ranks must add the same number of integers. A rank
        with nothing to add passes zeros.
        """
        sums = [*map(int, numbers)]
        self._adding.append(sums)
        return sums

    def all_values(self, mine: Any) -> list[Any]:
        """Returns the JSON values of all ranks, by rank; a collective call."""
        return self.all_gather("the findings", mine)

    def first_other(self, mine: Any) -> int | None:
        """Returns the first rank whose JSON value differs from rank 0's; None if there is none. A collective call."""
        values = self.all_values(mine)
        return next((rank for rank, one in enumerate(values) if one != values[0]), None)

    def together(self, do: Callable[[], _T], other: Callable[[str], MemascendError] = ConfigError) -> _T:
        """Calls `do`; returns its result once `do` has returned on all ranks. A collective call.

        Raises:
            MemascendError: `do` raised on another rank; `other` makes the error, which names that rank. An error of
                `do` on this rank is raised as it is.
            RankError: the exchange has ended, for example because a rank is gone or made a different call.
        """
        known = self.failure
        try:
            with self.part():
                done = do()
                self.all_values(None)
        except RankError as error:
            failure = self.failure
            if failure is None or failure is known or not error.ranks or self.rank in (*failure.ranks, *error.ranks):
                raise
            raise other(
                f"the call failed on rank {error.ranks[0]}, so it failed on all ranks ({failure.reasons})"
            ) from error
        return done

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Wraps work that all ranks do.

        If this rank fails, the other ranks get the error and do not wait for this rank.
        """
        known = self.failure
        try:
            yield
        except BaseException as error:
            if self.failure is known:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Sends an error of this rank to the other ranks, unless the exchange has ended; raises no error.

        Another rank receives the error in any call in which that rank waits for messages.
        """
        if self.broken is not None:
            return
        try:
            received = self._messages("failed", None, shortened(error))
        except RankError as others:
            error.add_note(f"the other ranks could not be notified: {others}")
            return
        if sum(one.kind == "failed" for one in received) > 1:
            assert self.failure is not None
            error.add_note(f"several ranks failed: {self.failure.reasons}")

    def lost(self, where: str, within: float) -> RankError:
        """Reports to all ranks that this rank has lost other ranks; returns the error to raise.

        Waits at most `within` seconds for the messages of other ranks.
        """
        if self.broken is None:
            with contextlib.suppress(RankError):
                self._messages("lost", None, where, within)
        assert self.broken is not None
        return self.broken

    def end(self, why: str) -> None:
        """Ends the exchange: later calls that exchange messages raise `broken`."""
        if self.broken is None:
            self.broken = RankError(
                "the run ended on all ranks, and no rank commits again: start all ranks again with "
                f'existing="resume", to continue after the last step that all ranks have ({why})',
                ranks=() if self.failure is None else self.failure.ranks,
            )

    def close(self) -> None:
        """Ends the exchange, and leaves its groups. Ranks that still use a group notice that this rank is gone."""
        self.line.close()
        if self.broken is not None and self._group is not None:
            # A thread of this rank may still wait for a word: end the wait.
            self._hang_up()
        elif self._group is not None:
            self._finish_sending()
        # Drop the handles of sends, too, because these handles keep connections open.
        group, self._group, self._sending = self._group, None, ([], [])
        self.broken = self.broken or RankError(
            "this run was closed, so its ranks exchange no more messages: call offload() again on all ranks", ranks=()
        )
        leave_group(group)

    def _messages(self, kind: _Kind, about: str | None, value: Any, within: float | None = None) -> list[Message]:
        """Sends this rank's next message; returns the message with the same number from each rank, by rank."""
        if self.broken is not None:
            raise self.broken
        self._count += 1
        adding, self._adding = self._adding, []
        own = Message(self._count, kind, about, value, [one for each in adding for one in each])
        began = time.monotonic()
        until = began + (self.timeout if within is None else within)
        try:
            word = _LOST_WORD if kind == "lost" else self._agreed(Word.of(own), until - self._detail_seconds)
            if word.state == _SAME:
                _put(word.sums, adding)
                return [own] * self.size
            if word.state == _LOST:
                self._ring()
            own = own._replace(waited=time.monotonic() - began)
            received: dict[int, Message] = {self.rank: own}
            # The ranks that did not take part, each with the reason.
            lost: dict[int, str] = {}
            # After Ctrl-C, the thread that runs `_talk` may still run when close() has set `_group` to None. So the
            # thread gets the group as an argument.
            _wait_for(functools.partial(self._talk, self._group, own, received, lost, until))
        except BaseException:
            self.broken = RankError(
                f"rank {self.rank} was interrupted while all ranks exchanged messages: start all ranks again",
                ranks=(self.rank,),
            )
            raise
        if word.state == _LOST and not lost and all(one.kind != "lost" for one in received.values()):
            # All ranks answered in the end, but one of them had already stopped waiting. The rank that waited the
            # shortest time was late.
            lost[min(received, key=lambda rank: received[rank].waited)] = "it came too late"
        self._require_all(own, received, lost)
        problems = {rank: one for rank, one in sorted(received.items()) if one.kind != "value"}
        if problems:
            failed = tuple(rank for rank, one in problems.items() if one.kind == "failed")
            self.failure = Failure(
                failed, "; ".join(f"rank {rank}: {problems[rank].value}" for rank in failed or problems)
            )
            if any(one.kind == "lost" for one in problems.values()):
                self.end(self.failure.reasons)
                assert self.broken is not None
                raise self.broken
        else:
            _put([sum(each) for each in zip(*(one.numbers for one in received.values()), strict=True)], adding)
        return [received[rank] for rank in range(self.size)]

    def _require_all(self, own: Message, received: dict[int, Message], lost: dict[int, str]) -> None:
        """If ranks are lost, or made a different call, ends the exchange and raises RankError."""
        # The message of a rank that failed, or that lost other ranks, has no subject.
        asked = {one.about for one in received.values()} - {None}
        strange = {
            rank: f"it is at message {one.number}, {one.about!r}, and rank {self.rank} is at message {own.number}, "
            f"{own.about!r}: every rank must make the same calls"
            for rank, one in received.items()
            if one.number != own.number or (len(asked) > 1 and one.about != own.about)
        }
        if not lost and not strange:
            return
        # Leave a note that blames the lost ranks: other ranks that lose this rank read the note. `at_fault` below reads
        # the notes of other ranks.
        self.meeting.left_by(lost)
        if lost:
            self._hang_up()
        ranks = self.meeting.at_fault(lost) if lost else tuple(sorted(strange))
        named = f"{ranks_text(ranks)} did not take part in this exchange within {self.timeout:g} s"
        if len(ranks) == len(lost) == len(self._others) > 1:
            named = "every other rank is gone: this rank came too late, or its network failed"
        why = {rank: (lost or strange).get(rank, "other ranks lost it") for rank in ranks}
        because = {rank: f"it ended because of {ranks_text(ranks)}" for rank in lost if rank not in ranks}
        reasons = "; ".join(f"{rank}: {words}" for rank, words in sorted({**why, **because}.items()))
        self.broken = RankError(
            f"{named} ({own.about or own.value}): the run ended on all ranks, and no rank commits again; start all "
            f'ranks again with existing="resume", to continue after the last step that all ranks have ({reasons})',
            ranks=ranks,
        )
        raise self.broken

    # --- words --------------------------------------------------------------------------

    def _agreed(self, own: Word, until: float) -> Word:
        """Returns the combined word of all ranks; `_LOST_WORD` if a rank is missing or has stopped waiting."""
        found: list[Word] = []
        self._sending = (self._sending[1], [])
        over, rung = threading.Event(), threading.Event()
        listening = threading.Thread(target=self._listen, args=(over, rung), daemon=True)
        listening.start()
        group = self._group
        try:
            _wait_for(
                lambda: found.append(self._added(group, own)),
                lambda: rung.is_set() or time.monotonic() > until,
            )
        finally:
            over.set()
        return found[0] if found else _LOST_WORD

    def _added(self, group: Any, word: Word) -> Word:
        for child in self._children:
            word = word.and_of(self._received(group, child))
        if self.rank:
            self._send(group, word, self._parent)
            word = self._received(group, self._parent)
        for child in reversed(self._children):
            self._send(group, word, child)
        return word

    def _received(self, group: Any, rank: int) -> Word:
        room = _room()
        try:
            # Wait for up to twice the timeout, so that this wait does not time out before `_agreed` stops waiting. If a
            # wait times out, gloo closes all connections, and the exchange of whole messages needs these connections.
            work = distributed.irecv(room, rank, group=group, tag=_TAG_WORD)
            assert work is not None
            work.wait(timedelta(seconds=2 * self.timeout))
        except RuntimeError:
            if not _has_arrived(room):
                return _LOST_WORD
        return Word(*_json_in(room))

    def _send(self, group: Any, word: Word, rank: int) -> None:
        # Ignore errors here. If `rank` is gone, this rank notices it because the next word from `rank` does not arrive.
        with contextlib.suppress(RuntimeError):
            self._sending[1].append(distributed.isend(_padded(json.dumps(word)), rank, group=group, tag=_TAG_WORD))

    def _listen(self, over: threading.Event, rung: threading.Event) -> None:
        """Sets `rung` soon after a rank has set the alarm, so that this rank stops waiting for a word."""
        with contextlib.suppress(RuntimeError):
            while not over.wait(self._detail_seconds / _LOOKS):
                if self.meeting.has_alarm():
                    rung.set()
                    return

    def _ring(self) -> None:
        """Ends all waits for a word: sets the alarm in torch's store, and sends `_LOST_WORD` to neighbours."""
        self.meeting.alarm()
        for rank in {*self._children, self._parent} - {self.rank}:
            self._send(self._group, _LOST_WORD, rank)

    def _finish_sending(self) -> None:
        """Waits a short time until the last words are sent.

        A rank that still waits for one of these words would otherwise report this rank as lost.
        """
        until = time.monotonic() + self._detail_seconds
        for work in (*self._sending[0], *self._sending[1]):
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(_SECONDS_MIN, until - time.monotonic())))

    def _hang_up(self) -> None:
        """Closes all connections, so that no rank waits for this rank.

        gloo closes all connections of a group if a wait times out, so this function waits for a message that no rank
        sends.
        """
        with contextlib.suppress(RuntimeError):
            work = distributed.irecv(_room(), group=self._group, tag=_TAG_NOTHING)
            assert work is not None
            work.wait(timedelta(milliseconds=1))

    # --- whole messages -----------------------------------------------------------------

    def _talk(self, group: Any, own: Message, received: dict[int, Message], lost: dict[int, str], until: float) -> None:
        text = _padded(json.dumps(own))
        # If one rank hangs, gloo closes all connections. Short messages are sent first, so they have arrived by then.
        # If a message is longer than a word, this rank sends first the length of the message and then the message.
        is_long = text.numel() > _WORD_BYTES
        first = {rank: _room() for rank in self._others}
        self._move(group, first, dict.fromkeys(first, _padded(str(text.numel())) if is_long else text), lost, until)
        found = {rank: _json_in(first[rank]) for rank in first if rank not in lost}
        texts = {rank: _room(one) for rank, one in found.items() if isinstance(one, int)}
        self._move(group, texts, dict.fromkeys(found, text) if is_long else {}, lost, until)
        found |= {rank: _json_in(room) for rank, room in texts.items() if rank not in lost}
        received |= {rank: Message(*one) for rank, one in found.items() if rank not in lost}

    def _move(
        self,
        group: Any,
        into: dict[int, torch.Tensor],
        out: dict[int, torch.Tensor],
        lost: dict[int, str],
        until: float,
    ) -> None:
        """Receives from the ranks in `into` and sends to the ranks in `out`; records each failure in `lost`, by rank.

        A rank in `into` does not count as lost if its message arrived before the rank closed the connection. If the
        rank has not received all messages, its next message will be missing, and the rank will count as lost then.
        """
        begun = [(rank, _begun(distributed.irecv, room, rank, group)) for rank, room in into.items()]
        begun += [(rank, _begun(distributed.isend, message, rank, group)) for rank, message in out.items()]
        for rank, work in begun:
            try:
                if isinstance(work, RuntimeError):
                    raise work
                if work is not None:
                    work.wait(timedelta(seconds=max(_SECONDS_MIN, until - time.monotonic())))
            except RuntimeError as error:
                if rank in into and _has_arrived(into[rank]):
                    continue
                is_late = "Timed out" in str(error)
                lost.setdefault(rank, "no answer in time" if is_late else "its process or its connection ended")


def _put(sums: Iterable[int], adding: list[list[int]]) -> None:
    """Replaces the numbers in the lists of `adding` by `sums`; `sums` has the numbers of all lists, in order."""
    found = iter(sums)
    for each in adding:
        each[:] = itertools.islice(found, len(each))


def _begun(begin: Any, memory: torch.Tensor, rank: int, group: Any) -> Any:
    try:
        return begin(memory, rank, group=group, tag=_TAG_DETAIL)
    except RuntimeError as error:
        return error


def _wait_for(do: Callable[[], object], is_over: Callable[[], bool] = lambda: False) -> None:
    """Calls `do` on a thread; waits until `do` returns or `is_over()` is true.

    Ctrl-C interrupts this wait. A wait of gloo in the calling thread would not be interrupted.
    """
    talk = threading.Thread(target=do, daemon=True)
    talk.start()
    while talk.is_alive() and not is_over():
        talk.join(_INTERRUPT_SECONDS)


class Alone:
    """Stands for an `Exchange` in a single process."""

    rank, size = 0, 1

    def all_gather(self, about: str, value: Any) -> list[Any]:
        """Returns the value of the only rank."""
        del about
        return [value]

    def all_values(self, mine: Any) -> list[Any]:
        """Returns the value of the only rank."""
        return [mine]

    def together(self, do: Callable[[], _T], other: Callable[[str], MemascendError] = ConfigError) -> _T:
        """Returns the result of `do`."""
        del other
        return do()


def exchange_of(sharding: Sharding | None) -> Exchange | Alone:
    """Returns the exchange between the ranks of a model; an `Alone` if there is only one rank."""
    return Alone() if sharding is None or sharding.exchange is None else sharding.exchange


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns the ranks as text, in ascending order."""
    return "rank " + ", rank ".join(map(str, sorted(ranks)))


def shortened(error: BaseException) -> str:
    """Returns the text of an error, cut to the length that is sent to other ranks."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "..."
