"""Tests checkpointed activations of a model on a device, in host memory and on storage: the same losses."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memascend


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
        folder = tmp_path / where
        folder.mkdir()
        model = Model(reentrant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = memascend.offload(
            model, optimizer, storage=folder, device=device, activations=where, gradients="ssd"
        )
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
