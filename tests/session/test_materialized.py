"""Tests real parameters for a while: what is changed without `modify` is dropped, with a warning."""

import warnings

import pytest
import torch
from support.bits import same_bits
from torch import nn

import memascend

WIDTH = 16


def offloaded(folder, units, optimizer, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(units)]).to(dtype)
    return memascend.offload(model, optimizer(model.parameters(), lr=1e-3), storage=folder / "s")


WRITES = {
    "in place": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "detach": lambda p: p.detach()[0].zero_(),
    "numpy": lambda p: p.detach().view(torch.uint8).numpy().fill(1),
    "data =": lambda p: setattr(p, "data", torch.ones_like(p)),
    "another shape": lambda p: setattr(p, "data", torch.ones(3, dtype=p.dtype)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize(
    ("units", "optimizer", "dtype"),
    [
        (2, torch.optim.AdamW, torch.float32),
        (16, torch.optim.AdamW, torch.bfloat16),
        (16, torch.optim.RMSprop, torch.float16),
    ],
)
def test_what_is_changed_without_modify_is_said(tmp_path, monkeypatch, write, debug, units, optimizer, dtype):
    monkeypatch.setenv("MEMASCEND_DEBUG", debug)
    model, optimizer = offloaded(tmp_path, units, optimizer, dtype)
    with optimizer:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        expected = pytest.warns(UserWarning, match="1.weight were changed .* modify=True")
        with expected as said, memascend.materialized(model), torch.no_grad():
            WRITES[write](model[1].weight)
        assert said[0].filename == __file__
        assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_is_looked_at_is_not_said(tmp_path):
    model, optimizer = offloaded(tmp_path, 2, torch.optim.AdamW, torch.float32)
    with optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        with memascend.materialized(model), torch.no_grad():
            model(torch.zeros(2, WIDTH))
            # The same bits.
            model[0].weight.mul_(1)
        with memascend.materialized(model, modify=True), torch.no_grad():
            model[0].weight.mul_(2)


@pytest.mark.parametrize("modify", [False, True])
def test_what_was_written_to_a_weight_just_before_is_there(tmp_path, modify):
    model, optimizer = offloaded(tmp_path, 2, torch.optim.AdamW, torch.float32)
    with optimizer:
        model[0].weight.detach().zero_()
        with memascend.materialized(model, modify=modify):
            assert not model[0].weight.any()
        assert not (model[0].weight + 0).any()
