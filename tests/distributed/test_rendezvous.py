"""Tests how ranks agree on fresh keys in a store that an earlier attempt has used, and which hosts they reject."""

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


@pytest.mark.parametrize(("address", "is_rejected"), [("127.0.1.1", True), ("::1", True), ("10.0.0.2", False)])
def test_a_host_that_others_cannot_reach_is_named_on_all_ranks(monkeypatch, address, is_rejected):
    hosts = iter(range(3))

    def host():
        number = next(hosts)
        own = address if number else "10.0.0.1"
        return {
            "host": f"host-{min(number, 1)}",
            "name": f"n{number}",
            "address": own,
            "interface": "eth7",
            "named": False,
        }

    monkeypatch.setattr(rendezvous, "_this_host", host)
    found = meet_all(distributed.HashStore(), range(3))
    if not is_rejected:
        assert len(set(found.values())) == 1
        return
    for error in found.values():
        assert isinstance(error, ConfigError), error
        assert f"rank 1 on n1 would give the address {address}: set GLOO_SOCKET_IFNAME=eth7 there" in str(error)
        assert "on n0 " not in str(error)


def test_the_address_of_gloo_is_that_of_the_hosts_name_or_of_the_interface_that_is_named(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    # As torch's fallback.
    assert rendezvous._address_of_gloo() == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    assert rendezvous._address_of_gloo() == "127.0.1.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert rendezvous._address_of_gloo() == "127.0.0.1"
