"""Every `offload()` here computes on the fake device."""

import pytest
from staged.fake import Fake

from memascend import config, device


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    monkeypatch.setattr(device, "open_device", lambda _: made)
    # Which refuses devices and their options so far.
    monkeypatch.setattr(config.Options, "_check_device", lambda _: None)
    yield made
    made.end()
