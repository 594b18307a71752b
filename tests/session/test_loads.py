"""Tests values that are loaded into the model: committed, or as they were before."""

import gc

import pytest
import torch
from support.bits import same_bits
from torch import nn

import memascend

WIDTH = 16
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


class Stack(nn.Module):
    """So many equal blocks, and statistics that are a buffer."""

    def __init__(self, units):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(units)])
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def batch(seed=3):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def offloaded(folder, units=2, optimizer="adamw", **options):
    model = Stack(units)
    made = OPTIMIZERS[optimizer](model.parameters())
    return memascend.offload(model, made, storage=folder / "run.store", host_memory="64MiB", **options)


def step(model, optimizer, seed=3):
    optimizer.backward(model(batch(seed)).square().mean() + model.norm.weight.sum())
    optimizer.step()
    optimizer.zero_grad()


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


@pytest.mark.parametrize("units", [2, 16])
def test_a_load_is_committed_at_once(tmp_path, units):
    model, optimizer = offloaded(tmp_path, units)
    step(model, optimizer, 1)
    loaded = {name: tensor + 1 for name, tensor in copied(model).items()}
    plain = Stack(units)
    plain.load_state_dict(loaded)
    model.load_state_dict(loaded)
    assert same(copied(model), loaded)
    assert torch.equal(optimizer.state_of(model.blocks[0].weight)["master"], loaded["blocks.0.weight"])
    torch.testing.assert_close(model.eval()(batch()), plain.eval()(batch()), rtol=0, atol=0)
    optimizer.save(tmp_path / "saved")
    other = Stack(units)
    other, begun = memascend.offload(other, OPTIMIZERS["adamw"](other.parameters()), checkpoint=tmp_path / "saved")
    with begun:
        assert same(copied(other), loaded)
    del model, optimizer
    gc.collect()
    model, optimizer = offloaded(tmp_path, units, existing="resume")
    with optimizer:
        assert optimizer.steps == 1
        assert same(copied(model), loaded)


@pytest.mark.parametrize("wrong", ["shape", "missing", "unexpected"])
def test_a_load_that_torch_refuses_changes_nothing(tmp_path, wrong):
    model, optimizer = offloaded(tmp_path)
    step(model, optimizer)
    before = copied(model)
    loaded = {name: tensor + 1 for name, tensor in before.items()}
    if wrong == "shape":
        loaded["blocks.1.weight"] = torch.zeros(3, 3)
    elif wrong == "missing":
        del loaded["blocks.1.weight"]
    else:
        loaded["more"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="Error"):
        model.load_state_dict(loaded)
    assert same(copied(model), before)
    # A load that fits takes nothing of the other with it.
    before["blocks.1.bias"] = before["blocks.1.bias"] + 2
    model.load_state_dict({"blocks.1.bias": before["blocks.1.bias"]}, strict=False)
    optimizer.close()
    model, optimizer = offloaded(tmp_path, existing="resume")
    with optimizer:
        assert same(copied(model), before)


def test_a_load_after_a_load_is_on_top_of_it(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        before = copied(model)
        loaded = {name: tensor + 1 for name, tensor in before.items()}
        model.load_state_dict(loaded)
        model.load_state_dict({"blocks.0.weight": before["blocks.0.weight"]}, strict=False)
        wanted = {**loaded, "blocks.0.weight": before["blocks.0.weight"]}
        assert same(copied(model), wanted)
        model.load_state_dict(loaded)
        with pytest.raises(RuntimeError, match="Missing"):
            model.load_state_dict({"blocks.0.weight": before["blocks.0.weight"]})
        assert same(copied(model), loaded)


class Shift(nn.Module):
    """What no graph saves a weight of."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x + self.one + self.other).sum()


def test_a_backward_of_an_older_graph_meets_what_was_loaded(tmp_path):
    plain, model = Shift(), Shift()
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    model, optimizer = memascend.offload(
        model, OPTIMIZERS["adamw"](model.parameters()), storage=tmp_path / "s", gradients="fused"
    )
    with optimizer:
        for of, opt in ((plain, theirs), (model, optimizer)):
            loss = of(torch.zeros(4))
            of.load_state_dict({"one": torch.full((4,), 2.0), "other": torch.full((4,), 3.0)})
            loss.backward()
            opt.step()
        assert same(copied(model), copied(plain))
