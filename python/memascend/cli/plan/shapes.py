"""Lists the shapes of published models, finds a shape by a model's name, and parses numbers. Needs no torch."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# For each model_type, the prefix of the name of transformers' class.
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
    "olmo3": "Olmo3",
    "ministral3": "Ministral3",
    "glm4": "Glm4",
    "granite": "Granite",
    "exaone4": "Exaone4",
    "smollm3": "SmolLM3",
    "gpt_oss": "GptOss",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "gemma4_text": "Gemma4",
}


def _shape(
    kind: str,
    widths: tuple[int, int],
    layers: int,
    heads: tuple[int, int, int],
    tokens: tuple[int, int],
    *,
    tied: bool = False,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the config of a decoder.

    `widths` has the width of a hidden state and the width of the feed-forward part. `heads` has the number of heads for
    queries, the number of heads for keys and values, and the width of a head. `tokens` has the number of tokens in the
    vocabulary, and in the longest sequence.
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
        # In some classes, the default pad_token_id is outside of a small vocabulary. torch rejects such an ID.
        "pad_token_id": None,
        **(more or {}),
    }


def _experts(number: int, chosen: int, wide: int, *, local: bool = True) -> dict[str, int]:
    """Returns the entries of a config that describe the experts.

    `number` is the number of experts in a block, `chosen` is the number of experts that compute a token, and `wide` is
    the width of an expert. `local` is True if the config has the key "num_local_experts" instead of "num_experts".
    """
    named = "num_local_experts" if local else "num_experts"
    return {named: number, "num_experts_per_tok": chosen, "moe_intermediate_size": wide}


def _qwen3_5(
    widths: tuple[int, int], layers: int, heads: tuple[int, int], linear: int, *, tied: bool, **more: Any
) -> dict[str, Any]:
    """Returns the config of a Qwen3.5 model.

    Three of every four blocks have linear attention with `linear` value heads.
    """
    kind = "qwen3_5_moe_text" if more else "qwen3_5_text"
    more |= {"linear_num_value_heads": linear, "linear_num_key_heads": 16}
    return _shape(kind, widths, layers, (*heads, 256), (248_320, 262_144), tied=tied, more=more)


def _gemma4(
    widths: tuple[int, int], layers: int, heads: tuple[int, int], *, shared: int = 0, whole: int = 0, **more: Any
) -> dict[str, Any]:
    """Returns the config of a Gemma 4 model. Every fifth or sixth block attends to all tokens, and has wider heads.

    In small models, `shared` blocks use the keys and values of earlier blocks, and each block has a separate embedding
    of the tokens as a further input. In large models, the blocks that attend to all tokens have `whole` key heads, and
    use the keys also as values.
    """
    every = more.pop("every", 6)
    kinds = ["full_attention" if number % every == every - 1 else "sliding_attention" for number in range(layers)]
    more |= {"layer_types": kinds, "global_head_dim": 512, "num_kv_shared_layers": shared}
    more |= {"sliding_window": 512 if shared else 1024, "hidden_size_per_layer_input": 256 if shared else 0}
    if whole:
        more |= {"attention_k_eq_v": True, "num_global_key_value_heads": whole}
    tokens = 262_144, 131_072 if shared else 262_144
    return _shape("gemma4_text", widths, layers, (*heads, 256), tokens, tied=True, more=more)


SHAPES = {
    # Llama 3.1 and 3.2: https://huggingface.co/meta-llama, and TinyLlama
    "llama-1b": _shape("llama", (2048, 8192), 16, (32, 8, 64), (128_256, 131_072), tied=True),
    "llama-3b": _shape("llama", (3072, 8192), 28, (24, 8, 128), (128_256, 131_072), tied=True),
    "llama-8b": _shape("llama", (4096, 14_336), 32, (32, 8, 128), (128_256, 131_072)),
    "llama-70b": _shape("llama", (8192, 28_672), 80, (64, 8, 128), (128_256, 131_072)),
    "llama-405b": _shape("llama", (16_384, 53_248), 126, (128, 8, 128), (128_256, 131_072)),
    "tinyllama-1.1b": _shape("llama", (2048, 5632), 22, (32, 4, 64), (32_000, 2048)),
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
        "qwen3_moe", (2048, 6144), 48, (32, 4, 128), (151_936, 40_960), more=_experts(128, 8, 768, local=False)
    ),
    "qwen3-235b-a22b": _shape(
        "qwen3_moe", (4096, 12_288), 94, (64, 4, 128), (151_936, 40_960), more=_experts(128, 8, 1536, local=False)
    ),
    # Qwen3.5, the language models
    "qwen3.5-0.8b": _qwen3_5((1024, 3584), 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": _qwen3_5((2560, 9216), 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": _qwen3_5((4096, 12_288), 32, (16, 4), 32, tied=False),
    "qwen3.5-27b": _qwen3_5((5120, 17_408), 64, (24, 4), 48, tied=False),
    "qwen3.5-35b-a3b": _qwen3_5(
        (2048, 0),
        40,
        (16, 2),
        32,
        tied=False,
        shared_expert_intermediate_size=512,
        **_experts(256, 8, 512, local=False),
    ),
    # Mistral 7B v0.3 and v0.1, Nemo 2407, Small 2501, Mixtral 8x7B: https://huggingface.co/mistralai
    "mistral-7b": _shape("mistral", (4096, 14_336), 32, (32, 8, 128), (32_768, 32_768)),
    "mistral-7b-v0.1": _shape("mistral", (4096, 14_336), 32, (32, 8, 128), (32_000, 32_768)),
    "mistral-nemo-12b": _shape("mistral", (5120, 14_336), 40, (32, 8, 128), (131_072, 131_072)),
    "mistral-small-24b": _shape("mistral", (5120, 32_768), 40, (32, 8, 128), (131_072, 32_768)),
    "mixtral-8x7b": _shape("mixtral", (4096, 14_336), 32, (32, 8, 128), (32_000, 32_768), more=_experts(8, 2, 14_336)),
    # Ministral 3, the language models
    "ministral3-3b": _shape("ministral3", (3072, 9216), 26, (32, 8, 128), (131_072, 262_144), tied=True),
    "ministral3-8b": _shape("ministral3", (4096, 14_336), 34, (32, 8, 128), (131_072, 262_144)),
    "ministral3-14b": _shape("ministral3", (5120, 16_384), 40, (32, 8, 128), (131_072, 262_144)),
    # Gemma 3, the language models without the vision tower: https://huggingface.co/google
    "gemma3-270m": _shape("gemma3_text", (640, 2048), 18, (4, 1, 256), (262_144, 32_768), tied=True),
    "gemma3-1b": _shape("gemma3_text", (1152, 6912), 26, (4, 1, 256), (262_144, 32_768), tied=True),
    "gemma3-4b": _shape("gemma3_text", (2560, 10_240), 34, (8, 4, 256), (262_208, 131_072), tied=True),
    "gemma3-12b": _shape("gemma3_text", (3840, 15_360), 48, (16, 8, 256), (262_208, 131_072), tied=True),
    "gemma3-27b": _shape("gemma3_text", (5376, 21_504), 62, (32, 16, 128), (262_208, 131_072), tied=True),
    # Gemma 4, the language models
    "gemma4-e2b": _gemma4((1536, 6144), 35, (8, 1), shared=20, every=5, use_double_wide_mlp=True),
    "gemma4-e4b": _gemma4((2560, 10_240), 42, (8, 2), shared=18),
    "gemma4-31b": _gemma4((5376, 21_504), 60, (32, 16), whole=4),
    "gemma4-26b-a4b": _gemma4(
        (2816, 2112),
        30,
        (16, 8),
        whole=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    # https://huggingface.co/microsoft, allenai, HuggingFaceTB, zai-org, ibm-granite, LGAI-EXAONE, openai
    "phi-4": _shape("phi3", (5120, 17_920), 40, (40, 10, 128), (100_352, 16_384)),
    "phi-4-mini": _shape("phi3", (3072, 8192), 32, (24, 8, 128), (200_064, 131_072), tied=True),
    "olmo2-7b": _shape("olmo2", (4096, 11_008), 32, (32, 32, 128), (100_352, 4096)),
    "olmo3-7b": _shape("olmo3", (4096, 11_008), 32, (32, 32, 128), (100_278, 65_536)),
    "olmo3-32b": _shape("olmo3", (5120, 27_648), 64, (40, 8, 128), (100_278, 65_536)),
    "smollm2-135m": _shape("llama", (576, 1536), 30, (9, 3, 64), (49_152, 8192), tied=True),
    "smollm2-360m": _shape("llama", (960, 2560), 32, (15, 5, 64), (49_152, 8192), tied=True),
    "smollm2-1.7b": _shape("llama", (2048, 8192), 24, (32, 32, 64), (49_152, 8192), tied=True),
    "smollm3-3b": _shape("smollm3", (2048, 11_008), 36, (16, 4, 128), (128_256, 65_536), tied=True),
    "glm4-9b": _shape("glm4", (4096, 13_696), 40, (32, 2, 128), (151_552, 32_768)),
    "granite-8b": _shape("granite", (4096, 12_800), 40, (32, 8, 128), (49_159, 131_072), tied=True),
    "exaone4-32b": _shape("exaone4", (5120, 27_392), 64, (40, 8, 128), (102_400, 131_072)),
    "gpt-oss-120b": _shape("gpt_oss", (2880, 2880), 36, (64, 8, 64), (201_088, 131_072), more=_experts(128, 4, 2880)),
    "gpt-oss-20b": _shape("gpt_oss", (2880, 2880), 24, (64, 8, 64), (201_088, 131_072), more=_experts(32, 4, 2880)),
}


# For some shapes, the names of models with this shape on the Hugging Face hub. The names have no owner, and none of the
# words in `_VARIANTS`. All other shapes are found by their own names.
_HUB_NAMES = {
    "llama-1b": ("Llama-3.2-1B",),
    "llama-3b": ("Llama-3.2-3B",),
    "llama-8b": ("Llama-3.1-8B", "Llama-3-8B", "DeepSeek-R1-Distill-Llama-8B"),
    "llama-70b": ("Llama-3.1-70B", "Llama-3.3-70B", "Llama-3-70B", "DeepSeek-R1-Distill-Llama-70B"),
    "llama-405b": ("Llama-3.1-405B",),
    "tinyllama-1.1b": ("TinyLlama-1.1B-v1.0",),
    "qwen-0.5b": ("Qwen2.5-0.5B", "Qwen2.5-Coder-0.5B"),
    "qwen-1.5b": ("Qwen2.5-1.5B", "Qwen2.5-Coder-1.5B"),
    "qwen-3b": ("Qwen2.5-3B", "Qwen2.5-Coder-3B"),
    "qwen-7b": ("Qwen2.5-7B", "Qwen2.5-Coder-7B"),
    "qwen-14b": ("Qwen2.5-14B", "Qwen2.5-Coder-14B"),
    "qwen-32b": ("Qwen2.5-32B", "Qwen2.5-Coder-32B"),
    "qwen-72b": ("Qwen2.5-72B",),
    "mistral-7b": ("Mistral-7B-v0.3",),
    "mistral-nemo-12b": ("Mistral-Nemo", "Mistral-Nemo-2407"),
    "mistral-small-24b": ("Mistral-Small-24B-2501",),
    "mixtral-8x7b": ("Mixtral-8x7B-v0.1",),
    "olmo2-7b": ("OLMo-2-1124-7B",),
    "olmo3-32b": ("Olmo-3.1-32B",),
    "glm4-9b": ("GLM-4-9B-0414",),
    "granite-8b": ("granite-3.3-8b",),
    "exaone4-32b": ("EXAONE-4.0-32B",),
}
# The tokens of the longest sequence, by the `_key()` of a model's name. A model is listed only if this number differs
# from the number in the model's shape. All models with "2507" in their names have `_LONGEST_2507`.
_LONGEST = {"llama38b": 8192, "llama370b": 8192}
_LONGEST_2507 = 262_144
# Words in a model's name that do not change the shape.
_VARIANTS = {"base", "instruct", "it", "pt", "chat", "think", "thinking", "reasoning", "sft", "dpo"}
_VARIANTS |= {"meta", "hf", "bf16", "fp8", "2507", "2512"}
# An error suggests at most 3 names, each with at least this similarity to the user's name.
_NEAR_MAX, _NEAR = 3, 0.6


def _key(name: str) -> str:
    """Returns a form of `name` for comparisons: in lower case, without owner, separators and words of `_VARIANTS`."""
    words = re.split(r"[-_: ]+", name.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in _VARIANTS)


# Maps the `_key()` of each name to the shape, and to the name that errors show.
_ON_THE_HUB = {_key(name): (shape, name) for shape, names in _HUB_NAMES.items() for name in names}
_ON_THE_HUB |= {_key(shape): (shape, shape) for shape in SHAPES if shape not in _HUB_NAMES}
_NAMES = {**_ON_THE_HUB, **{_key(shape): (shape, shape) for shape in SHAPES}}


# The RAM that a plan assumes for another machine if the user gives neither --ram nor a budget.
ASSUMED_RAM = "64GB"
# A larger number in an option is a mistake, whatever the unit of the option is.
_FIGURE_MAX = 1e9


def positive(text: str) -> float:
    """Parses a number above 0.

    Raises:
        ValueError: `text` is not a number above 0, or the number is too large.
    """
    value = float(text)
    if not 0 < value < _FIGURE_MAX:
        raise ValueError(text)
    return value


def shape_named(path: Path) -> tuple[str, dict[str, Any]] | None:
    """Returns the name of the shape that `path` names, and the config of the shape; None if `path` exists.

    Raises:
        ConfigError: `path` does not exist, and no shape has this name. The message suggests names.
    """
    if path.exists():
        return None
    name = str(path)
    key = _key(name)
    # A name with an owner is the name of a model on the hub: Qwen/Qwen-7B is not the shape "qwen-7b", which is Qwen2.5.
    known = _ON_THE_HUB if "/" in name else _NAMES
    if key in known:
        shape = known[key][0]
        longest = _LONGEST_2507 if "2507" in name else _LONGEST.get(key, SHAPES[shape]["max_position_embeddings"])
        return shape, {**SHAPES[shape], "max_position_embeddings": longest}
    near = [_NAMES[one][1] for one in difflib.get_close_matches(key, _NAMES, n=_NEAR_MAX, cutoff=_NEAR)]
    words = f"did you mean {' or '.join(near)}?" if near else f"the built-in names are {', '.join(SHAPES)}."
    raise ConfigError(
        f"{path} does not exist, and is not the name of a built-in model: {words} For any other model, give its "
        "config.json, or the folder with its config.json"
    )
