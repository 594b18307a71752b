"""Makes groups of ranks, names ranks that are missing, and moves rows through a group, extent by extent."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import distributed

from memascend.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


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

    @classmethod
    def take(cls) -> int:
        """The number of a group that is made now."""
        cls.number += 1
        return cls.number - 1


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
    number, group, why = _Next.take(), None, "it did not come"
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


_PIECE, _END, _FAILED = range(3)
_GO_ON, _STOP = range(2)


class StoppedError(Exception):
    """The first rank wants no more: something failed there, or on another rank, which all hear of afterwards."""


class Piece(NamedTuple):
    """Some elements of a tensor that both sides know."""

    tensor: int  # its number
    start: int  # its first element
    values: torch.Tensor  # the elements, on memory that is taken again for the next piece


class Line:
    """What goes from each rank to the first one, over a group of gloo of its own.

    A rank sends pieces and then an end, as often as both sides know. Each is answered, so that nobody is sent more than
    it has room for, and who sends hears that it is enough. What fails on one side leaves no rank waiting.
    """

    def __init__(self, timeout: float) -> None:
        """Make the group; all ranks do so together. `timeout` is how many seconds one waits for another."""
        self._timeout = timeout
        self._group: Any = make_group(timeout)
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        # Of the ranks that send: those that sent their last, could not go on, or are gone.
        self._over: set[int] = set()
        self.broken: RankError | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Let the group go."""
        group, self._group = self._group, None
        let_go(group)

    # --- on each rank but the first ------------------------------------------------------

    def send(self, tensor: int, start: int, values: torch.Tensor) -> None:
        """Send elements of a tensor.

        Raises:
            StoppedError: no more is wanted.
        """
        self._tell([_PIECE, tensor, start, values.nbytes])
        if values.nbytes:
            self._waited(0, lambda: distributed.isend(bytes_of(values), 0, group=self._group))
        self._hear_answer()

    def end(self) -> None:
        """What belongs together was sent.

        Raises:
            StoppedError: no more is wanted.
        """
        self._tell([_END, 0, 0, 0])
        self._hear_answer()

    def fail(self) -> None:
        """Say that this rank cannot go on; what failed, all hear afterwards."""
        self._tell([_FAILED, 0, 0, 0])

    def _tell(self, header: list[int]) -> None:
        self._waited(0, lambda: distributed.isend(torch.tensor(header), 0, group=self._group))

    def _hear_answer(self) -> None:
        answer = torch.empty(1, dtype=torch.int64)
        self._waited(0, lambda: distributed.irecv(answer, 0, group=self._group))
        if answer.item() == _STOP:
            raise StoppedError

    # --- on the first rank -----------------------------------------------------------------

    def pieces(self, rank: int, dtypes: list[torch.dtype]) -> Iterator[Piece]:
        """What a rank sends up to its next end; `dtypes` are those of the tensors that both sides know.

        Raises:
            StoppedError: that rank could not go on.
        """
        while True:
            kind, tensor, start, values = self._received(rank)
            if kind == _FAILED:
                self._over.add(rank)
                raise StoppedError
            self._answer(rank, _GO_ON)
            if kind == _END:
                return
            yield Piece(tensor, start, values.view(dtypes[tensor]))

    def finish(self) -> None:
        """Hear the last end of each rank, after which it sends no more.

        Raises:
            StoppedError: a rank could not go on.
        """
        for rank in range(1, self.world_size):
            for _ in self.pieces(rank, []):
                pass
            self._over.add(rank)
        self._over.clear()

    def stop(self) -> None:
        """Tell all who still send that it is enough."""
        for rank in range(1, self.world_size):
            if rank in self._over:
                continue
            with contextlib.suppress(RankError):
                kind, *_ = self._received(rank)
                if kind != _FAILED:
                    self._answer(rank, _STOP)
        self._over.clear()

    def _received(self, rank: int) -> tuple[int, int, int, torch.Tensor]:
        header = torch.empty(4, dtype=torch.int64)
        self._waited(rank, lambda: distributed.irecv(header, rank, group=self._group))
        kind, tensor, start, nbytes = header.tolist()
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        values = self._memory[:nbytes]
        if nbytes:
            self._waited(rank, lambda: distributed.irecv(values, rank, group=self._group))
        return kind, tensor, start, values

    def _answer(self, rank: int, answer: int) -> None:
        self._waited(rank, lambda: distributed.isend(torch.tensor([answer]), rank, group=self._group))

    def _waited(self, rank: int, begin: Callable[[], Any]) -> None:
        """Begin to send or receive, and wait for it."""
        try:
            begin().wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            self._over.add(rank)
            self.broken = RankError(
                f"rank {rank} is gone, or did not answer within {self._timeout:g} s, while rows were gathered; what "
                f"is committed is as it was ({error})",
                ranks=(rank,),
            )
            raise self.broken from error
