"""Tests what is left of a unit that left memory, or never came."""

import pytest
import torch

from memascend.params.unit import Bytes, Home

SLOT = 4096


class Read:
    """A read that is over."""

    def wait(self):
        return 1

    def done(self):
        return True


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
        home.begin_read(Read(), torch.empty(0))
        home.arrive()
        kept = home.base
        home.leave()
        end(home)
        assert not home.adopt()
        del kept
