"""Tests the wrappers of timm, pytorch_optimizer and accelerate: refused by name or taken off, with nothing changed."""

import copy

import accelerate
import pytest
import pytorch_optimizer
import timm.optim
import torch
from clients.optimizers import model, train
from support.bits import same_bits

import memascend


def values(trained):
    return [parameter.detach().clone() for parameter in trained.parameters()]


@pytest.mark.parametrize(
    "wrapper", [timm.optim.Lookahead, pytorch_optimizer.Lookahead], ids=["timm", "pytorch_optimizer"]
)
@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_lookahead_is_refused_and_the_model_is_as_it_was(tmp_path, wrapper, inner):
    trained = model()
    base = inner(trained.parameters(), lr=0.1)
    optimizer = wrapper(base)
    train(trained, optimizer, range(2))
    before, state = values(trained), copy.deepcopy(base.state_dict())
    with pytest.raises(
        memascend.ConfigError, match=r"Lookahead cannot run.*another optimizer.*give offload\(\) that one"
    ):
        memascend.offload(trained, optimizer, storage=tmp_path / "store")
    assert all(map(same_bits, before, values(trained)))
    assert str(base.state_dict()) == str(state)
    train(trained, optimizer, range(2, 4))


def test_accelerates_optimizer_is_taken_off(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    plain = model()
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True), range(5))
    trained = model()
    base = torch.optim.AdamW(trained.parameters(), fused=True)
    prepared, optimizer = accelerator.prepare(trained, base)
    train(prepared, optimizer, range(2))
    prepared, offloaded = memascend.offload(prepared, optimizer, storage=tmp_path / "store")
    # Who holds the wrapper goes on with it.
    train(prepared, optimizer, range(2, 4))
    train(prepared, offloaded, range(4, 5))
    assert offloaded.steps == 3
    with memascend.materialized(prepared):
        assert all(map(same_bits, values(prepared), values(plain)))
    offloaded.close()


def test_accelerates_optimizer_that_waits_for_more_backwards_is_refused(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    trained, optimizer = accelerator.prepare(model(), None)[0], None
    optimizer = accelerator.prepare(torch.optim.AdamW(trained.parameters()))
    before = values(trained)
    with pytest.raises(memascend.ConfigError, match=r"steps after 3 backwards.*before accelerator.prepare"):
        memascend.offload(trained, optimizer, storage=tmp_path / "store")
    assert all(map(same_bits, before, values(trained)))
    accelerate.state.GradientState._reset_state()
