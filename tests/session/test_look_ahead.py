"""Tests what is fetched before it is needed."""

import pytest
import torch
from support.chains import offloaded
from torch import nn

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


@pytest.fixture
def run(tmp_path):
    model, optimizer = offloaded(tmp_path / "store", Model(), gradients="fused")
    with optimizer:
        yield model, optimizer


def train(model, optimizer, begun=lambda: None):
    for _ in range(3):
        begun()
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_place_is_free_for_what_comes_when_its_values_will_not_be_used_again(run):
    model, optimizer = run
    homes = {home.name: home for home in optimizer._session.run.residency.units.homes}
    assert homes["first"].slot_bytes == homes["last"].slot_bytes
    under_way = []

    def look(*_):
        head = homes["last"]
        under_way.append(head.read is not None or head.base is not None)

    model.blocks[-4].register_forward_hook(look)
    train(model, optimizer)
    # The first step shows the order, and that the embedding is trained.
    assert under_way[1:] == [True, True]


def test_nothing_is_read_that_the_commit_makes_old(run):
    model, optimizer = run
    residency = optimizer._session.run.residency
    begin, read = residency._memory.begin, []

    def noted(name, base, **options):
        read.append(name)
        return begin(name, base, **options)

    residency._memory.begin = noted
    train(model, optimizer, read.clear)
    # Of the last step; its values of the next one are the first that were read after the commit.
    assert read.count("first") == 1
