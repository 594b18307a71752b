"""Tests gradients that users hold, assign, drop and clip: none is lost, doubled or another's."""

import gc

import pytest
import torch
from support.chains import WIDTH, chain, loss_of, require_same, twins

import memascend


def test_a_gradient_that_was_dropped_never_reads_as_the_next_one(tmp_path):
    plain, _, model, optimizer = twins(tmp_path)
    with optimizer:
        loss_of(plain).backward()
        wanted = plain[0].weight.grad
        loss_of(model).backward()
        saved = model[0].weight.grad
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        with pytest.raises(memascend.UsageError, match="clone"):
            saved.clone()
        with pytest.raises(memascend.UsageError, match="clone"):
            model[0].weight.grad.add_(saved)
        del wanted


@pytest.mark.parametrize("gradients", ["ssd", "ram", "fused"])
def test_gradients_that_are_assigned_again_after_zero_grad_make_a_step(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, lambda: chain(1))

    def assign(one, opt, seed):
        for p in one.parameters():
            p.grad = torch.full(p.shape, float(seed))
        opt.step()
        opt.zero_grad()

    with optimizer:
        for seed in range(1, 7):
            assign(plain, theirs, seed)
            gc.collect()
            assign(model, optimizer, seed)
            gc.collect()
        assert optimizer.steps == 6
        require_same(plain, model)


@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_an_alias_of_a_gradient_is_that_gradient(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss_of(one).backward()
            for p in one.parameters():
                p.grad = p.grad.detach()
            opt.step()
        assert optimizer.steps == 1
        require_same(plain, model)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_a_gradient_with_a_graph_is_refused(tmp_path, gradients):
    *_, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        with pytest.raises(memascend.UsageError, match="create_graph"):
            loss_of(model).backward(create_graph=True)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_penalty_on_gradients_in_memory_is_exact(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path, "ram")
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss = loss_of(one)
            loss.backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in one.parameters())
            penalty.backward()
            opt.step()
            opt.zero_grad()
        require_same(plain, model)


def test_clipping_after_an_accumulated_update_ran_is_refused(tmp_path):
    *_, model, optimizer = twins(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        loss_of(model).backward()
        loss_of(model, 2).backward()
        with pytest.raises(memascend.UsageError, match="ssd"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")) > 0


def test_the_norm_of_accumulated_gradients_is_of_all_of_them(tmp_path):
    plain, _, model, optimizer = twins(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        for one in (plain, model):
            loss_of(one).backward()
            loss_of(one, 2).backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
        got = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        torch.testing.assert_close(got, wanted)


def test_a_norm_that_is_nan_spoils_the_step_as_torch_does(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path, "ssd", max_grad_norm=1.0)
    with optimizer:
        for one in (plain, model):
            loss_of(one).backward()
            one[0].weight.grad = torch.full((WIDTH, WIDTH), float("nan"))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        optimizer.step()
        with memascend.materialized(model):
            assert plain[1].weight.isnan().all()
            assert model[1].weight.isnan().all()
