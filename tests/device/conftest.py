"""Provides a CUDA device with deterministic kernels; skips tests whose operations have no deterministic kernel."""

import contextlib

import pytest
import torch


@contextlib.contextmanager
def deterministic():
    """Makes torch use deterministic kernels only, and raise an error if an operation has none.

    With `warn_only=True`, torch would use kernels that are not deterministic, also in the backward of attention.
    """
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def refusal(error):
    """Returns torch's message about a missing deterministic kernel, if `error` or a cause of it has one; else None."""
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
    """Returns batches of tokens on the device."""
    from parity.zoo_plain import tokens

    return [part.to(device) for part in tokens(torch.Generator().manual_seed(2))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except Exception as error:
        if torch.are_deterministic_algorithms_enabled() and (named := refusal(error)) is not None:
            pytest.skip(f"torch cannot give the same bits each time: {named}")
        raise
