"""The shapes of published language models by short names, as their config.json has them; needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def _llama(hidden: int, wide: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    """A Llama 3: https://huggingface.co/meta-llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": tied,
    }


def _qwen(hidden: int, wide: int, layers: int, heads: tuple[int, int], *, tied: bool = False) -> dict[str, Any]:
    """A Qwen2.5: https://huggingface.co/Qwen. `heads` are of queries, and of keys and values."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": 151_936 if tied else 152_064,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "llama-1b": _llama(2048, 8192, 16, 32, tied=True),
    "llama-3b": _llama(3072, 8192, 28, 24, tied=True),
    "llama-8b": _llama(4096, 14_336, 32, 32),
    "llama-70b": _llama(8192, 28_672, 80, 64),
    "qwen-0.5b": _qwen(896, 4864, 24, (14, 2), tied=True),
    "qwen-1.5b": _qwen(1536, 8960, 28, (12, 2), tied=True),
    "qwen-3b": _qwen(2048, 11_008, 36, (16, 2), tied=True),
    "qwen-7b": _qwen(3584, 18_944, 28, (28, 4)),
    "qwen-14b": _qwen(5120, 13_824, 48, (40, 8)),
    "qwen-32b": _qwen(5120, 27_648, 64, (40, 8)),
    "qwen-72b": _qwen(8192, 29_568, 80, (64, 8)),
}


def named_shape(path: Path) -> dict[str, Any] | None:
    """The shape of this name; None where a file or folder has it, which then describes the model."""
    if path.exists():
        return None
    if str(path) not in SHAPES:
        raise ConfigError(
            f"{path} does not exist: give a config.json, the folder that has it, or one of {', '.join(SHAPES)}"
        )
    return dict(SHAPES[str(path)])
