"""Tests what is left of a unit whose read failed."""

import pytest
import torch

from memascend.params.unit import Bytes, Home


class FailingRead:
    """A read whose bytes are not what was written."""

    def wait(self):
        raise ValueError("checksum")


def test_a_read_that_fails_leaves_nothing():
    home = Home(0, "unit", 0, 4096, pinned=False)
    home.begin_read(FailingRead(), torch.empty(0))
    with pytest.raises(ValueError, match="checksum"):
        home.arrive()
    assert home.state is Bytes.OFFLOADED
    assert home.read is None
    home.begin_read(FailingRead(), torch.empty(0))
