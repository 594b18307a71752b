"""Parses what a plan is of without torch: short names of published models (as their config.json), speeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# The class of transformers for each model_type.
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma3_text": "Gemma3",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "smollm3": "SmolLM3",
    "gpt_oss": "GptOss",
}


def _shape(
    kind: str,
    widths: tuple[int, int],
    layers: int,
    heads: tuple[int, int, int],
    tokens: tuple[int, int],
    *,
    tied: bool = False,
    experts: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """A decoder's config.

    `widths` are of a token and of the feed-forward part; `heads` of queries, of keys and values, and the width of each;
    `tokens` of the vocabulary and of the longest sequence.
    """
    return {
        "architectures": [f"{_CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": widths[0],
        "intermediate_size": widths[1],
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": tokens[0],
        "max_position_embeddings": tokens[1],
        "tie_word_embeddings": tied,
        # Those of some classes are beyond small vocabularies.
        "pad_token_id": None,
        **(experts or {}),
    }


def _experts(number: int, chosen: int, wide: int, *, local: bool = True) -> dict[str, int]:
    """Experts of a block, those that compute each token, and their width."""
    named = "num_local_experts" if local else "num_experts"
    return {named: number, "num_experts_per_tok": chosen, "moe_intermediate_size": wide}


SHAPES = {
    # Llama 3.1 and 3.2: https://huggingface.co/meta-llama
    "llama-1b": _shape("llama", (2048, 8192), 16, (32, 8, 64), (128_256, 131_072), tied=True),
    "llama-3b": _shape("llama", (3072, 8192), 28, (24, 8, 128), (128_256, 131_072), tied=True),
    "llama-8b": _shape("llama", (4096, 14_336), 32, (32, 8, 128), (128_256, 131_072)),
    "llama-70b": _shape("llama", (8192, 28_672), 80, (64, 8, 128), (128_256, 131_072)),
    # Qwen2.5: https://huggingface.co/Qwen
    "qwen-0.5b": _shape("qwen2", (896, 4864), 24, (14, 2, 64), (151_936, 32_768), tied=True),
    "qwen-1.5b": _shape("qwen2", (1536, 8960), 28, (12, 2, 128), (151_936, 32_768), tied=True),
    "qwen-3b": _shape("qwen2", (2048, 11_008), 36, (16, 2, 128), (151_936, 32_768), tied=True),
    "qwen-7b": _shape("qwen2", (3584, 18_944), 28, (28, 4, 128), (152_064, 32_768)),
    "qwen-14b": _shape("qwen2", (5120, 13_824), 48, (40, 8, 128), (152_064, 32_768)),
    "qwen-32b": _shape("qwen2", (5120, 27_648), 64, (40, 8, 128), (152_064, 32_768)),
    "qwen-72b": _shape("qwen2", (8192, 29_568), 80, (64, 8, 128), (152_064, 32_768)),
    # Qwen3
    "qwen3-0.6b": _shape("qwen3", (1024, 3072), 28, (16, 8, 128), (151_936, 40_960), tied=True),
    "qwen3-1.7b": _shape("qwen3", (2048, 6144), 28, (16, 8, 128), (151_936, 40_960), tied=True),
    "qwen3-4b": _shape("qwen3", (2560, 9728), 36, (32, 8, 128), (151_936, 40_960), tied=True),
    "qwen3-8b": _shape("qwen3", (4096, 12_288), 36, (32, 8, 128), (151_936, 40_960)),
    "qwen3-14b": _shape("qwen3", (5120, 17_408), 40, (40, 8, 128), (151_936, 40_960)),
    "qwen3-32b": _shape("qwen3", (5120, 25_600), 64, (64, 8, 128), (151_936, 40_960)),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", (2048, 6144), 48, (32, 4, 128), (151_936, 40_960), experts=_experts(128, 8, 768, local=False)
    ),
    # Mistral 7B v0.3, Nemo 2407, Small 2501, Mixtral 8x7B: https://huggingface.co/mistralai
    "mistral-7b": _shape("mistral", (4096, 14_336), 32, (32, 8, 128), (32_768, 32_768)),
    "mistral-nemo-12b": _shape("mistral", (5120, 14_336), 40, (32, 8, 128), (131_072, 131_072)),
    "mistral-small-24b": _shape("mistral", (5120, 32_768), 40, (32, 8, 128), (131_072, 32_768)),
    "mixtral-8x7b": _shape(
        "mixtral", (4096, 14_336), 32, (32, 8, 128), (32_000, 32_768), experts=_experts(8, 2, 14_336)
    ),
    # Gemma 3, the language models without the part that sees: https://huggingface.co/google
    "gemma3-1b": _shape("gemma3_text", (1152, 6912), 26, (4, 1, 256), (262_144, 32_768), tied=True),
    "gemma3-4b": _shape("gemma3_text", (2560, 10_240), 34, (8, 4, 256), (262_208, 131_072), tied=True),
    "gemma3-12b": _shape("gemma3_text", (3840, 15_360), 48, (16, 8, 256), (262_208, 131_072), tied=True),
    "gemma3-27b": _shape("gemma3_text", (5376, 21_504), 62, (32, 16, 128), (262_208, 131_072), tied=True),
    # https://huggingface.co/microsoft/phi-4, allenai/OLMo-2-1124-7B, HuggingFaceTB/SmolLM3-3B, openai/gpt-oss-20b
    "phi-4": _shape("phi3", (5120, 17_920), 40, (40, 10, 128), (100_352, 16_384)),
    "olmo2-7b": _shape("olmo2", (4096, 11_008), 32, (32, 32, 128), (100_352, 4096)),
    "smollm3-3b": _shape("smollm3", (2048, 11_008), 36, (16, 4, 128), (128_256, 65_536), tied=True),
    "gpt-oss-20b": _shape("gpt_oss", (2880, 2880), 24, (64, 8, 64), (201_088, 131_072), experts=_experts(32, 4, 2880)),
}


# No machine has a larger figure, in any of the units that options take.
_FIGURE_MAX = 1e9


def positive(text: str) -> float:
    """A number above 0, of a speed or a size."""
    value = float(text)
    if not 0 < value < _FIGURE_MAX:
        raise ValueError(text)
    return value


def named_shape(path: Path) -> dict[str, Any] | None:
    """The shape of this name; None where a file or folder has it, which then describes the model."""
    if path.exists():
        return None
    shape = SHAPES.get(str(path).lower())
    if shape is None:
        raise ConfigError(
            f"{path} does not exist: give a config.json, the folder that has it, or one of {', '.join(SHAPES)}"
        )
    return dict(shape)
