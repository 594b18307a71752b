"""Makes torch tensors on device memory through DLPack: no copy, no other library; the owner lives as long."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from memascend import _core

__all__ = ["lent"]

# DLPack's numbers of devices. torch calls both kinds of GPU "cuda".
_KINDS = {"cpu": 1, "cuda": 10 if torch.version.hip else 2}


def lent(address: int, nbytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """Bytes of a device as a uint8 tensor; `owner` is held until the last view of it is gone.

    Nothing waits, and no stream is ordered: that is the caller's.
    """
    index = 0 if device.index is None else device.index
    tensor: torch.Tensor = from_dlpack(_core.dlpack(address, nbytes, _KINDS[device.type], index, owner))
    return tensor
