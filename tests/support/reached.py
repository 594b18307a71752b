"""Makes stacks whose weights are reached between forwards, trains and compares them."""

import torch
from support import chains

import memascend

WIDTH = 64


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
}


def stack(units, dtype=torch.float32):
    return chains.chain(units, bias=True, width=WIDTH, dtype=dtype)


def batch(dtype=torch.float32):
    return chains.batch(3, WIDTH, dtype)


def taken(model, optimizer, folder, **options):
    half = next(model.parameters()).dtype == torch.float16
    options = {"master_dtype": None, "loss_scale": 1.0 if half else None, "host_memory": "64MiB", **options}
    if next(model.parameters()).dtype == torch.float32:
        options.pop("master_dtype")
    return memascend.offload(model, optimizer, storage=folder / "run.store", **options)


def one_step(model, optimizer, _dtype):
    return chains.step(model, optimizer, 3)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stored(offloaded):
    """Bytes that were written to the store."""
    return sum(offloaded.report().to_dict()["written"].values())
