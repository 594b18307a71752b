"""Tests which unit leaves memory for another."""

import pytest
import torch

from memascend.params.resident_units import Order, victim_for
from memascend.params.unit import Home

SLOT = 4096


def units(count=4):
    """Resident units of one size, which a step uses one after the other."""
    order = Order()
    order.expect(range(count))
    homes = [Home(index, f"unit {index}", SLOT, SLOT, pinned=False) for index in range(count)]
    for home in homes[1:]:
        home.base = torch.empty(0)
    return homes, order


def test_the_one_whose_next_use_is_farthest_leaves():
    homes, order = units()
    assert victim_for(homes[0], homes, order, None, must=True) is homes[3]


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("why", ["bound", "pinned", "current", "of another size"])
def test_one_that_is_in_use_stays_though_it_is_used_last(must, why):
    homes, order = units()
    last = homes[3]
    if why == "bound":
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
    homes[0].base, homes[3].base = torch.empty(0), None
    assert victim_for(homes[3], homes, order, None, must=False) is None
    assert victim_for(homes[3], homes, order, None, must=True) is homes[2]
