"""Exchanges short messages between all ranks, agrees on commits, and names a rank that is gone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import distributed

from memascend.distributed.groups import Line, Meeting, let_go
from memascend.errors import ConfigError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.distributed.rows import Layout
    from memascend.distributed.sharding import Sharding
    from memascend.errors import MemascendError
    from memascend.storage import Store
    from memascend.storage.store import CommitOfRank


_T = TypeVar("_T")
# What to do after a step that no rank has committed.
DISCARDED = "the step is discarded on all ranks: call zero_grad() on each, and continue"
_TEXT_CHARACTERS_MAX = 600
# How often a wait for other ranks checks for Ctrl-C.
_INTERRUPT_SECONDS = 0.05
# The shortest wait, even if other ranks took all of the time: the message may have arrived.
_SECONDS_MIN = 0.01
_TAG = 23
# failed: an error on this rank; lost: other ranks did not take part.
_Kind = Literal["said", "failed", "lost"]


class Message(NamedTuple):
    """The message with one number that a rank sends to all others."""

    number: int
    kind: _Kind
    about: str | None  # its subject, which must be the same on all ranks
    value: Any  # a JSON value, or the text of an error


class Failure(NamedTuple):
    """The ranks that reported an error instead of a value."""

    ranks: tuple[int, ...]  # the ranks that failed; empty if ranks only lost others
    reasons: str  # of each rank, in words


class Exchange:
    """Exchanges small JSON values between all ranks, over a gloo group of its own.

    Every rank sends to every other one, so a rank that died or hangs is known by its number. After that no message
    counts any more, since some ranks may have received messages that others have not. torch's TCPStore and gloo's
    monitored_barrier cannot replace this: with the store a rank waits for a dead rank until the timeout, and the
    barrier names a rank on rank 0 alone.
    """

    def __init__(self, timeout: float) -> None:
        """Make the group; all ranks do so together. See `rendezvous.meet` for its errors."""
        self.meeting = Meeting(timeout)
        self.rank, self.size = self.meeting.rank, self.meeting.size
        self.timeout = timeout
        # The error of every later call, once the exchange has ended.
        self.broken: RankError | None = None
        # The last failure that a rank reported.
        self.failure: Failure | None = None
        self._group: Any = self.meeting.make_group(timeout)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        # It moves rows to the first rank.
        self.line = Line(self.meeting, timeout)
        self._count = 0

    def tell(self, about: str, said: Any, *, remedy: str = DISCARDED) -> list[Any]:
        """Send the JSON value `said` to all other ranks, and return the values of all ranks, by rank.

        `about` is the subject, which must be the same on all ranks. `remedy` says in an error what to do if another
        failed.

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

    def first_other(self, mine: Any) -> int | None:
        """The first rank whose JSON value is not that of rank 0; None if all have the same."""
        told = self.everyone(mine)
        return next((rank for rank, one in enumerate(told) if one != told[0]), None)

    def together(self, do: Callable[[], _T], other: Callable[[str], MemascendError] = ConfigError) -> _T:
        """Call `do` on all ranks. If it raises on one, all ranks raise, and the error names that rank.

        Raises:
            MemascendError: `do` raised on another rank; `other` makes the error.
        """
        known = self.failure
        try:
            with self.part():
                done = do()
                self.everyone(None)
        except RankError as error:
            failure = self.failure
            if failure is None or failure is known or not error.ranks or self.rank in (*failure.ranks, *error.ranks):
                raise
            raise other(f"rank {error.ranks[0]} refused, and so do all ranks ({failure.reasons})") from error
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
            with contextlib.suppress(RankError):
                self._heard("lost", None, where, within)
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

    def close(self) -> None:
        """Leave all groups: ranks that still use them see that this one is gone."""
        self.line.close()
        group, self._group = self._group, None
        self.broken = self.broken or RankError("the ranks do not talk any more: the run was closed", ranks=())
        let_go(group)

    def _heard(self, kind: _Kind, about: str | None, value: Any, within: float | None = None) -> list[Message]:
        """Send the next message, and return that of each rank with the same number."""
        if self.broken is not None:
            raise self.broken
        self._count += 1
        own = Message(self._count, kind, about, value)
        heard: dict[int, Message] = {self.rank: own}
        # Ranks that did not take part, and the reasons.
        lost: dict[int, str] = {}
        until = time.monotonic() + (self.timeout if within is None else within)
        # On a thread: gloo's waits ignore signals.
        talk = threading.Thread(target=self._talk, args=(own, heard, lost, until), daemon=True)
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
            self.failure = Failure(failed, "; ".join(f"rank {rank}: {told[rank].value}" for rank in failed or told))
            if any(one.kind == "lost" for one in told.values()):
                self.end(self.failure.reasons)
                assert self.broken is not None
                raise self.broken
        return [heard[rank] for rank in range(self.size)]

    def _require_all(self, own: Message, heard: dict[int, Message], lost: dict[int, str]) -> None:
        """End the exchange if ranks are lost or made another call."""
        # A rank that failed, or lost others, reports this whatever the subject.
        asked = {one.about for one in heard.values()} - {None}
        strange = {
            rank: f"it is at message {one.number}, {one.about!r}, and this one, {self.rank}, at {own.number}, "
            f"{own.about!r}: every rank must make the same calls"
            for rank, one in heard.items()
            if one.number != own.number or (len(asked) > 1 and one.about != own.about)
        }
        if not lost and not strange:
            return
        # Ranks that lose this one look up the ranks that it blames; it does the same for the ranks that it lost.
        self.meeting.left_by(lost)
        ranks = self.meeting.at_fault(lost) if lost else tuple(sorted(strange))
        named = _named(ranks)
        if len(ranks) == len(lost) == len(self._others) > 1:
            named = "every other rank is gone: this one came too late, or its network failed"
        why = {rank: (lost or strange).get(rank, "others lost it") for rank in ranks}
        because = {rank: f"it ended because of {_named(ranks)}" for rank in lost if rank not in ranks}
        reasons = "; ".join(f"{rank}: {words}" for rank, words in sorted({**why, **because}.items()))
        self.broken = RankError(
            f"{named} did not take part within {self.timeout:g} s ({own.about or own.value}): the step ended on all "
            f"ranks, and none commits any more; start all of them again, and the run resumes at the last step of all "
            f"({reasons})",
            ranks=ranks,
        )
        raise self.broken

    def _talk(self, own: Message, heard: dict[int, Message], lost: dict[int, str], until: float) -> None:
        text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        lengths = {rank: torch.empty(1, dtype=torch.int64, device="cpu") for rank in self._others}
        self._move(lengths, dict.fromkeys(lengths, torch.tensor([text.numel()], device="cpu")), lost, until)
        texts = {
            rank: torch.empty(int(lengths[rank]), dtype=torch.uint8, device="cpu")
            for rank in lengths
            if rank not in lost
        }
        self._move(texts, dict.fromkeys(texts, text), lost, until)
        for rank in texts.keys() - lost.keys():
            heard[rank] = Message(*json.loads(bytes(texts[rank].tolist())))

    def _move(
        self, into: dict[int, torch.Tensor], out: dict[int, torch.Tensor], lost: dict[int, str], until: float
    ) -> None:
        """Receive from some ranks and send to some; ranks with which this failed are added to `lost`."""
        begun = [(rank, self._begun(distributed.irecv, room, rank)) for rank, room in into.items()]
        begun += [(rank, self._begun(distributed.isend, message, rank)) for rank, message in out.items()]
        for rank, work in begun:
            try:
                if isinstance(work, RuntimeError):
                    raise work
                if work is not None:
                    work.wait(timedelta(seconds=max(_SECONDS_MIN, until - time.monotonic())))
            except RuntimeError as error:
                is_late = "Timed out" in str(error)
                lost.setdefault(rank, "no answer in time" if is_late else "its process ended, or its connection")

    def _begun(self, begin: Any, memory: torch.Tensor, rank: int) -> Any:
        try:
            return begin(memory, rank, group=self._group, tag=_TAG)
        except RuntimeError as error:
            return error


class Alone:
    """The exchange of a single process; see `Exchange`."""

    rank, size = 0, 1

    def tell(self, about: str, said: Any) -> list[Any]:
        """The value of the only rank."""
        del about
        return [said]

    def everyone(self, mine: Any) -> list[Any]:
        """The value of the only rank."""
        return [mine]

    def together(self, do: Callable[[], _T], other: Callable[[str], MemascendError] = ConfigError) -> _T:
        """Call `do`."""
        del other
        return do()


def exchange_of(sharding: Sharding | None) -> Exchange | Alone:
    """The exchange between the ranks of a model; for a single rank, and for one process, that of one."""
    return Alone() if sharding is None or sharding.exchange is None else sharding.exchange


def _named(ranks: Iterable[int]) -> str:
    return "rank " + ", rank ".join(map(str, sorted(ranks)))


def shortened(error: BaseException) -> str:
    """The text of an error as other ranks get it."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "..."


_IDENTITY_BYTES = 16
# What to do after a commit of which some ranks may have the root.
_UNKNOWN = "some ranks may have the step: start all of them again, and the run resumes at the last that all have"


@dataclass(eq=False)
class Agreement:
    """The commits of one run that several ranks make together.

    No rank stages a step before all have written the root of the step before. So ranks are never more than one commit
    apart, and the two slots of each store hold the newest commit that all ranks have.
    """

    exchange: Exchange
    store: Store  # of this rank; all else is the same on all ranks
    run: bytes  # the run's id, 16 bytes
    number: int  # of the last commit; 0 before the first
    identity: bytes  # of the last commit, or of the commit that first values are from
    nonce: bytes  # drawn at this opening: commits of another opening of the same stores have other identities
    layout: Layout
    # Number and identity of commits that this rank makes alone, to fill its store; None: all make them.
    _own: tuple[int, bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.store.share(self)

    def alone(self, number: int, identity: bytes) -> None:
        """Let this rank alone make the next commits, of this number and identity, until `together`."""
        self._own = number, identity

    def together(self) -> None:
        """Let all ranks make later commits."""
        self._own = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around the work before a commit: if this rank fails, the others are notified instead of waiting."""
        try:
            with self.exchange.part():
                yield
        except BaseException:
            if self.exchange.broken is not None:
                # Reopening finds the newest commit that all ranks have.
                self.store.end()
            raise

    def commit(self, make: Callable[[CommitOfRank, Callable[[], object]], int]) -> int:
        """Make a commit on all ranks, or on none.

        Raises:
            RankError: a rank failed. If it reported this before any root was written, the step can be discarded and
                tried again on all ranks. Otherwise no rank commits any more, not by `close()` either.
        """
        if self._own is not None:
            return make((self.run, *self._own, self.exchange.rank, self.layout.shards), lambda: None)
        number = self.number + 1
        said = self.identity + self.nonce + number.to_bytes(8, "little")
        identity = hashlib.blake2b(said, digest_size=_IDENTITY_BYTES).digest()
        agreed = False

        def agree() -> None:
            nonlocal agreed
            self._require_equal(self._ask("staged", [number, self.store.digest()], DISCARDED))
            agreed = True

        with self.step():
            try:
                generation = make((self.run, number, identity, self.exchange.rank, self.layout.shards), agree)
                self._ask("written", [number, 0], _UNKNOWN)
            except BaseException:
                if agreed:
                    # Roots were being written when a rank failed: reopening finds out which ranks have the commit.
                    self.store.end()
                raise
        self.number, self.identity = number, identity
        return generation

    def _ask(self, phase: str, said: list[int], remedy: str) -> list[int]:
        """The digests of all ranks, which must be at the same commit."""
        told = self.exchange.tell(phase, said, remedy=remedy)
        apart = {rank: other for rank, (other, _) in enumerate(told) if other != said[0]}
        if apart:
            self.store.end()
            raise RankError(f"commit {said[0]} of rank {self.exchange.rank} meets others: {apart}", ranks=tuple(apart))
        return [digest for _, digest in told]

    def _require_equal(self, digests: list[int]) -> None:
        """Reject a commit for which ranks with the same rows have computed other values: their stores would part."""
        shards = self.layout.shards
        apart = tuple(rank for rank, digest in enumerate(digests) if digest != digests[rank % shards])
        if apart:
            first = apart[0] % shards
            raise RankError(
                f"{_named(apart)} computed other values than rank {first}, which has the same rows, from the same "
                "gradients: give all replicas the same learning rates and other options, one version of torch and "
                f"processors of one kind; {DISCARDED}",
                ranks=apart,
            )
