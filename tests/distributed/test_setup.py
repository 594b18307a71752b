"""Tests that one process needs nothing of FSDP2, and that a torch that changed it is named."""

import contextlib
import sys

import pytest
import torch.distributed.fsdp
from torch import nn

from memascend import ConfigError
from memascend.distributed import setup
from memascend.plan.options import Options


def begin():
    model = nn.Linear(2, 2)
    with contextlib.ExitStack() as undo:
        return setup.begin(model, torch.optim.SGD(model.parameters()), Options(), undo)


def test_a_torch_without_the_private_names_is_named_on_ranks_alone(monkeypatch):
    for name in ("memascend.distributed.fsdp", "memascend.distributed.sharding"):
        monkeypatch.setitem(sys.modules, name, None)
    assert begin()[0] is None
    monkeypatch.setattr(setup, "_is_sharded", lambda _: True)
    with pytest.raises(ConfigError, match=r"torch .* in another way"):
        begin()
