"""Defines the blocks that models of tests are made of."""

from torch import nn
from torch.nn import functional

__all__ = ["Residual"]


class Residual(nn.Module):
    """Two linear layers beside what they are given."""

    def __init__(self, width, activate=functional.gelu):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.activate = activate

    def forward(self, x):
        return x + self.down(self.activate(self.up(x)))
