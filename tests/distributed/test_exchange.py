"""Tests the rendezvous of ranks, the exchange of messages and commits, and errors that name missing ranks."""

import contextlib
import functools
import json
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.rank_models import position
from support.ranks import on_ranks, ranks
from torch import distributed

from memascend.distributed import collectives, control_plane, groups, rendezvous
from memascend.distributed.agreement import Agreement
from memascend.distributed.collectives import Collectives
from memascend.distributed.control_plane import Exchange
from memascend.distributed.reshard import Passed, Transfer
from memascend.distributed.rows import Layout
from memascend.errors import ConfigError, RankError, UsageError

TIMEOUT = 8.0


def agrees(_):
    """Exchanges values between all ranks, and adds integers exactly, even integers that do not fit into a `Word`."""
    exchange, (rank, count) = Exchange(TIMEOUT), position()
    assert exchange.all_gather("the same", ["one", None, 1.5]) == [["one", None, 1.5]] * count
    # The first number and its sum over the ranks fit into a `Word`. The second number fits, but its sum does not. The
    # third number does not fit.
    for number in (1 << 700, 6 * 10**458, 1 << 7000):
        sums, more = exchange.add([rank, number]), exchange.add([-1])
        exchange.all_gather("the same", None)
        assert (sums, more) == ([sum(range(count)), count * number], [-count])
    assert exchange.all_gather("others", rank) == [*range(count)]
    exchange.close()


@pytest.mark.parametrize("count", [2, 5])
def test_exchange_gathers_values_and_adds_integers_exactly(tmp_path, count):
    on_ranks(count, agrees, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False])
@ranks(7)
def test_late_or_missing_rank_is_named_on_all_ranks(folder, hangs):  # noqa: ARG001
    """Rank 3 is late or does not come. All other ranks, and a late rank 3, must name rank 3 in their errors.

    The other ranks arrive in time, but at different times.
    """
    rank, exchange = distributed.get_rank(), Exchange(TIMEOUT)
    began = time.monotonic()
    # Rank 0 has waited for half of the timeout when rank 6 arrives. Even if rank 3 is only late, so that every message
    # arrives in the end, all ranks must raise an error.
    time.sleep(TIMEOUT * ((2.5 if hangs else 0.83) if rank == 3 else rank / 12))
    if rank == 3 and hangs:
        return
    with pytest.raises(RankError) as raised:
        exchange.all_gather("a step", None)
    assert raised.value.ranks == (3,), raised.value
    assert time.monotonic() - began < TIMEOUT * (1 + rank / 12) + 2


@pytest.mark.parametrize(
    ("digests", "apart"), [([1, 2, 1, 2, 1, 2], ()), ([1, 1, 2, 1, 1, 1], (2,)), ([1, 2, 2, 1, 1, 2], (2, 3))]
)
@ranks(6)
def test_commit_fails_on_all_ranks_if_replicas_stage_different_values(folder, digests, apart):  # noqa: ARG001
    """Three ranks stage each row.

    If digests differ, the error on each rank names the ranks whose digest differs from the first replica's digest.
    """
    rank, exchange = distributed.get_rank(), Exchange(TIMEOUT)
    store = SimpleNamespace(share=lambda _: None, end=lambda: None, digest=lambda: digests[rank])
    agreement = Agreement(exchange, store, b"", 0, b"", b"", Layout(rank, len(digests) // 2, 2))
    try:
        if apart:
            with pytest.raises(RankError, match="computed other values") as raised:
                agreement.commit(lambda _, agree: agree() or 1)
            assert raised.value.ranks == apart
        else:
            agreement.commit(lambda _, agree: agree() or 1)
            assert agreement.number == 1
    finally:
        # `close` waits until this rank's last message is sent. Without `close`, the process might end before the
        # message is sent.
        exchange.close()


@pytest.mark.parametrize("arrived", [True, False])
def test_received_message_counts_after_its_sender_disconnects(monkeypatch, arrived):
    """When a connection closes, gloo's `wait` may raise although the message has arrived.

    The message must count if it has arrived completely, and only then.
    """
    text = control_plane._padded('[1, "value", null, "first", [], 0.0]')

    class Work:
        def __init__(self, room):
            self.room = room

        def wait(self, _):
            if self.room is not None:
                count = text.numel() if arrived else text.numel() // 2
                self.room[:count] = text[:count]
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "irecv", lambda room, *_, **__: Work(room))
    monkeypatch.setattr(distributed, "isend", lambda *_, **__: Work(None))
    exchange, lost, room = object.__new__(Exchange), {}, control_plane._room()
    exchange._move(None, {1: room}, {1: text}, lost, time.monotonic() + 1)
    assert lost == ({} if arrived else {1: "its process or its connection ended"})
    exchange.timeout = TIMEOUT
    monkeypatch.setattr(control_plane, "Word", lambda *words: words)
    lost_word = control_plane._LOST_WORD
    assert (exchange._received(None, 1) == lost_word) is not arrived


# --- missing ranks, and ranks that left because of other ranks -----------------------------------------

SECONDS = 60.0


class Words:
    """Stands in for torch's store. The store has a note of each rank that left.

    `notes` maps each rank that left to the ranks that its note blames. `late` are ranks whose notes are missing at the
    first `check`.
    """

    def __init__(self, notes, late=()):
        self.notes = {f"keys/0/left/{rank}": json.dumps(blamed) for rank, blamed in notes.items()}
        self.late = {f"keys/0/left/{rank}" for rank in late}

    def check(self, keys):
        (key,) = keys
        found = key in self.notes and key not in self.late
        self.late.discard(key)
        return found

    def get(self, key):
        return self.notes[key].encode()


@pytest.fixture
def rank_0_of_5(monkeypatch):
    """Returns a function that makes the `Meeting` of rank 0 with four other ranks.

    The function's argument stands in for torch's store.
    """
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 5)
    monkeypatch.setattr(groups, "meet", lambda *_: "keys/0")

    def meeting(store):
        monkeypatch.setattr(groups, "_store", lambda: store)
        monkeypatch.setattr(distributed.distributed_c10d._world, "group_count", 0)
        return groups.Meeting(SECONDS)

    return meeting


@pytest.mark.parametrize(
    ("missing", "notes", "named"),
    [
        ([1, 2], {}, (1, 2)),
        ([1, 2], {2: [1]}, (1,)),
        ([2], {2: [1]}, (1,)),
        # Rank 3 left because of rank 2, and rank 2 because of rank 1.
        ([3], {3: [2], 2: [1]}, (1,)),
        # Rank 2 also blames rank 0, which was late.
        ([1, 2], {2: [0, 1]}, (1,)),
        ([2], {2: [0]}, (2,)),
        # Ranks 2 and 3 blame each other.
        ([1, 2, 3], {2: [1, 3], 3: [1, 2]}, (1,)),
        ([2, 3], {2: [3], 3: [2]}, (2, 3)),
        ([1, 2], {2: []}, (1,)),
    ],
)
def test_rank_that_left_because_of_another_rank_is_not_named(rank_0_of_5, missing, notes, named):
    assert rank_0_of_5(Words(notes)).at_fault(missing) == named
    # The note of a rank may arrive shortly after the rank's connection is closed.
    assert rank_0_of_5(Words(notes, late=notes)).at_fault(missing) == named


def hang(over):
    return lambda *_: over.wait(SECONDS)


def test_missing_ranks_are_named_if_the_store_is_gone_or_hangs(rank_0_of_5):
    over, gone, hanging = threading.Event(), Words({2: [1]}), Words({2: [1]})
    gone.check, hanging.check = Mock(side_effect=RuntimeError("connection reset")), hang(over)
    for store in (gone, hanging):
        assert rank_0_of_5(store).at_fault([1, 2]) == (1, 2)
    over.set()


def test_make_group_times_out_if_the_store_hangs(rank_0_of_5):
    """Torch's store is in the process of rank 0. If this process hangs, the store does not answer."""
    over = threading.Event()
    store = Mock(**dict.fromkeys(("check", "get", "set", "add", "wait"), hang(over)))
    with pytest.raises(
        RankError, match=r"a rank, or the process of torch's store, is gone.* does not answer: no answer within 0\.6 s"
    ):
        rank_0_of_5(store).make_group(0.1)
    over.set()


@ranks(3)
def test_error_blames_the_dead_rank_and_not_the_rank_that_left_after_it(folder):
    """Rank 1 sends its message only to rank 0, and leaves once rank 0 has received the message.

    Rank 2 never gets the message of rank 1, and leaves as well. Ranks 1 and 2 leave before rank 0 calls
    `all_gather("second")`.
    """
    rank, exchange = distributed.get_rank(), Exchange(SECONDS)
    if rank == 0:
        assert exchange.all_gather("first", rank) == [0, 1, 2]
        Path(folder, "heard").touch()
        _await(folder, "left-1", "left-2")
        with pytest.raises(RankError, match=r"(?s)^rank 1 did not take part.*2: it ended because of rank 1") as raised:
            exchange.all_gather("second", rank)
        assert raised.value.ranks == (1,)
    else:
        move = exchange._move
        if rank == 1:

            def moved(*given):
                exchange._move = move
                # Rank 1 sends its message to rank 0 alone.
                move(given[0], *({0: each[0]} for each in given[1:3]), *given[3:])

            exchange._move = moved
        with contextlib.suppress(RankError, KeyError):
            exchange.all_gather("first", rank)
        _await(folder, *(["heard"] if rank == 1 else []))
    exchange.close()
    Path(folder, f"left-{rank}").touch()
    # All processes stay alive until rank 0 is done, so no connection closes because a process ends.
    _await(folder, "left-0")


def _await(folder, *names):
    until = time.monotonic() + SECONDS
    while not all(Path(folder, name).exists() for name in names):
        assert time.monotonic() < until, names
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["gather", "move"])
@ranks(4)
def test_rank_lost_in_a_collective_is_named_on_all_ranks(folder, kind):
    """Rank 3 leaves, and all other ranks must name rank 3 in their errors.

    With "gather", rank 1 is not a neighbour of rank 3 in gloo's ring, so other ranks must notify rank 1. No process
    ends before all ranks have closed their groups.
    """
    rank, exchange = distributed.get_rank(), Exchange(SECONDS)
    if kind == "move":
        part = Transfer(exchange)
        pieces = [Passed(rank, to, torch.zeros(4), torch.zeros(4) if to == rank else None) for to in range(4)]
        pieces += [Passed(of, rank, None, torch.zeros(4)) for of in range(4) if of != rank]
        work = functools.partial(part.move, pieces)
    else:
        part = Collectives(exchange, Layout(rank, 1, 4), torch.device("cpu"))
        gather = functools.partial(distributed.all_gather_into_tensor, torch.zeros(16), torch.zeros(4))
        work = functools.partial(part.meet, "a gather", None, gather)
    if rank != 3:
        with pytest.raises(RankError) as raised:
            work()
        assert raised.value.ranks == (3,)
    part.close()
    exchange.close()
    Path(folder, f"left-{rank}").touch()
    _await(folder, *(f"left-{other}" for other in range(4)))


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        (["a", "b"], ["a", "c"], "where rank 0 has b, rank 1 has c"),
        (["a", "b"], ["a"], "where rank 0 has b, rank 1 has nothing more"),
        (["a", "b", "c"], ["a", "b", "d"], "their gathers and reductions differ after the first 2"),
    ],
)
def test_error_names_the_first_gathers_that_differ(monkeypatch, own, other, message):
    monkeypatch.setattr(collectives, "_NAMES_MAX", 2)
    both, gathered = [], []
    exchange = SimpleNamespace(rank=0, size=2, all_gather=lambda *_: gathered)
    for names in (own, other):
        each = Collectives(exchange, Layout(0, 1, 2), torch.device("cuda"))
        for name in names:
            each.note(name)
        both.append((each, each.take_checksum()))
        gathered.append(each._last)
    with pytest.raises(UsageError, match=message):
        both[0][0].require_same([checksum for _, checksum in both])


# --- fresh keys in a store that an earlier attempt has used, and addresses of hosts --------------------


def meet_all(store, ranks, count=3, seconds=SECONDS):
    """Calls `rendezvous.meet` for each of `ranks` in a separate thread, and starts the threads one after the other.

    Returns the key prefix or the error of each rank.
    """
    found = {}

    def run(rank):
        try:
            found[rank] = rendezvous.meet(store, rank, count, seconds)
        except (RankError, ConfigError) as error:
            found[rank] = error

    threads = []
    for rank in ranks:
        threads.append(threading.Thread(target=run, args=(rank,)))
        threads[-1].start()
        # Waits, so that the ranks that have started look at the store before the next rank writes its keys.
        time.sleep(5 * rendezvous.LOOK_SECONDS)
    for thread in threads:
        thread.join()
    return found


def test_each_rendezvous_attempt_uses_a_new_key_prefix():
    store, prefixes = distributed.HashStore(), []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        found = meet_all(store, order)
        assert len(set(found.values())) == 1, found
        prefixes.append(found[0])
    assert len(set(prefixes)) == 3


def test_rendezvous_names_a_missing_rank_that_joined_an_earlier_attempt():
    store = distributed.HashStore()
    for _ in range(2):
        for error in meet_all(store, (0, 2), seconds=0.5).values():
            assert error.ranks == (1,), error
            assert "rank 1 is gone, or did not come within 0.5 s" in str(error)
        meet_all(store, (0, 1, 2))


@pytest.mark.parametrize(("address", "hosts"), [("127.0.1.1", 2), ("::1", 2), ("127.0.1.1", 1), ("", 2)])
def test_host_with_a_loopback_address_is_named_on_all_ranks(monkeypatch, address, hosts):
    numbers = iter(range(3))

    def host():
        number = next(numbers)
        own = {"loopback": address if number else "", "interface": "eth7"}
        return {"host": min(number, hosts - 1), "name": f"n{number}", **own}

    monkeypatch.setattr(rendezvous, "_this_host", host)
    found = meet_all(distributed.HashStore(), range(3))
    if hosts == 1 or not address:
        assert len(set(found.values())) == 1
        return
    for error in found.values():
        assert isinstance(error, ConfigError), error
        assert f"rank 1 on n1 would give the address {address}: set GLOO_SOCKET_IFNAME=eth7 there" in str(error)
        assert "on n0 " not in str(error)


@pytest.mark.parametrize(
    ("name", "interfaces", "loopback"),
    [
        # torch falls back to 127.0.0.1 for a name that does not resolve.
        ("no-such-host.invalid", None, "127.0.0.1"),
        ("127.0.1.1", None, "127.0.1.1"),
        ("127.0.1.1", "lo,eth7", "127.0.0.1"),
        ("127.0.1.1", "eth7,lo", ""),
        ("0.0.0.0", None, ""),  # noqa: S104 - no socket listens on it
    ],
)
def test_loopback_check_uses_the_host_name_or_the_gloo_interface(monkeypatch, name, interfaces, loopback):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interfaces is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert rendezvous._loopback() == loopback


@pytest.mark.parametrize("most", [100, 4096])
def test_the_limit_of_open_files_is_raised_or_named_on_all_ranks(monkeypatch, most):
    limits = [(64, most)]
    monkeypatch.setattr(rendezvous.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(rendezvous.resource, "setrlimit", lambda _, limit: limits.append(limit))
    found = meet_all(distributed.HashStore(), range(3))
    if most == 4096:
        assert len(set(found.values())) == 1
        assert 64 < limits[-1][0] < most
        assert limits[-1][1] == most
        return
    assert limits == [(64, 100)]
    for error in found.values():
        assert isinstance(error, ConfigError), error
        assert re.search(
            r"a process may have only 100 files open here: run `ulimit -Hn \d+ && ulimit -n \d+`", str(error)
        )
