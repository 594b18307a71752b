"""Begins the tests of Trainers: without what transformers says, and with a training whose process ended."""

import pytest
from parity.reference import threads_of_torch


@pytest.fixture
def quiet():
    """No messages, and one thread."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with threads_of_torch(1):
        yield


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A folder with the store of a training after its fifth step."""
    from support.trained_program import started

    folder = tmp_path_factory.mktemp("ended")
    started(folder, end=5)
    return folder
