"""Digests batches, examples and attributes of a program: what they have at both ends, and numbers and texts."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

# Of each tensor so many bytes at both ends are compared.
_COMPARED_BYTES = 64 << 10
_HASH_BYTES = 8
# Kinds of numpy's arrays that are tensors, too.
_NUMBERS = "biufc"


def digest_of(value: Any) -> str:
    """A digest of the ends of a batch's tensors, and of the numbers and texts in it."""
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
        # A picture has bytes; of what has none, the type has to do.
        digest.update(type(value).__qualname__.encode())
        if callable(getattr(value, "tobytes", None)):
            digest.update(value.tobytes())


def _add_tensor(digest: Any, value: torch.Tensor) -> None:
    digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
    flat = value.detach().reshape(-1)
    count = _COMPARED_BYTES // max(1, flat.element_size())
    for part in (flat[:count], flat[count:][-count:]):
        # A copy: memory that numpy has had is taken for numpy's from then on, and a weight may not lie in such.
        own = part.contiguous().to("cpu", copy=True)
        digest.update(own.view(torch.uint8).numpy().tobytes() if own.numel() else b"")
