"""Tests that a commit holds the buffers of its step, and close() what changed after it."""

from unittest import mock

import pytest
import torch
from support.bits import same_states
from support.chains import loss_of, offloaded, step, values
from torch import nn

import memascend

WIDTH = 16
# A buffer that is written only where it was seen to change; the state machine has small ones, which always are.
LARGE = 600_000


class Counting(nn.Module):
    """Writes to a buffer in place in every forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(LARGE))

    def forward(self, x):
        self.seen += 1
        return self.layer(x)


class Codebook(Counting):
    """As `vector_quantize_pytorch` and others keep theirs: by `.data`, which counts no writes."""

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(("kind", "is_replaced"), [(Counting, True), (Codebook, False)])
def test_a_buffer_is_committed_as_it_is_at_each_step(tmp_path, kind, is_replaced):
    model, optimizer = offloaded(tmp_path / "s", kind())
    for index in range(3):
        step(model, optimizer)
        if is_replaced:
            model.seen = model.seen * 0.5 + index
        else:
            model.seen.data.mul_(0.5).add_(index)
    step(model, optimizer)
    wanted = model.seen.clone()
    optimizer.close()
    model, optimizer = offloaded(tmp_path / "s", kind(), existing="resume")
    with optimizer:
        assert torch.equal(model.seen, wanted)


def test_a_buffer_of_a_step_that_failed_is_committed_with_the_next_one(tmp_path):
    model, optimizer = offloaded(tmp_path / "s", Codebook())
    step(model, optimizer)
    model.seen += 1
    error = memascend.StorageError("no room")
    with mock.patch.object(memascend.engine.Engine, "commit", side_effect=error), pytest.raises(type(error)):
        step(model, optimizer)
    optimizer.zero_grad()
    step(model, optimizer)
    before = sum(optimizer.report().written.values())
    step(model, optimizer)
    assert sum(optimizer.report().written.values()) - before < LARGE, "it did not change again"
    optimizer.close()
    model, optimizer = offloaded(tmp_path / "s", Codebook(), existing="resume")
    with optimizer:
        assert model.seen.eq(1).all()


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def test_a_buffer_that_the_model_has_no_more_stays_as_it_was_committed(tmp_path):
    """As pruning's mask, once pruning is made permanent: steps, loads and close() go on."""

    def made(**options):
        model = normed()
        model.register_buffer("extra", torch.full((3,), 7.0))
        return offloaded(tmp_path / "s", model, **options)

    model, optimizer = made()
    with optimizer:
        del model.extra
        step(model, optimizer)
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, strict=False)
        optimizer.save(tmp_path / "saved")
    again, optimizer = made(existing="resume")
    with optimizer:
        assert optimizer.steps == 1
        assert torch.equal(again.extra, torch.full((3,), 7.0))
        assert torch.equal(again[1].running_mean, model[1].running_mean)


@pytest.mark.parametrize(("change", "gradients"), [("dtype", "fused"), ("shape in place", "ssd")])
def test_a_buffer_of_another_kind_is_refused_before_the_step_and_put_back(tmp_path, change, gradients):
    model, optimizer = offloaded(tmp_path / "s", normed(), gradients=gradients)
    with optimizer:
        norm = model[1]
        own, before = norm.running_mean.clone(), model[0].weight.detach().clone()
        loss_of(model).backward()
        if change == "dtype":
            norm.running_mean = norm.running_mean.half()
        else:
            norm.running_mean.resize_(4)
        with pytest.raises(memascend.ConfigError, match=r"buffer '1\.running_mean' .* was .*set it back"):
            optimizer.step()
        assert optimizer.steps == 0
        norm.running_mean = own
        optimizer.step()
        assert optimizer.steps == 1
        assert not torch.equal(model[0].weight, before)


# --- buffers that change after the last step: the state machine has forwards alone ----------------


def assigned(model):
    model[1].running_mean = torch.full((WIDTH,), 0.25)


def statistics(model):
    return {name: one.clone() for name, one in model.named_buffers()}


@pytest.mark.parametrize(("durability", "resumes"), [("step", True), ("none", False)])
def test_buffers_that_change_after_the_last_step_are_saved_and_kept(tmp_path, durability, resumes):
    options = {"storage": tmp_path / "s", "durability": durability}
    model, optimizer = offloaded(model=normed(), **options)
    step(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    if resumes:
        optimizer.close()
        model, optimizer = offloaded(model=normed(), existing="resume", **options)
    assigned(model)
    wanted = statistics(model)
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    for begin in ({"existing": "resume", **options}, {"checkpoint": tmp_path / "saved", "storage": tmp_path / "other"}):
        model, optimizer = offloaded(model=normed(), **begin)
        with optimizer:
            assert optimizer.steps == 1
            assert same_states(statistics(model), wanted)


def test_buffers_of_a_step_that_was_not_made_are_not_kept(tmp_path):
    """A resume repeats it; the state machine has more of them."""
    model, optimizer = offloaded(tmp_path / "s", normed())
    step(model, optimizer)
    wanted = statistics(model)
    with pytest.raises(KeyError), optimizer:
        raise KeyError(assigned(model))
    model, optimizer = offloaded(tmp_path / "s", normed(), existing="resume")
    assert same_states(statistics(model), wanted)
    loss_of(model)
    with pytest.warns(UserWarning, match="close.. does not keep them: a forward ran whose step was not made"):
        optimizer.close()


def test_close_keeps_the_way_back_from_a_step_that_is_not_finite(tmp_path):
    """Another commit would take the place of the step before it."""
    options = {"gradients": "fused", "storage": tmp_path / "s"}
    model, optimizer = offloaded(model=normed(), **options)
    step(model, optimizer)
    wanted = values(model)
    (loss_of(model) * float("nan")).backward()
    with pytest.warns(UserWarning, match='existing="previous" .* at 1'):
        optimizer.step()
    optimizer.zero_grad()
    assigned(model)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.close()
    model, optimizer = offloaded(model=normed(), existing="previous", **options)
    with optimizer:
        assert optimizer.steps == 1
        assert same_states(values(model), wanted)
