"""Makes tensors of random numbers, the same for a seed in every test."""

import torch


def randoms(numel, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
