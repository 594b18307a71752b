"""Provides a CUDA device, with deterministic kernels."""

import contextlib

import pytest
import torch


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


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def device():
    with deterministic():
        yield torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def data(device):
    """Batches of tokens, there."""
    from parity.zoo_plain import tokens

    return [part.to(device) for part in tokens(torch.Generator().manual_seed(2))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except Exception as error:
        if torch.are_deterministic_algorithms_enabled() and (named := refusal(error)) is not None:
            pytest.skip(f"the same bits cannot be asked for: {named}")
        raise
