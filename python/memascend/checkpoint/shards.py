"""Puts tensors together that torch.distributed.checkpoint wrote as parts, each rank its own, into safetensors files."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError, CorruptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from memascend.checkpoint.hub_names import WeightTensor

# Where torch says, in the header of each file, at which element in each dimension the parts in it begin.
_METADATA = "DCP_SHARDING_INFO"

# Where a part begins, how large it is, and itself.
_Part = tuple[tuple[int, ...], tuple[int, ...], "WeightTensor"]


def part_offsets(file: Any, path: Path) -> dict[str, tuple[int, ...]] | None:
    """Where each tensor of an open safetensors file begins in the whole one; None: the file does not say.

    Raises:
        CorruptionError: what it says makes no sense.
    """
    said = (file.metadata() or {}).get(_METADATA)
    if said is None:
        return None
    try:
        found = {key: tuple(place["saved_offsets"]) for key, place in json.loads(said).items()}
        well = all(
            len(found[key]) == len(file.get_slice(key).get_shape())
            and all(type(at) is int and at >= 0 for at in found[key])
            for key in file.keys()  # noqa: SIM118
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"{path} does not say where its parts of tensors begin: {error}", path=str(path)
        ) from error
    if not well:
        raise CorruptionError(f"{path} does not say where its parts of tensors begin", path=str(path))
    return found


def joined_tensors(parts: Mapping[str, Sequence[tuple[tuple[int, ...], WeightTensor]]], path: Path) -> dict[str, Any]:
    """Whole tensors by name, of all their parts and where these begin.

    Raises:
        ConfigError: parts are missing, overlap or differ in dtype.
    """
    return {key: _joined(key, found, path) for key, found in parts.items()}


def _joined(key: str, found: Sequence[tuple[tuple[int, ...], WeightTensor]], path: Path) -> WeightTensor:
    sized = [(at, tensor.described()[1], tensor) for at, tensor in found]
    # Ranks that have no row of a tensor write an empty part.
    parts = [part for part in sized if math.prod(part[1])] or sized[:1]
    shape = _tiled(parts, len(parts[0][0]))
    if shape is None or len({tensor.described()[0] for *_, tensor in parts}) > 1:
        raise ConfigError(
            f"the {len(parts)} parts of {key} in {path} do not make it whole: some are missing, or of another save; "
            "save again, into an empty folder"
        )
    return parts[0][2] if len(parts) == 1 else _JoinedTensor(parts, shape)


def _tiled(parts: Sequence[_Part], dims: int) -> tuple[int, ...] | None:
    """The shape that parts fill, each element once, as a grid; None where they do not. `dims`: how many are left."""
    if dims == 0:
        return () if len(parts) == 1 else None
    dim = len(parts[0][0]) - dims
    end, inner = 0, set()
    for at in sorted({part[0][dim] for part in parts}):
        beside = [part for part in parts if part[0][dim] == at]
        lengths = {part[1][dim] for part in beside}
        if at != end or len(lengths) > 1:
            return None
        end += lengths.pop()
        inner.add(_tiled(beside, dims - 1))
    rest = inner.pop()
    return None if inner or rest is None else (end, *rest)


class _JoinedTensor:
    """A tensor whose parts are in several files."""

    def __init__(self, parts: Sequence[_Part], shape: tuple[int, ...]) -> None:
        self._parts = parts
        self._shape = shape

    def described(self) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Dtype and shape of the whole."""
        return self._parts[0][2].described()[0], self._shape

    def values(self) -> torch.Tensor:
        """The whole, in memory."""
        whole = torch.empty(self._shape, dtype=self.described()[0])
        for at, shape, tensor in self._parts:
            place = tuple(slice(begin, begin + length) for begin, length in zip(at, shape, strict=True))
            whole[place].copy_(tensor.values())
        return whole
