"""Tests gradients that users keep, alias and pass in, or that arrive in pieces: no gradient is lost, doubled or mixed.

tests/parity/machine.py tests gradients that users assign, drop or change.
"""

import pytest
import torch
from support.chains import WIDTH, batch, chain, loss_of, offloaded, require_same, require_same_training, step, twins
from support.checkpointed import OwnCheckpoint
from torch.utils.checkpoint import checkpoint

from memascend import UsageError


def test_use_of_a_gradient_dropped_by_zero_grad_raises(tmp_path):
    *_, model, optimizer = twins(tmp_path)
    with optimizer:
        loss_of(model).backward()
        saved = model[0].weight.grad
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        for use in (saved.clone, lambda: model[0].weight.grad.add_(saved)):
            with pytest.raises(UsageError, match="clone"):
                use()
        # `model.zero_grad()` also drops gradients. `save()` then finds no staged step, so it must not raise.
        model.zero_grad()
        optimizer.save(tmp_path / "saved")


@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_step_accepts_a_detached_alias_of_a_gradient(tmp_path, gradients):
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
@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram"])
def test_create_graph_equals_torch_with_ram_gradients_and_else_raises(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients)

    def penalised(one, opt):
        loss_of(one).backward(create_graph=True)
        sum(p.grad.square().sum() for p in one.parameters()).backward()
        opt.step()

    with optimizer:
        if gradients == "ram":
            penalised(plain, theirs)
            penalised(model, optimizer)
            require_same(plain, model)
        else:
            with pytest.raises(UsageError, match="create_graph"):
                penalised(model, optimizer)
        optimizer.zero_grad()
        step(model, optimizer)


def flat_views(model, flat):
    """Makes the gradient of each parameter a view of the tensor `flat`."""
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)


@pytest.mark.parametrize(
    ("gradients", "way"),
    [("ssd", "scaled"), ("fused", "accumulated"), ("auto", "accumulated"), ("ram", "scaled"), ("ssd", "assigned anew")],
)
def test_step_with_gradients_as_views_of_one_buffer_equals_torch(tmp_path, gradients, way):
    """Before step(), reading the buffer returns the gradients.

    step() uses the values that the loop wrote to the buffer.
    """
    plain, theirs, model, optimizer = twins(tmp_path, gradients)

    def run(one, opt):
        flat, norms = torch.zeros(sum(p.numel() for p in one.parameters())), []
        flat_views(one, flat)
        for seed in range(3):
            if way == "assigned anew":
                flat_views(one, flat)
            loss_of(one, seed).backward()
            if way == "accumulated":
                loss_of(one, seed + 10).backward()
            norms.append(flat.norm())
            flat.mul_(0.1 / norms[-1])
            opt.step()
            if way == "scaled":
                opt.zero_grad(set_to_none=False)
            else:
                flat.zero_()
        return norms

    with optimizer:
        assert all(map(torch.equal, run(plain, theirs), run(model, optimizer)))
        require_same(plain, model)


class Flat(torch.nn.Module):
    """A module that returns a flat view of its weight.

    Autograd does not copy the argument `gradient` of backward(), so the weight's gradient is a view of this argument.
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self):
        return self.weight.view(-1)


@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_step_rejects_writes_to_the_gradient_argument_of_backward(tmp_path, gradients):
    """If the model were in memory, the weight's gradient would be a view of the tensor that backward() gets."""
    model, optimizer = offloaded(tmp_path / "s", Flat(), torch.optim.SGD, gradients=gradients)
    with optimizer:
        mine = torch.ones(WIDTH * WIDTH)
        model().backward(gradient=mine)
        optimizer.step()
        optimizer.zero_grad()
        model().backward(gradient=mine)
        mine.mul_(2)
        with pytest.raises(UsageError, match=r"'weight'.*is a view of memory.*written to"):
            optimizer.step()
        optimizer.zero_grad()
        model().backward(gradient=torch.ones(WIDTH * WIDTH))
        optimizer.step()
        assert optimizer.steps == 2


def test_gradient_hook_that_returns_a_value_raises_torchs_error(tmp_path):
    """Autograd passes the result of the user's hook to the next hook, which may be a hook of memascend."""
    model = chain()
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad)
    model, optimizer = offloaded(tmp_path / "s", model, torch.optim.SGD)
    with optimizer, pytest.raises(RuntimeError, match="should return None"):
        loss_of(model).backward()


# --- gradients that arrive in several pieces --------------------------------------------------


def test_autograd_grad_through_a_checkpoint_counts_as_no_backward(tmp_path):
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


@pytest.mark.parametrize(
    ("way", "gradients"),
    [("own", "fused"), ("own", "ssd"), ("first", "fused"), ("last", "auto"), ("last", "fused"), ("twice", "fused"),
     ("touched", "fused"), ("touched", "ssd")],
)  # fmt: skip
def test_nested_backward_on_the_same_weight_equals_torch(tmp_path, way, gradients):
    """Two backwards add to the gradient of one weight.

    In "own" and "twice", two inner backwards do so. In the other cases, an outer and an inner backward do so, in either
    order. "own" uses a checkpoint function that is not from torch.
    """

    def forward(model, seed):
        def inside(y):
            return model[0](y) if way != "touched" else y @ model[0].weight.t()

        x = batch(seed).requires_grad_()
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

    require_same_training(*twins(tmp_path, gradients), of=forward)


def test_second_step_with_one_new_gradient_requires_zero_grad(tmp_path):
    *_, model, optimizer = twins(tmp_path, "fused")
    with optimizer:
        loss_of(model).backward()
        optimizer.step()
        model[0].weight.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(UsageError, match="zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer)
        assert optimizer.steps == 2
