"""Tests that averages of weights by diffusers, timm and torch are those of the same loop in memory, bit for bit."""

import pytest
import torch
from clients.beside import both, door
from diffusers.training_utils import EMAModel
from support.bits import same_bits
from support.chains import batch, step, values
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

WIDTH, STEPS = 64, 6


def stack(dtype):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)).to(dtype)


def by_diffusers(model, optimizer, average, inputs):
    seen = []
    for number in range(STEPS):
        step(model, optimizer, number)
        average.step(model.parameters())
        if number % 2:
            # An evaluation with the averaged weights, and training goes on with those of before.
            average.store(model.parameters())
            with door(model, optimizer):
                average.copy_to(model.parameters())
            model.eval()
            with torch.no_grad():
                seen.append(model(inputs))
            with door(model, optimizer):
                average.restore(model.parameters())
            model.train()
    seen += average.state_dict()["shadow_params"]
    with door(model, optimizer):
        average.copy_to(model.parameters())
    return seen


def by_modules(model, optimizer, average, inputs):
    """An average that is a model; torch's are also given the statistics of batches anew, and so is the model."""
    seen, is_torchs = [], isinstance(average, AveragedModel)
    for number in range(STEPS):
        step(model, optimizer, number)
        (average.update_parameters if is_torchs else average.update)(model)
        with torch.no_grad():
            seen.append(average(inputs))
    for module, count in [(average, 3), (model, 2)] if is_torchs else ():
        update_bn([inputs + number for number in range(count)], module)
    return [*seen, *average.state_dict().values()]


def of_diffusers(foreach):
    return lambda model: EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, foreach=foreach)


# The loop, and what makes the average of a model.
AVERAGES = {
    "diffusers', one by one": (by_diffusers, of_diffusers(foreach=False)),
    "diffusers', foreach": (by_diffusers, of_diffusers(foreach=True)),
    "timm's second": (by_modules, lambda model: ModelEmaV2(model, decay=0.9)),
    "timm's third": (by_modules, lambda model: ModelEmaV3(model, decay=0.9)),
    "torch's equal": (by_modules, AveragedModel),
    "torch's exponential": (
        by_modules,
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    ),
}


# Where gradients are, and whether the average begins before the model is offloaded.
@pytest.mark.parametrize(
    ("dtype", "gradients", "before"), [(torch.float32, "fused", True), (torch.bfloat16, "ssd", False)], ids=str
)
@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_follow_and_swap(tmp_path, dtype, gradients, before, kind):
    (loop, average_of), begun, inputs = AVERAGES[kind], [], batch(99, WIDTH, dtype)

    def make():
        model = stack(dtype)
        begun[:] = [average_of(model)] if before else []
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def run(model, optimizer):
        average = begun[0] if before else average_of(model)
        found = [value.detach().clone() for value in loop(model, optimizer, average, inputs)]
        model.eval()
        with torch.no_grad():
            found.append(model(inputs))
        return [*found, *values(model).values()]

    options = {"master_dtype": None} if dtype != torch.float32 else {}
    found = both(tmp_path, make, run, gradients=gradients, **options)
    assert len(found[0]) > STEPS
    assert all(map(same_bits, *found))
