"""Tests checkpointed activations of a model on a device, in host memory and on storage: the same losses."""

import pytest
import torch
from support.chains import offloaded
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant).relu()
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_wherever_they_wait(tmp_path, device, reentrant):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    found = []
    for where in ("device", "host", "ssd"):
        options = {"device": device, "activations": where, "gradients": "ssd"}
        model, optimizer = offloaded(tmp_path / where, Model(reentrant), **options)
        with optimizer:
            losses = []
            for _ in range(3):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            held = optimizer.report().to_dict()
            assert held["host"]["peak"] <= held["host"]["budget"]
        found.append(losses)
    assert found[0] == found[1] == found[2]
