"""Offloads chains whose weights are read and written between forwards."""

import torch

import memascend

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
}


def taken(model, optimizer, folder, **options):
    return memascend.offload(model, optimizer, storage=folder / "run.store", **{"host_memory": "64MiB", **options})
