"""Exchanges short messages between all ranks: each hears every other one, or which one is gone and why."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.errors import RankError
from memascend.ranks.groups import at_fault, left_by, let_go, make_group

if TYPE_CHECKING:
    from collections.abc import Iterable

# The way on after a step that no rank has committed.
DISCARDED = "the step is discarded on all ranks: call zero_grad() on each, and go on"

# Bytes of a message that is sent as one: a few numbers, and the text of an error. What is longer follows.
_MESSAGE_BYTES = 4096
# In front of it: how many bytes there are in all.
_LENGTH_BYTES = 8
_TEXT_CHARACTERS_MAX = 600
# How often a wait for others looks whether somebody pressed Ctrl-C.
_LOOK_SECONDS = 0.05
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
                "the step ended on all ranks, and none commits any more: start all of them again, and the run goes on "
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
                talk.join(_LOOK_SECONDS)
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
            f"commits any more; start all of them again, and the run goes on at the last step of all ({reasons})",
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
