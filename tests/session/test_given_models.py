"""Tests models as offload() is given them: shared memory, frozen parameters, views, large buffers."""

import pytest
import torch
from support.chains import WIDTH, chain, loss_of, require_same, twins
from torch import nn

import memascend


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram", "auto"])
def test_an_optimizer_may_own_frozen_parameters_which_thaw_later(tmp_path, gradients):
    def half_frozen():
        model = chain()
        model[0].weight.requires_grad_(False)
        return model

    plain, theirs, model, optimizer = twins(tmp_path, gradients, half_frozen)
    with optimizer:
        for index in range(4):
            for one, opt in ((plain, theirs), (model, optimizer)):
                one[0].weight.requires_grad_(index >= 2)
                loss_of(one, index).backward()
                opt.step()
                opt.zero_grad()
        require_same(plain, model)


def test_parameters_that_share_memory_are_refused(tmp_path):
    model = chain()
    model[1].weight.data = model[0].weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(memascend.ConfigError, match="share memory"):
        memascend.offload(model, optimizer, storage=tmp_path / "s.store")


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused(tmp_path):
    model = chain()
    model.register_buffer("first", model[0].weight.detach()[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(memascend.ConfigError, match="share memory"):
        memascend.offload(model, optimizer, storage=tmp_path / "s.store")


def test_parameters_that_are_parts_of_one_vector_are_fine(tmp_path):
    def flattened():
        model = chain()
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector, model.parameters())
        return model

    plain, theirs, model, optimizer = twins(tmp_path, make=flattened)
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss_of(one).backward()
            opt.step()
        require_same(plain, model)


def test_a_large_buffer_that_is_replaced_is_committed(tmp_path):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("count", torch.zeros(1 << 19))

        def forward(self, x):
            self.count = self.count + 1
            return self.layer(x)

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "s.store", gradients="ssd")
    with optimizer:
        for _ in range(4):
            for index in range(2):
                loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
    fresh = Counting()
    again = torch.optim.SGD(fresh.parameters(), lr=0.1)
    fresh, again = memascend.offload(fresh, again, storage=tmp_path / "s.store", gradients="ssd", existing="resume")
    with again:
        assert fresh.count[0] == 8
