"""Tests that averages of weights by diffusers, timm and torch are those of the same loop in memory, bit for bit."""

import pytest
import torch
from clients.beside import both, door
from diffusers.training_utils import EMAModel
from support.bits import same_bits
from support.chains import values
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

WIDTH, STEPS = 64, 6
# Where gradients are, and whether the average begins before the model is offloaded.
RUNS = pytest.mark.parametrize(
    ("dtype", "gradients", "before"), [(torch.float32, "fused", True), (torch.bfloat16, "ssd", False)], ids=str
)


def stack(dtype=torch.float32):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)).to(dtype)


def batch(step, dtype):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def train_step(model, optimizer, step):
    dtype = next(model.parameters()).dtype
    model(batch(step, dtype)).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(folder, loop, average_of, dtype, gradients, before):
    """Compare what the loop gives back of a model in memory and of one that is offloaded, and the models."""
    begun = []

    def make():
        model = stack(dtype)
        begun[:] = [average_of(model)] if before else []
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def run(model, optimizer):
        average = begun[0] if before else average_of(model)
        found = [value.detach().clone() for value in loop(model, optimizer, average)]
        model.eval()
        with torch.no_grad():
            found.append(model(batch(99, dtype)))
        return [*found, *values(model).values()]

    options = {"master_dtype": None} if dtype != torch.float32 else {}
    found = both(folder, make, run, gradients=gradients, **options)
    assert len(found[0]) > STEPS
    assert all(map(same_bits, *found))


def by_diffusers(model, optimizer, average):
    seen = []
    for step in range(STEPS):
        train_step(model, optimizer, step)
        average.step(model.parameters())
        if step % 2:
            # An evaluation with the averaged weights, and training goes on with those of before.
            average.store(model.parameters())
            with door(model, optimizer):
                average.copy_to(model.parameters())
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(50, next(model.parameters()).dtype)))
            with door(model, optimizer):
                average.restore(model.parameters())
            model.train()
    seen += average.state_dict()["shadow_params"]
    with door(model, optimizer):
        average.copy_to(model.parameters())
    return seen


@RUNS
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
def test_diffusers_averages_and_swaps(tmp_path, dtype, gradients, before, foreach):
    def make(model):
        return EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, foreach=foreach)

    compare(tmp_path, by_diffusers, make, dtype, gradients, before)


AVERAGES = {
    "timm's second": lambda model: ModelEmaV2(model, decay=0.9),
    "timm's third": lambda model: ModelEmaV3(model, decay=0.9),
    "torch's equal": AveragedModel,
    "torch's exponential": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
}


def by_modules(model, optimizer, average):
    """An average that is a model; torch's are also given the statistics of batches anew, and so is the model."""
    seen, is_torchs = [], isinstance(average, AveragedModel)
    for step in range(STEPS):
        train_step(model, optimizer, step)
        (average.update_parameters if is_torchs else average.update)(model)
        with torch.no_grad():
            seen.append(average(batch(50, next(model.parameters()).dtype)))
    for module, count in [(average, 3), (model, 2)] if is_torchs else ():
        update_bn([batch(step, next(model.parameters()).dtype) for step in range(count)], module)
    return [*seen, *average.state_dict().values()]


@RUNS
@pytest.mark.parametrize("kind", AVERAGES)
def test_models_of_averages_follow(tmp_path, dtype, gradients, before, kind):
    compare(tmp_path, by_modules, AVERAGES[kind], dtype, gradients, before)
