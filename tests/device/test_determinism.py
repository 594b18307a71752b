"""Tests that operations without deterministic GPU bits are refused by name."""

import pytest
import torch
from device.determinism import deterministic, refusal


def test_what_has_no_deterministic_kernel_is_named():
    values = torch.zeros(4)
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with pytest.raises(RuntimeError) as refused:
            values.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert refusal(refused.value) == "put_ does not have a deterministic implementation"
    assert not torch.are_deterministic_algorithms_enabled()
    outer = ValueError("a step failed")
    outer.__cause__ = refused.value
    assert refusal(outer) == "put_ does not have a deterministic implementation"


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), AssertionError("does not have a deterministic implementation")]
)
def test_nothing_else_is_one(error):
    assert refusal(error) is None
