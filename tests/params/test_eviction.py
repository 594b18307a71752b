"""Tests which unit leaves memory for another."""

import pytest
import torch

from memascend.params.cached_units import Order, victim_for
from memascend.params.unit import Bytes, Home

SLOT = 4096


class Read:
    """A read that is over."""

    def wait(self):
        return 1

    def done(self):
        return True


def cached(home):
    """Let a unit have its bytes in memory."""
    home.begin_read(Read(), torch.empty(0))
    home.arrive()


def units(count=4):
    """Cached units of one size, which a step uses one after the other."""
    order = Order()
    order.expect(range(count))
    homes = [Home(index, f"unit {index}", SLOT, SLOT, pinned=False) for index in range(count)]
    for home in homes[1:]:
        cached(home)
    return homes, order


def test_the_one_whose_next_use_is_farthest_leaves():
    homes, order = units()
    assert victim_for(homes[0], homes, order, None, must=True) is homes[3]


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("why", ["materialized", "pinned", "current", "of another size"])
def test_one_that_is_in_use_stays_though_it_is_used_last(must, why):
    homes, order = units()
    last = homes[3]
    if why == "materialized":
        last.count(1, 1)
    elif why == "pinned":
        last.pinned = True
    elif why == "of another size":
        last.slot_bytes = 2 * SLOT
    current = last if why == "current" else None
    assert victim_for(homes[0], homes, order, current, must=must) is homes[2]


def test_nothing_leaves_where_all_are_in_use():
    homes, order = units()
    for home in homes:
        home.count(1, 1)
    assert victim_for(homes[0], homes, order, None, must=True) is None


def test_one_that_is_used_before_it_leaves_only_if_it_must():
    homes, order = units()
    cached(homes[0])
    homes[3].leave()
    assert victim_for(homes[3], homes, order, None, must=False) is None
    assert victim_for(homes[3], homes, order, None, must=True) is homes[2]


class FailingRead(Read):
    """A read whose bytes are not what was written."""

    def wait(self):
        raise ValueError("checksum")


def test_a_read_that_fails_leaves_nothing():
    home = Home(0, "unit", 0, SLOT, pinned=False)
    home.begin_read(FailingRead(), torch.empty(0))
    with pytest.raises(ValueError, match="checksum"):
        home.arrive()
    assert home.state is Bytes.OFFLOADED
    assert home.read is None
    home.begin_read(Read(), torch.empty(0))


def test_bytes_of_older_values_are_not_taken_again():
    for end in (Home.train, Home.forget):
        home = Home(0, "unit", 0, SLOT, pinned=False)
        cached(home)
        kept = home.base
        home.leave()
        end(home)
        assert not home.adopt()
        del kept
