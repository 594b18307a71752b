"""Dequantises weights that are stored in MXFP4 or in FP8 with block scales, one tensor at a time."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.files import read_bounded
from memascend.errors import ConfigError, CorruptionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from memascend.checkpoint.weights import WeightTensor

MXFP4, FP8 = "mxfp4", "fp8"
# Matches the suffix of a quantised model's name on the Hub. The rest is the original model's name.
_BY = re.compile(
    r"([-_.](unsloth|bnb|gptq|awq|gguf|int4|int8|4bit|8bit|w4a16|w8a8|w8a16|quantized)\b.*)$", re.IGNORECASE
)
# The value of each code of a 4-bit float (E2M1).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The dtype of dequantised tensors, unless the caller chooses a dtype.
_DTYPE = torch.bfloat16
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The bias of the exponents, which are stored as uint8.
_BIAS = 127
# The number of FP8 elements that are multiplied by their scales in float32 at once. A longer row is not divided.
_PART = 1 << 22


@dataclass(frozen=True)
class _Mxfp4Tensor:
    """The matrices of all experts in MXFP4. A byte has two 4-bit elements; 32 elements of a row share one exponent."""

    blocks: WeightTensor  # uint8, (experts, rows, groups, 16)
    exponents: WeightTensor  # uint8, (experts, rows, groups)

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype, tuple[int, ...]]:
        """Returns the dtype and the shape of the parameter, whose matrices are the stored matrices transposed."""
        experts, rows, groups, width = self.blocks.described()[1]
        return dtype or _DTYPE, (experts, 2 * groups * width, rows)

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Dequantises the elements, one expert after the other."""
        dtype, shape = self.described(dtype)
        blocks, exponents = self.blocks.values(), self.exponents.values()
        values = torch.tensor(_FP4, dtype=dtype)
        found = torch.empty(shape, dtype=dtype)
        for expert, codes in enumerate(blocks):
            pairs = torch.stack((values[(codes & 0xF).int()], values[(codes >> 4).int()]), dim=-1)
            scaled = torch.ldexp(pairs.flatten(2), exponents[expert].int().sub(_BIAS).unsqueeze(-1)).to(dtype)
            found[expert].copy_(scaled.flatten(1).t())
        return found


@dataclass(frozen=True)
class _Fp8Tensor:
    """A matrix, or a stack of matrices, of 8-bit floats.

    There is one scale per block, or one scale per matrix. The matrices of a stack may share their scales.
    """

    name: str
    codes: WeightTensor
    scales: WeightTensor
    block: tuple[int, int] | None  # rows and columns of a block; None if the config has no valid block size

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype, tuple[int, ...]]:
        """Returns the dtype and the shape."""
        return dtype or _DTYPE, self.codes.described()[1]

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Dequantises the elements. Multiplies in float32, and rounds once."""
        dtype, shape = self.described(dtype)
        codes, scales = self.codes.values(), _scales(self.scales.values())
        grid = (*scales.shape[-2:],) if scales.dim() > 1 else (1, 1)
        rows, columns = self._block(shape, grid)
        found = torch.empty(shape, dtype=dtype)
        matrices, grids = codes.reshape(-1, *shape[-2:]), scales.reshape(-1, *grid)
        if len(grids) == 1:
            # One scale, or one grid of scales, is for all matrices of a stack.
            grids = grids.expand(len(matrices), *grid)
        if len(grids) != len(matrices):
            raise CorruptionError(
                f"{self.name} has {len(matrices)} matrices, but scales for {len(grids)}. Download the model again"
            )
        step = max(1, _PART // max(1, shape[-1]))
        for part, factors, into in zip(matrices, grids, found.view(-1, *shape[-2:]), strict=True):
            for first in range(0, len(part), step):
                some = slice(first, min(first + step, len(part)))
                of_rows = factors[torch.arange(some.start, some.stop) // rows]
                into[some].copy_(part[some].float() * of_rows.repeat_interleave(columns, 1)[:, : part.shape[1]])
        return found

    def _block(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int]:
        """Returns the rows and columns of a block.

        Uses the config's block size if it fits the grid of scales. Otherwise divides the matrix into equal blocks.

        Raises:
            CorruptionError: neither the config's block size nor equal blocks fit the grid of scales.
        """
        if self.block is not None and grid == tuple(map(_parts_of, shape[-2:], self.block)):
            return self.block
        if shape[-2] % grid[0] or shape[-1] % grid[1]:
            raise CorruptionError(
                f"{self.name} has {list(shape)} elements and {list(grid)} scales, so the block size is unknown: "
                "neither the config's weight_block_size nor equal blocks fit. Download the model again"
            )
        return shape[-2] // grid[0], shape[-1] // grid[1]


def _parts_of(whole: int, part: int) -> int:
    return math.ceil(whole / part)


def _scales(stored: torch.Tensor) -> torch.Tensor:
    """Returns scales in float32. A scale of dtype uint8 is a biased exponent of 2."""
    return (stored.float() - _BIAS).exp2() if stored.dtype == torch.uint8 else stored.float()


def method_of(folder: Path) -> Mapping[str, Any] | None:
    """Returns the first `quantization_config` in the folder's config.json; None if there is none."""
    config = folder / "config.json"
    if not config.is_file():
        return None
    try:
        values = json.loads(read_bounded(config, "config of a model. Download it again"))
    except (ValueError, RecursionError):
        # If config.json is not valid JSON, treat the tensors as not quantised.
        return None
    parts = [values, *values.values()] if isinstance(values, dict) else []
    found = (part.get("quantization_config") for part in parts if isinstance(part, dict))
    return next((one for one in found if isinstance(one, dict)), None)


def require_plain(sources: Mapping[str, WeightTensor], folder: Path) -> None:
    """Rejects FP8 weights, which cannot be dequantised without the `quantization_config` of a config.json.

    Raises:
        ConfigError: the name of a tensor ends in "_scale_inv".
    """
    scales = next((name for name in sources if name.endswith("_scale_inv")), None)
    if scales is not None:
        raise ConfigError(
            f"the weights in {folder} are quantized (they have {scales}), but no config.json there describes the "
            "quantization. Copy the model's config.json into this folder"
        )


def require_readable(path: object, method: object) -> None:
    """Rejects quantisations other than MXFP4 and FP8.

    Raises:
        ConfigError: `method` is another quantisation; the message says which model to download instead.
    """
    if method not in (MXFP4, FP8):
        raise refusal(path, str(method))


def refusal(path: object, how: str) -> ConfigError:
    """Returns the error for a model with an unsupported quantisation, which `how` describes."""
    name = str(path)
    plain = _BY.sub("", name)
    instead = plain if plain != name else "the model card names it as base_model"
    return ConfigError(
        f"{name} is quantized ({how}), but memascend reads only MXFP4 and FP8 with block scales. Download the model "
        f"without quantization ({instead})"
    )


def dequantized(
    sources: Mapping[str, WeightTensor], method: Mapping[str, Any], folder: Path
) -> dict[str, WeightTensor]:
    """Replaces each pair of codes and scales by one tensor that is dequantised when it is read.

    This tensor has the name of the model's parameter.

    Raises:
        ConfigError: `method` is neither MXFP4 nor FP8.
        CorruptionError: a tensor of codes has no scales, or scales have no codes.
    """
    kind = method.get("quant_method")
    require_readable(folder, kind)
    whole = _mxfp4(sources) if kind == MXFP4 else _fp8(sources, method)
    for name, source in whole.items():
        if source.described()[0] in _FP8 or name.endswith(("_blocks", "_scales", "_scale_inv")):
            raise CorruptionError(
                f"{folder} has {name}, but the scales or the codes that belong to it are missing. Download the model "
                "again. If this does not help, the model's quantization is not supported: download the model "
                "without quantization",
                path=str(folder),
            )
    return whole


def _mxfp4(sources: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    found: dict[str, WeightTensor] = {}
    for key, source in sources.items():
        name, _, part = key.rpartition("_")
        both = sources.get(f"{name}_blocks"), sources.get(f"{name}_scales")
        if part not in ("blocks", "scales") or both[0] is None or both[1] is None:
            found[key] = source
        elif part == "blocks":
            found[name] = _Mxfp4Tensor(both[0], both[1])
    return found


def _fp8(sources: Mapping[str, WeightTensor], method: Mapping[str, Any]) -> dict[str, WeightTensor]:
    size: Any = method.get("weight_block_size")
    is_block = isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size)
    block = (size[0], size[1]) if is_block else None
    # Drop the scales of activations, because only kernels that multiply 8-bit floats need them.
    spare = (".activation_scale", "_activation_scale")
    found: dict[str, WeightTensor] = {}
    for key, source in sources.items():
        scales = sources.get(f"{key}_scale_inv")
        if scales is not None:
            found[key] = _Fp8Tensor(key, source, scales, block)
        elif not key.endswith(spare) and not (key.endswith("_scale_inv") and key.removesuffix("_scale_inv") in sources):
            found[key] = source
    return found
