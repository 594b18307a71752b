"""Tests Muon on streamed state: masters stored as halves, a momentum of 16 bits, bytes, refusals."""

import pytest
import torch
from parity.reference import Reference
from support import chains
from support.bits import same_bits
from support.chains import train
from torch import nn

import memascend

WIDE, NARROW = 200, 136


pytestmark = pytest.mark.usefixtures("one_thread")


def made(dtype):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in 2 * [(WIDE, NARROW), (NARROW, WIDE)])).to(dtype)


def offloaded(storage, dtype=torch.bfloat16, **options):
    return chains.offloaded(storage, made(dtype), torch.optim.Muon, 0.02, **options)


def in_memory(dtype, steps):
    """Values, masters and momenta after training with masters; momenta are rounded after each step."""
    model = made(dtype)
    optimizer = Reference(torch.optim.Muon(model.parameters(), lr=0.02), loss_scale=1.0)
    masters = list(optimizer.masters.values())
    for index in range(steps):
        chains.step(model, optimizer, index)
        for kept in optimizer.inner.state.values():
            kept["momentum_buffer"].copy_(kept["momentum_buffer"].bfloat16())
    return [*model.parameters(), *masters, *(optimizer.inner.state[one]["momentum_buffer"] for one in masters)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_momentum_of_16_bits_is_rounded_after_each_step(tmp_path, dtype):
    scale = {"loss_scale": 1.0} if dtype == torch.float16 else {}
    model, optimizer = offloaded(tmp_path / "store", dtype, state="bf16", **scale)
    with optimizer:
        train(model, optimizer, range(3))
        states = [optimizer.state_of(one) for one in model.parameters()]
        found = [*model.state_dict().values(), *(one[name] for name in ("master", "momentum_buffer") for one in states)]
        assert all(map(same_bits, found, in_memory(dtype, 3)))


@pytest.mark.parametrize(("state", "most"), [(None, 18.0), ("bf16", 14.0)])
def test_a_parameter_moves_18_bytes_a_step(tmp_path, state, most):
    """Beside what pages are filled up with, of which small parameters have much."""
    model, optimizer = offloaded(tmp_path / "store", gradients="fused", state=state)
    with optimizer:
        train(model, optimizer, range(2))
        before = optimizer.report()
        train(model, optimizer, range(2, 4))
        after = optimizer.report()
        kinds = ("values", "values, update", "state", "gradients")
        moved = [sum(one.read.get(kind, 0) + one.written.get(kind, 0) for kind in kinds) / 2 for one in (before, after)]
        pages = 4096 * 2 * 2 * len(list(model.parameters()))
        assert moved[1] - moved[0] <= most * sum(one.numel() for one in model.parameters()) + pages


def test_other_formats_are_refused(tmp_path):
    for options in ({"state": "8bit"}, {"state": "bf16", "master_dtype": None}):
        with pytest.raises(memascend.ConfigError, match="state="):
            offloaded(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()
