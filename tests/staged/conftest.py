"""Makes every `offload()` here compute on the fake device."""

import pytest
import torch
from staged.fake import Fake

from memascend.device import device
from memascend.planning import options as config


@pytest.fixture
def fake(monkeypatch):
    made = Fake(fills=0.05)
    monkeypatch.setattr(device, "open_device", lambda _: made)
    # Whatever a call asks for, it is asked of this one.
    monkeypatch.setattr(config.Options, "where", torch.device("cuda"))
    yield made
    made.end()
