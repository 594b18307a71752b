"""Defines the small training that stores of format version 1 were made from; see `test_store_format.py`."""

import torch
from torch import nn

import memascend

WIDTH = 24
STEPS = 3


def model():
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(WIDTH, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, WIDTH, bias=False))
    layers[0].bfloat16()
    layers[3].bfloat16()
    return layers


def optimizer(layers):
    return torch.optim.AdamW(layers.parameters(), lr=0.01, weight_decay=0.1)


def loss_of(layers, step):
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 + step)).bfloat16()
    hidden = layers[2](layers[1](layers[0](batch).float())).bfloat16()
    return layers[3](hidden).float().square().mean()


def offloaded(storage, **options):
    layers = model()
    return memascend.offload(layers, optimizer(layers), storage=storage, host_memory="64MiB", **options)


def train(layers, ours, steps):
    losses = []
    for step in steps:
        loss = loss_of(layers, step)
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(loss.item())
    return losses
