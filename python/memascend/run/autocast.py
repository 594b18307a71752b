"""Warns that autocast over 32-bit weights holds a 16-bit copy of each."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# A smaller part of a model in 32 bits (norms, routers) is not worth a word.
_SHARE = 10


class AutocastWatch:
    """Warns once, when a forward runs under autocast and most of what it multiplies by is in 32 bits."""

    def __init__(self, parameters: Iterable[torch.Tensor], device: str) -> None:
        """`device` is the type of the one that computes."""
        self._device = device
        every = list(parameters)
        # What autocast makes copies of: the weights of matrix products and convolutions.
        copied = sum(p.numel() for p in every if p.dtype == torch.float32 and p.dim() > 1)
        self._nbytes = 2 * copied
        self._silent = copied * _SHARE < sum(p.numel() for p in every)

    def look(self) -> None:
        """A module is entered."""
        if self._silent or not torch.is_autocast_enabled(self._device):
            return
        self._silent = True
        warnings.warn(
            f"autocast over float32 weights keeps 16-bit copies of them all in memory ({self._nbytes / 2**20:.0f} MiB, "
            "outside of host_memory), in the graph and in its cache: make the model 16-bit (model.to(torch.bfloat16)) "
            "before offload(), which keeps float32 masters on storage, and leave autocast out",
            stacklevel=2,
        )
