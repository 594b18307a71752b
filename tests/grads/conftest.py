"""Lets torch take gradient handles in lists, as it does while a model is offloaded."""

import pytest

from memascend.session.process_hooks import ProcessHooks


@pytest.fixture
def process_hooks():
    hooks = ProcessHooks()
    yield
    hooks.release()
