"""Tests real parameters for a while: changes without `modify`, and memory that a program gives to weights."""

import warnings

import numpy as np
import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import WIDTH, chain, loss_of, offloaded, step, values
from torch.nn.utils import vector_to_parameters

import memascend
from memascend import UsageError

WRITES = {
    "in place": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "detach": lambda p: p.detach()[0].zero_(),
    "numpy": lambda p: p.detach().view(torch.uint8).numpy().fill(1),
    "data =": lambda p: setattr(p, "data", torch.ones_like(p)),
    "another shape": lambda p: setattr(p, "data", torch.ones(3, dtype=p.dtype)),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_changed_without_modify_is_said(tmp_path, write):
    model, optimizer = offloaded(tmp_path / "s", chain(bias=True, dtype=torch.bfloat16))
    with optimizer:
        before = values(model)
        expected = pytest.warns(UserWarning, match="1.weight were changed .* modify=True")
        with expected as said, memascend.materialized(model), torch.no_grad():
            WRITES[write](model[1].weight)
            kept = model[1].weight.detach().flatten()
        assert said[0].filename == __file__
        assert same_states(values(model), before)
        del kept


def test_what_is_looked_at_is_not_said(tmp_path):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        with memascend.materialized(model), torch.no_grad():
            loss_of(model)
            # The same bits.
            model[0].weight.mul_(1)
        with memascend.materialized(model, modify=True), torch.no_grad():
            model[0].weight.mul_(2)


@pytest.mark.parametrize("modify", [False, True])
def test_memory_of_a_weight_that_is_kept_is_watched(tmp_path, modify):
    """Of a real weight it would follow the steps; what is discarded in any case is a snapshot."""
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        with memascend.materialized(model, modify=modify):
            kept = model[0].weight.detach()
        loss_of(model).backward()
        if modify:
            with pytest.raises(UsageError, match=r"0\.weight is about to change.*clone\(\)"):
                optimizer.step()
            assert optimizer.steps == 0
            del kept
            optimizer.step()
        else:
            before = kept.clone()
            optimizer.step()
            assert same_bits(kept, before)
            kept.zero_()
            with pytest.raises(UsageError, match=r"0\.weight of an offloaded model was written to"):
                optimizer.save(tmp_path / "saved")
        assert optimizer.steps == 1


# --- memory that is given to weights within: it is watched, or refused ------------------------------


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
