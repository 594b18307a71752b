"""Parses what a plan is of without torch: short names of published models (as their config.json), speeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def _shape(
    kind: str, hidden: int, wide: int, layers: int, heads: tuple[int, int], vocabulary: int, *, tied: bool = False
) -> dict[str, Any]:
    """A decoder's config. `heads` are of queries, and of keys and values."""
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "max_position_embeddings": {"Llama": 131_072, "Qwen2": 32_768}[kind],
        "tie_word_embeddings": tied,
    }


SHAPES = {
    # Llama 3: https://huggingface.co/meta-llama
    "llama-1b": _shape("Llama", 2048, 8192, 16, (32, 8), 128_256, tied=True),
    "llama-3b": _shape("Llama", 3072, 8192, 28, (24, 8), 128_256, tied=True),
    "llama-8b": _shape("Llama", 4096, 14_336, 32, (32, 8), 128_256),
    "llama-70b": _shape("Llama", 8192, 28_672, 80, (64, 8), 128_256),
    # Qwen2.5: https://huggingface.co/Qwen
    "qwen-0.5b": _shape("Qwen2", 896, 4864, 24, (14, 2), 151_936, tied=True),
    "qwen-1.5b": _shape("Qwen2", 1536, 8960, 28, (12, 2), 151_936, tied=True),
    "qwen-3b": _shape("Qwen2", 2048, 11_008, 36, (16, 2), 151_936, tied=True),
    "qwen-7b": _shape("Qwen2", 3584, 18_944, 28, (28, 4), 152_064),
    "qwen-14b": _shape("Qwen2", 5120, 13_824, 48, (40, 8), 152_064),
    "qwen-32b": _shape("Qwen2", 5120, 27_648, 64, (40, 8), 152_064),
    "qwen-72b": _shape("Qwen2", 8192, 29_568, 80, (64, 8), 152_064),
}


def positive(text: str) -> float:
    """A finite number above 0, of a speed."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def named_shape(path: Path) -> dict[str, Any] | None:
    """The shape of this name; None where a file or folder has it, which then describes the model."""
    if path.exists():
        return None
    if str(path) not in SHAPES:
        raise ConfigError(
            f"{path} does not exist: give a config.json, the folder that has it, or one of {', '.join(SHAPES)}"
        )
    return dict(SHAPES[str(path)])
