"""Tests that tensors which autograd saves, and which lie in a unit, come back as the views that they were."""

import pytest
import torch
from torch import nn

import memascend

WIDTH = 8


class Block(nn.Module):
    """Multiplies by a view of its weight, which the product saves for the gradient of the other factor."""

    def __init__(self, view):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, 2))
        self.view = view

    def forward(self, x):
        return torch.tanh(self.view(self.weight, x))


class Views(nn.Module):
    """Blocks that are away again when the backward begins."""

    def __init__(self, view):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(view) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def conjugate(weight, x):
    return (torch.view_as_complex(weight).conj() * x).real + (torch.view_as_complex(weight).conj() * x).imag


def negated(weight, x):
    """What is imaginary of a conjugate is a view whose sign is turned when it is read."""
    return torch.view_as_complex(weight).conj().imag * x


def cut(weight, x):
    return weight[1::2, :, 0].repeat(2, 1) * x + weight.permute(2, 0, 1)[1] * x


def broadcast(weight, x):
    return weight[3, :, 1].expand(2 * WIDTH, WIDTH) * x


@pytest.mark.parametrize("view", [conjugate, negated, cut, broadcast])
def test_a_saved_view_of_a_weight_has_the_same_gradient(tmp_path, view):
    plain, model = Views(view), Views(view)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.01)
    model, optimizer = memascend.offload(
        model, torch.optim.SGD(model.parameters(), lr=0.01), storage=tmp_path / "s", gradients="fused"
    )
    with optimizer:
        for seed in range(2):
            x = torch.randn(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
            for of, step in ((plain, theirs), (model, optimizer)):
                of(x).backward()
                step.step()
                step.zero_grad()
        with memascend.materialized(model):
            for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(wanted, got)
