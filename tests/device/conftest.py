"""Provides a CUDA device, with deterministic kernels; with `make test-posing` one that poses as such (posing/)."""

import contextlib
import os

import pytest
import torch
from support.fake_device import fake

from memascend.device import device as devices
from memascend.plan import options as config

__all__ = ["device", "fake"]

# A process has it from the start, as autograd looks for devices once; other tests are not to find it.
POSES = os.environ.get("MEMASCEND_POSING") == "1"
if POSES:
    from device.posing.device import Posing, registered

    registered()

DEVICES = [
    pytest.param(
        "posing",
        marks=[
            pytest.mark.posing,
            pytest.mark.slow,
            pytest.mark.skipif(not POSES, reason="a process of its own has it: make test-posing"),
            # What operations by way of the CPU do, where a GPU's do it in place.
            pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
        ],
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@contextlib.contextmanager
def deterministic():
    """Where torch has no deterministic kernel it raises: with a warning alone it would compute with another one.

    Attention is one of these: only so do its backwards take their deterministic ways.
    """
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def refusal(error):
    """What torch has no deterministic kernel for, where that is why an error was raised; else None."""
    while error is not None:
        if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error):
            return str(error).partition(",")[0]
        error = error.__cause__ or error.__context__
    return None


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda":
        with deterministic():
            yield torch.device("cuda", torch.cuda.current_device())
        return
    made = Posing(fills=0.05)
    monkeypatch.setattr(devices, "open_device", lambda _: made)
    # Which knows of CUDA alone.
    monkeypatch.setattr(config.Options, "where", torch.device("cuda"))
    yield made.torch_device
    made.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except Exception as error:
        if torch.are_deterministic_algorithms_enabled() and (named := refusal(error)) is not None:
            pytest.skip(f"the same bits cannot be asked for: {named}")
        raise
