"""Fixtures for tests of Trainers. They silence transformers, and prepare a training that stopped early."""

import pytest
from parity.reference import threads_of_torch


@pytest.fixture
def quiet():
    """Silences transformers, and lets torch compute with one thread."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with threads_of_torch(1):
        yield


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Trains for five steps and stops; returns the folder that contains the store."""
    from support.trained_program import started

    folder = tmp_path_factory.mktemp("ended")
    started(folder, end=5)
    return folder
