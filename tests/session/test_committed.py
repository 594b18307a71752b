"""Tests that a commit holds the buffers of its step."""

import pytest
import torch
from support.chains import offloaded, step
from torch import nn

import memascend

WIDTH = 16
# One that is written only where it was seen to change, and one that always is.
LARGE, SMALL = 600_000, 8


class Counting(nn.Module):
    """Writes to a buffer in place in every forward."""

    def __init__(self, elements=SMALL):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(elements))

    def forward(self, x):
        self.seen += 1
        return self.layer(x)


def opened(path, model, existing="refuse"):
    return offloaded(path, model, existing=existing, host_memory="64MiB")


class Codebook(Counting):
    """As `vector_quantize_pytorch` and others keep theirs: by `.data`, which counts no writes."""

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("kind", [Counting, Codebook])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_buffer_is_committed_as_it_is_at_each_step(tmp_path, elements, kind, is_replaced):
    model, optimizer = opened(tmp_path / "s", kind(elements))
    for index in range(3):
        step(model, optimizer)
        if is_replaced:
            model.seen = model.seen * 0.5 + index
        else:
            model.seen.data.mul_(0.5).add_(index)
    step(model, optimizer)
    wanted = model.seen.clone()
    assert wanted[0] == 2.5 + (1.875 if kind is Counting else 0)
    optimizer.close()
    model, optimizer = opened(tmp_path / "s", kind(elements), "resume")
    with optimizer:
        assert torch.equal(model.seen, wanted)


def test_a_buffer_of_a_step_that_failed_is_committed_with_the_next_one(tmp_path, monkeypatch):
    model, optimizer = opened(tmp_path / "s", Codebook(LARGE))
    step(model, optimizer)
    model.seen += 1

    def fails(*_, **__):
        raise memascend.StorageError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(memascend.engine.Engine, "commit", fails)
        with pytest.raises(memascend.StorageError, match="no room"):
            step(model, optimizer)
    optimizer.zero_grad()
    step(model, optimizer)
    before = sum(optimizer.report().written.values())
    step(model, optimizer)
    assert sum(optimizer.report().written.values()) - before < LARGE, "it did not change again"
    optimizer.close()
    model, optimizer = opened(tmp_path / "s", Codebook(LARGE), "resume")
    with optimizer:
        assert model.seen.eq(1).all()


@pytest.mark.parametrize("how", ["deleted", "none"])
def test_a_buffer_that_the_model_has_no_more_stays_as_it_was_committed(tmp_path, how):
    """As pruning's mask, once pruning is made permanent: steps, loads and close() go on."""

    def made(**options):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.register_buffer("extra", torch.full((3,), 7.0))
        return memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=tmp_path / "s", **options)

    model, optimizer = made()
    with optimizer:
        if how == "deleted":
            del model.extra
        else:
            model.extra = None
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, strict=False)
        optimizer.save(tmp_path / "saved")
    again, optimizer = made(existing="resume")
    with optimizer:
        assert optimizer.steps == 1
        assert torch.equal(again.extra, torch.full((3,), 7.0))
        assert torch.equal(again[1].running_mean, model[1].running_mean)


@pytest.mark.parametrize("change", ["shape", "dtype", "shape in place"])
@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_a_buffer_of_another_kind_is_refused_before_the_step_and_put_back(tmp_path, change, gradients):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model, optimizer = offloaded(tmp_path / "s", model, torch.optim.SGD, gradients=gradients)
    with optimizer:
        norm = model[1]
        own, before = norm.running_mean.clone(), model[0].weight.detach().clone()
        model(torch.randn(4, 8)).pow(3).sum().backward()
        if change == "shape":
            norm.running_mean = torch.zeros(2, 8)
        elif change == "dtype":
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
