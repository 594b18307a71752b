"""Tests how ranks agree on fresh keys in a store that an earlier attempt has used, and which hosts they reject."""

import re
import socket
import threading
import time

import pytest
from torch import distributed

from memascend.distributed import rendezvous
from memascend.errors import ConfigError, RankError

SECONDS = 60.0


def meet_all(store, ranks, count=3, seconds=SECONDS):
    """What each of these ranks gets, which come one after the other: a prefix, or its error."""
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
        # The others look at the keys of the attempt before meanwhile.
        time.sleep(5 * rendezvous.LOOK_SECONDS)
    for thread in threads:
        thread.join()
    return found


def test_each_attempt_has_keys_of_its_own():
    store, prefixes = distributed.HashStore(), []
    for ranks in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        found = meet_all(store, ranks)
        assert len(set(found.values())) == 1, found
        prefixes.append(found[0])
    assert len(set(prefixes)) == 3


def test_a_rank_that_does_not_come_is_named_though_an_earlier_attempt_had_it():
    store = distributed.HashStore()
    for _ in range(2):
        for error in meet_all(store, (0, 2), seconds=0.5).values():
            assert error.ranks == (1,), error
            assert "rank 1 is gone, or did not come within 0.5 s" in str(error)
        meet_all(store, (0, 1, 2))


@pytest.mark.parametrize(("address", "hosts"), [("127.0.1.1", 2), ("::1", 2), ("127.0.1.1", 1), ("", 2)])
def test_a_host_that_others_cannot_reach_is_named_on_all_ranks(monkeypatch, address, hosts):
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
        # As torch's fallback.
        ("no-such-host.invalid", None, "127.0.0.1"),
        ("127.0.1.1", None, "127.0.1.1"),
        ("127.0.1.1", "lo,eth7", "127.0.0.1"),
        ("127.0.1.1", "eth7,lo", ""),
        ("0.0.0.0", None, ""),  # noqa: S104 - only its address is looked up
    ],
)
def test_the_address_of_gloo_is_that_of_the_hosts_name_or_of_the_interface(monkeypatch, name, interfaces, loopback):
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
        assert re.search(r"a process may have 100 files open here: run `ulimit -Hn \d+ && ulimit -n \d+`", str(error))
