"""Tests that one process needs nothing of FSDP2, and that a torch that changed it is told by name."""

import contextlib
import sys

import pytest
import torch.distributed.fsdp
from torch import nn

from memascend import ConfigError
from memascend.distributed import setup
from memascend.plan.options import Options


@pytest.fixture
def changed(monkeypatch):
    """A torch without the private names that are used."""
    for name in ("memascend.distributed.fsdp", "memascend.distributed.sharding"):
        monkeypatch.setitem(sys.modules, name, None)


def begin():
    model = nn.Linear(2, 2)
    with contextlib.ExitStack() as undo:
        return setup.begin(model, torch.optim.SGD(model.parameters()), Options(), undo)


@pytest.mark.usefixtures("changed")
def test_one_process_needs_nothing_of_it():
    assert begin()[0] is None


@pytest.mark.usefixtures("changed")
def test_a_torch_that_changed_it_is_told(monkeypatch):
    monkeypatch.setattr(setup, "_is_sharded", lambda _: True)
    with pytest.raises(ConfigError, match=r"torch .* in another way"):
        begin()
