"""Builds a model of many kinds of parameters and trains it."""

from __future__ import annotations

import torch


class Mixed(torch.nn.Module):
    """Tied, with running statistics, a frozen part, and convolutions in another order of dimensions."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 16)
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.batch = torch.nn.BatchNorm2d(8)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.head = torch.nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.none = torch.nn.Parameter(torch.zeros(0))

    def forward(self, tokens, images):
        x = self.frozen(self.embed(tokens))
        y = self.batch(self.conv(images))
        return self.head(x).float().square().mean() + y.float().square().mean() * 3 + self.none.float().sum()


def made(dtype, optimizer, seed=0, **options):
    torch.manual_seed(seed)
    model = Mixed().to(dtype)
    model.conv.to(memory_format=torch.channels_last)
    if optimizer is torch.optim.Adafactor:  # torch's own divides by their number of elements
        del model.none
        model.none = torch.zeros(1)
    return model, optimizer([p for p in model.parameters() if p.requires_grad], **options)


def batches(dtype):
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 40, (2, 5), generator=random), torch.randn(2, 3, 6, 6, generator=random).to(dtype))
        for _ in range(6)
    ]


def trained(model, optimizer, dtype, first, last):
    losses = []
    for batch in batches(dtype)[first:last]:
        loss = model(*batch)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
