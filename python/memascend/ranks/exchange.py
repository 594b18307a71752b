"""Exchanges short messages between all ranks: each hears every other one, or which one is gone and why."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from memascend.errors import RankError

__all__ = ["Exchange"]

# Bytes of a message: a few numbers, and the text of an error.
_MESSAGE_BYTES = 4096
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
        self._group: Any = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self.broken: RankError | None = None
        self._count = 0

    def tell(self, about: str, said: Any) -> list[Any]:
        """Send `said` to all others, and return what each rank said, by rank, once all of them have heard this one.

        Args:
            about: what for: all ranks must talk of the same.
            said: a small JSON value.

        Raises:
            RankError: a rank did not answer in time, is gone, or speaks of something else.
        """
        if self.broken is not None:
            raise self.broken
        self._count += 1
        heard: dict[int, dict[str, Any]] = {}
        lost: dict[int, str] = {}
        message = {"count": self._count, "about": about, "said": said}
        talk = threading.Thread(target=self._talk, args=(_encoded(message), heard, lost), daemon=True)
        talk.start()
        try:
            while talk.is_alive():
                talk.join(_LOOK_SECONDS)
        except BaseException:
            self.broken = RankError(f"rank {self.rank} was interrupted while all ranks talked", ranks=(self.rank,))
            raise
        strange = {
            rank: f"it is at message {one['count']}, {one['about']!r}, and this one, {self.rank}, at {self._count}: "
            "every rank must make the same calls"
            for rank, one in heard.items()
            if (one["count"], one["about"]) != (self._count, about)
        }
        if lost or strange:
            self.broken = self._gone(lost or strange, about)
            raise self.broken
        return [said if rank == self.rank else heard[rank]["said"] for rank in range(self.size)]

    def close(self) -> None:
        """Let the group go; only where all ranks do so."""
        if self.broken is None:
            distributed.destroy_process_group(self._group)
            self.broken = RankError("the ranks do not talk any more: the run was closed", ranks=())

    def _gone(self, lost: dict[int, str], about: str) -> RankError:
        if len(self._others) > 1 and len(lost) == len(self._others):
            named = "every other rank is gone: this one came too late, or its network failed"
        else:
            named = "rank " + ", rank ".join(map(str, sorted(lost)))
        reasons = "; ".join(f"{rank}: {why}" for rank, why in sorted(lost.items()))
        return RankError(
            f"{named} did not take part within {self.timeout:g} s ({about}): the step ended on all ranks, and none "
            f"commits any more; start all of them again, and the run goes on at the last step of all ({reasons})",
            ranks=tuple(sorted(lost)),
        )

    def _talk(self, message: torch.Tensor, heard: dict[int, dict[str, Any]], lost: dict[int, str]) -> None:
        """Fill `heard` and `lost`; a thread of its own, as gloo's waits do not look at signals."""
        until = time.monotonic() + self.timeout
        rooms = {rank: torch.empty(_MESSAGE_BYTES, dtype=torch.uint8) for rank in self._others}
        receiving: _Works = {rank: self._begun(distributed.irecv, rooms[rank], rank) for rank in self._others}
        sending: _Works = {rank: self._begun(distributed.isend, message, rank) for rank in self._others}
        for works in (receiving, sending):
            for rank, work in works.items():
                why = _waited(work, until)
                if why is not None:
                    lost.setdefault(rank, why)
                elif works is receiving:
                    heard[rank] = _decoded(rooms[rank])

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
    if len(text) > _MESSAGE_BYTES:
        raise ValueError(f"a message of {len(text)} bytes, at most {_MESSAGE_BYTES} are sent")
    return torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)


def _decoded(memory: torch.Tensor) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(bytes(memory.tolist()))
    return message


def shortened(error: BaseException) -> str:
    """An error as others are told of it."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "..."
