"""Tests memory that a program gives to weights within materialized(): it is watched, or refused."""

import numpy as np
import pytest
import torch
from support.bits import same_states
from support.chains import WIDTH, offloaded, step, values
from torch.nn.utils import vector_to_parameters

import memascend
from memascend import UsageError


def vector(model):
    given = torch.linspace(-1, 1, sum(p.numel() for p in model.parameters()))
    vector_to_parameters(given, model.parameters())
    return given


def data(model):
    model[0].weight.data = given = torch.full((WIDTH, WIDTH), 0.1)
    return given


def inside(model, give):
    with memascend.materialized(model, modify=True):
        return give(model)


@pytest.mark.parametrize("give", [vector, data])
def test_memory_that_is_given_to_weights_is_watched(tmp_path, give):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        step(model, optimizer)
        with pytest.raises(UsageError, match=r"0\.weight.*other memory through \.data: write to weights within"):
            give(model)
        given = inside(model, give)
        before = values(model)
        with pytest.raises(UsageError, match=r"0\.weight.*is about to change.*your code holds"):
            step(model, optimizer)
        optimizer.zero_grad()
        given.mul_(0.5)
        with pytest.raises(UsageError, match=r"0\.weight.*was written to"):
            step(model, optimizer)
        optimizer.zero_grad()
        assert same_states(values(model), before)
        del given
        step(model, optimizer)


def array(model):
    model[0].weight.data = torch.from_numpy(np.ones((WIDTH, WIDTH), "float32"))


def shared(model):
    model[0].weight.data = torch.ones(WIDTH, WIDTH).share_memory_()


def together(model):
    model[0].weight.data = model[1].weight.data[:]


@pytest.mark.parametrize("give", [array, shared, together])
def test_memory_that_may_be_written_to_unseen_is_refused(tmp_path, give):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        step(model, optimizer)
        before = values(model)
        says = "share memory" if give is together else "torch may not have alone"
        with pytest.raises(UsageError, match=rf"0\.weight.*{says}.*nothing was changed"):
            inside(model, give)
        assert same_states(values(model), before)
        step(model, optimizer)
