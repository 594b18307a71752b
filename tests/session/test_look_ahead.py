"""Tests what is fetched before it is needed."""

import torch
from torch import nn

import memascend

BLOCKS = 8


class Model(nn.Module):
    """Embedding and head are of one size, so that they take turns in one place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(BLOCKS))
        self.last = nn.Linear(64, 512, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_a_place_is_free_for_what_comes_when_its_values_will_not_be_used_again(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "store", gradients="fused")
    homes = {home.name: home for home in optimizer._session.run.residency.units.homes}
    assert homes["first"].slot_bytes == homes["last"].slot_bytes
    under_way = []

    def look(*_):
        head = homes["last"]
        under_way.append(head.read is not None or head.base is not None)

    model.blocks[-4].register_forward_hook(look)
    for _ in range(3):
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    # The first step shows the order, and that the embedding is trained.
    assert under_way[1:] == [True, True]


def test_nothing_is_read_that_the_commit_makes_old(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "store", gradients="fused")
    residency = optimizer._session.run.residency
    begin, read = residency._memory.begin, []

    def noted(name, base):
        read.append(name)
        return begin(name, base)

    residency._memory.begin = noted
    for _ in range(3):
        read.clear()
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    # Of the last step; its values of the next one are the first that were read after the commit.
    assert read.count("first") == 1
