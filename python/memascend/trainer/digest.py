"""Computes digests of batches and examples. A digest covers numbers, texts, and both ends of each tensor."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

# The number of bytes at each end of a tensor that a digest covers.
_COMPARED_BYTES = 64 << 10
_HASH_BYTES = 8
# The values of `dtype.kind` of the numpy arrays that torch can convert to a tensor.
_NUMBERS = "biufc"


def digest_of(value: Any) -> str:
    """Returns a digest that covers the numbers and texts in nested containers, and both ends of each tensor."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            digest.update(f"{name}:".encode())
            _add(digest, part)
    elif isinstance(value, set | frozenset):
        digest.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, list | tuple | deque) and not all(isinstance(part, int | float) for part in value):
        for part in value:
            _add(digest, part)
    elif isinstance(value, str | bytes | int | float | list | tuple | deque | type(None)):
        digest.update(repr(value).encode())
    elif hasattr(value, "__array__"):
        array = value.__array__()
        _add(digest, torch.as_tensor(array.copy()) if array.dtype.kind in _NUMBERS else repr(array.tolist()))
    else:
        # An image of PIL has tobytes(). Of an object without tobytes(), the digest covers only the type.
        digest.update(type(value).__qualname__.encode())
        if callable(getattr(value, "tobytes", None)):
            digest.update(value.tobytes())


def _add_tensor(digest: Any, value: torch.Tensor) -> None:
    digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
    flat = value.detach().reshape(-1)
    count = _COMPARED_BYTES // max(1, flat.element_size())
    for part in (flat[:count], flat[count:][-count:]):
        # Copy the elements first, because numpy() makes the tensor's storage not resizable, and offload() then rejects
        # the tensor as memory that other code may use.
        own = part.contiguous().to("cpu", copy=True)
        digest.update(own.view(torch.uint8).numpy().tobytes() if own.numel() else b"")
