"""Tests gradients that come in several pieces: over backwards, in nested ones, in checkpoints."""

import pytest
import torch
from support.chains import WIDTH, batch, loss_of, require_same, twins
from support.checkpointed import OwnCheckpoint

import memascend


def test_autograd_grad_through_a_checkpoint_is_no_backward(tmp_path):
    from torch.utils.checkpoint import checkpoint

    plain, theirs, model, optimizer = twins(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            x = batch().requires_grad_()
            out = checkpoint(one, x, use_reentrant=False).square().mean()
            loss_of(one, 2).backward()
            torch.autograd.grad(out, [x])
            loss_of(one, 3).backward()
            opt.step()
        require_same(plain, model)


@pytest.mark.parametrize("gradients", ["fused", "auto", "ssd"])
@pytest.mark.parametrize("way", ["own", "first", "last", "twice", "touched"])
def test_a_weight_inside_and_outside_of_a_backward_within_another(tmp_path, gradients, way):
    """Its gradient comes in pieces, of which the outer may be the first; "own" is a checkpoint that is not torch's."""
    from torch.utils.checkpoint import checkpoint

    def forward(model, x):
        def inside(y):
            return model[0](y) if way != "touched" else y @ model[0].weight.t()

        if way == "own":
            out = OwnCheckpoint.apply(model[0], x)
            return OwnCheckpoint.apply(model[0], model[1](out)).square().mean()
        if way == "first":
            x = model[0](x)
        x = checkpoint(inside, x, use_reentrant=True)
        if way == "twice":
            x = checkpoint(inside, model[1](x), use_reentrant=True)
        if way in ("last", "touched"):
            x = model[0](x)
        return model[1](x).square().mean()

    plain, theirs, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        for index in range(3):
            for one, opt in ((plain, theirs), (model, optimizer)):
                forward(one, batch(index).requires_grad_()).backward()
                opt.step()
                opt.zero_grad()
        require_same(plain, model)


def test_a_step_after_a_step_with_a_new_gradient_for_one(tmp_path):
    *_, model, optimizer = twins(tmp_path, "fused")
    with optimizer:
        loss_of(model).backward()
        optimizer.step()
        model[0].weight.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(memascend.UsageError, match="zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert optimizer.steps == 2
