"""Parses what a plan is of without torch: names of published models, whose shapes are as their config.json; speeds."""

from __future__ import annotations

import difflib
import re
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


# The names that the hub has for the same shapes, without owners and the words of `_VARIANTS`.
_HUB_NAMES = {
    "llama-1b": ("Llama-3.2-1B",),
    "llama-3b": ("Llama-3.2-3B",),
    "llama-8b": ("Llama-3.1-8B", "Llama-3-8B", "DeepSeek-R1-Distill-Llama-8B"),
    "llama-70b": ("Llama-3.1-70B", "Llama-3.3-70B", "Llama-3-70B", "DeepSeek-R1-Distill-Llama-70B"),
    "qwen-0.5b": ("Qwen2.5-0.5B", "Qwen2.5-Coder-0.5B"),
    "qwen-1.5b": ("Qwen2.5-1.5B", "Qwen2.5-Coder-1.5B", "Qwen2.5-Math-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B"),
    "qwen-3b": ("Qwen2.5-3B", "Qwen2.5-Coder-3B"),
    "qwen-7b": ("Qwen2.5-7B", "Qwen2.5-Coder-7B", "Qwen2.5-Math-7B", "DeepSeek-R1-Distill-Qwen-7B"),
    "qwen-14b": ("Qwen2.5-14B", "Qwen2.5-Coder-14B", "DeepSeek-R1-Distill-Qwen-14B"),
    "qwen-32b": ("Qwen2.5-32B", "Qwen2.5-Coder-32B", "DeepSeek-R1-Distill-Qwen-32B"),
    "qwen-72b": ("Qwen2.5-72B",),
    "qwen3-30b-a3b": ("Qwen3-Coder-30B-A3B",),
    "mistral-7b": ("Mistral-7B-v0.3",),
    "mistral-nemo-12b": ("Mistral-Nemo", "Mistral-Nemo-2407"),
    "mistral-small-24b": ("Mistral-Small-24B-2501",),
    "mixtral-8x7b": ("Mixtral-8x7B-v0.1",),
    "olmo2-7b": ("OLMo-2-1124-7B", "OLMo-2-7B"),
}
# Words of a name that change no shape.
_VARIANTS = {"meta", "base", "instruct", "it", "pt", "chat", "thinking", "sft", "dpo", "hf", "bf16", "2507"}
# Names that a mistaken one is compared with, and how alike they are to be.
_NEAR_MAX, _NEAR = 3, 0.6


def _key(name: str) -> str:
    """What is left of a name without owner, case, separators and variant."""
    words = re.split(r"[-_: ]+", name.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in _VARIANTS)


# The shape of each name, and the name as it is shown.
_NAMES = {_key(name): (shape, name) for shape, names in _HUB_NAMES.items() for name in names}
_NAMES |= {_key(shape): (shape, shape) for shape in SHAPES}


# No machine has a larger figure, in any of the units that options take.
_FIGURE_MAX = 1e9


def positive(text: str) -> float:
    """A number above 0, of a speed or a size."""
    value = float(text)
    if not 0 < value < _FIGURE_MAX:
        raise ValueError(text)
    return value


def shape_named(path: Path) -> str | None:
    """The name in `SHAPES` of the model of this name; None where a file or folder has it, which then describes one.

    Raises:
        ConfigError: there is neither; it says which names are like it.
    """
    if path.exists():
        return None
    key = _key(str(path))
    if key in _NAMES:
        return _NAMES[key][0]
    near = [_NAMES[one][1] for one in difflib.get_close_matches(key, _NAMES, n=_NEAR_MAX, cutoff=_NEAR)]
    known = f"did you mean {' or '.join(near)}?" if near else f"it knows {', '.join(SHAPES)}."
    raise ConfigError(
        f"{path} does not exist, and plan knows no model of this name: {known} Of any other model, give its "
        "config.json or the folder that has it"
    )
