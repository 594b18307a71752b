"""Tests gradients that users hold, assign, drop and clip: none is lost, doubled or another's."""

import pytest
import torch
from support.chains import WIDTH, chain, loss_of, offloaded, require_same, twins

import memascend


def test_a_gradient_that_was_dropped_never_reads_as_the_next_one(tmp_path):
    *_, model, optimizer = twins(tmp_path)
    with optimizer:
        loss_of(model).backward()
        saved = model[0].weight.grad
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        with pytest.raises(memascend.UsageError, match="clone"):
            saved.clone()
        with pytest.raises(memascend.UsageError, match="clone"):
            model[0].weight.grad.add_(saved)


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


def flat_views(model, flat):
    """Let each gradient be a view of one buffer."""
    begin = 0
    for p in model.parameters():
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()


@pytest.mark.parametrize("gradients", ["ssd", "fused", "auto", "ram"])
@pytest.mark.parametrize("way", ["scaled", "accumulated", "assigned each time"])
def test_gradients_that_are_views_of_one_buffer_are_that_buffer(tmp_path, gradients, way):
    """What is read of the buffer before step() has the gradients, and what is written to it is stepped with."""
    plain, theirs, model, optimizer = twins(tmp_path, gradients)

    def run(one, opt):
        flat = torch.zeros(sum(p.numel() for p in one.parameters()))
        flat_views(one, flat)
        for seed in range(3):
            if way == "assigned each time":
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

    with optimizer:
        norms = []
        run(plain, theirs)
        wanted, norms = norms, []
        run(model, optimizer)
        assert all(torch.equal(*pair) for pair in zip(wanted, norms, strict=True))
        require_same(plain, model)


class Flat(torch.nn.Module):
    """Gives its weight as a flat view, so that what backward() is given becomes its gradient, without a copy."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self):
        return self.weight.view(-1)


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_memory_that_the_caller_may_write_to_is_never_handed_on(tmp_path, monkeypatch, gradients):
    """The engine reads a gradient later, on its own thread."""
    given = []

    def watched(of):
        def call(self, name, gradient, *arguments, **options):
            given.append(gradient.untyped_storage().data_ptr())
            return of(self, name, gradient, *arguments, **options)

        return call

    for name in ("update", "spill"):
        monkeypatch.setattr(memascend.engine.Engine, name, watched(getattr(memascend.engine.Engine, name)))
    model, optimizer = offloaded(tmp_path / "s", Flat(), gradients=gradients)
    with optimizer:
        mine = torch.ones(WIDTH * WIDTH)
        model().backward(gradient=mine)
        assert given
        assert mine.untyped_storage().data_ptr() not in given


@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_memory_given_to_backward_that_is_written_to_before_step_is_refused(tmp_path, gradients):
    """In memory the gradient is a view of it."""
    model, optimizer = offloaded(tmp_path / "s", Flat(), torch.optim.SGD, gradients=gradients)
    with optimizer:
        mine = torch.ones(WIDTH * WIDTH)
        model().backward(gradient=mine)
        optimizer.step()
        optimizer.zero_grad()
        model().backward(gradient=mine)
        mine.mul_(2)
        with pytest.raises(memascend.UsageError, match=r"'weight'.*is a view of memory.*written to"):
            optimizer.step()
        optimizer.zero_grad()
        model().backward(gradient=torch.ones(WIDTH * WIDTH))
        optimizer.step()
        assert optimizer.steps == 2


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram"])
def test_a_hook_that_returns_something_gets_torchs_own_error(tmp_path, gradients):
    """What the first hook returns torch hands to the next one, which may be ours."""
    model = chain()
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad)
    model, optimizer = offloaded(tmp_path / "s", model, torch.optim.SGD, gradients=gradients)
    with optimizer, pytest.raises(RuntimeError, match="should return None"):
        loss_of(model).backward()
