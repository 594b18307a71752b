"""Builds models on "meta" from a Hugging Face config or from the headers of safetensors files."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_CONFIG = "config.json"
_CONFIG_BYTES_MAX = 16 << 20
# The deepest models that were published have some hundreds, DeepNet 1,000. torch takes a millisecond or more to make
# one of transformers' layers, and some hundred kilobytes, also on "meta".
_LAYERS_MAX = 10_000
# How configs call it: num_hidden_layers, n_layer, decoder_layers, num_blocks, depth.
_DEPTH = re.compile(r"(^|_)(n?layers?|blocks?|depths?)$")
# What is computed last, whatever the order of names says.
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|head|classifier|score|qa_outputs)\.")
# Statistics, and not parameters.
_BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq)$")


@dataclass(frozen=True)
class DescribedModel:
    """A model on "meta", and what described it."""

    model: nn.Module
    by: str


def describe(path: Path, dtype: torch.dtype | None) -> DescribedModel:
    """The model of a config, or of a file or folder of safetensors.

    Args:
        path: a JSON file, a safetensors file or its index, or a folder of either; the config in a folder goes first.
        dtype: of the parameters; None: as the config or the files say, bfloat16 where they do not.

    Raises:
        ConfigError: nothing there describes a model, or transformers is needed and is not there or does not know it.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise ConfigError(f"{path} is not there: give a config.json, a safetensors file, or a folder with one of them")
    is_config = path.is_file() and path.suffix == ".json" and not path.name.endswith(".index.json")
    config = path if is_config else folder / _CONFIG
    if not config.is_file():
        return DescribedModel(described_by_names(path, dtype), "the names and shapes in its safetensors")
    values = read_config(config)
    if not is_config and not values.get("model_type"):
        return DescribedModel(described_by_names(path, dtype), "the names and shapes in its safetensors")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{config} describes a model of transformers, which is not installed: pip install transformers"
            + ("" if is_config else f"; without {_CONFIG} beside them, names and shapes of safetensors do")
        ) from error
    tied = values.get("tie_word_embeddings") is not False
    model = _configured(transformers, config, values, dtype)
    for name in _untied(model, None if is_config else path, tied=tied):
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, nn.Parameter(torch.empty_like(model.get_parameter(name))))
    return DescribedModel(model, str(config))


def with_adapters(source: DescribedModel, rank: int) -> DescribedModel:
    """The model with adapters on all linear layers but the head, which are then all that is trained.

    Raises:
        ConfigError: it is no model of transformers, or peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("--lora needs peft, which is not installed: pip install 'memascend[train]'") from error
    if not hasattr(source.model, "config"):
        raise ConfigError("--lora is for language models of transformers: give the folder with its config.json")
    model: Any = source.model
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings(), torch.device("meta"):
        # peft asks transformers for what later versions call otherwise.
        warnings.simplefilter("ignore", FutureWarning)
        return DescribedModel(peft.get_peft_model(model, config), source.by)


def _untied(model: nn.Module, path: Path | None, *, tied: bool) -> list[str]:
    """Parameters that transformers ties when it makes a model, and not when it loads one (Flan-T5's head).

    Args:
        model: as transformers made it.
        path: of the files that decide it by their values, where there are any.
        tied: whether the config ties the head, for where there are none.
    """
    from memascend.checkpoint.names import Names
    from memascend.checkpoint.weights import WeightFiles

    names = Names(model)
    if path is not None and names.tied:
        # Without files, or without all of them, only the config is left.
        with contextlib.suppress(ConfigError):
            return WeightFiles(path).untied(names)
    head = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = None if tied else model.get_output_embeddings()  # type: ignore[operator]
    owned = [f"{name}.weight" for name, module in model.named_modules() if module is head]
    return [name for name in owned if name in names.tied]


def read_config(config: Path) -> dict[str, Any]:
    """What is in a model's config.json.

    Raises:
        ConfigError: it is none, or the model would have more layers than can be made.
    """
    if config.stat().st_size > _CONFIG_BYTES_MAX:
        raise ConfigError(f"{config} is larger than {_CONFIG_BYTES_MAX} bytes: this is no config")
    try:
        values = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{config} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{config} is no config: it holds a {type(values).__name__}, and no object")
    _require_layers(config, values)
    return values


def _require_layers(config: Path, values: dict[str, Any]) -> None:
    """Refuse depths that only a mistake has, before anything of such a length is made."""
    for key, value in values.items():
        if isinstance(value, dict):
            _require_layers(config, value)
        elif isinstance(value, int) and value > _LAYERS_MAX and _DEPTH.search(key):
            raise ConfigError(
                f"{config} says {key} = {value}, and a model of more than {_LAYERS_MAX} layers is not made, whose "
                "modules alone would take minutes and gigabytes: correct it"
            )


def _configured(transformers: Any, config: Path, values: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """The model that transformers makes of a config; code that comes with a model is never run."""
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{config} has no model_type, so that nobody knows which model it describes")
    known = values.get("dtype", values.get("torch_dtype"))
    if dtype is None:
        dtype = getattr(torch, known, None) if isinstance(known, str) else None
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    try:
        made = transformers.AutoConfig.for_model(kind, **values)
        named = [getattr(transformers, str(name), None) for name in values.get("architectures") or ()]
        chosen = next((one for one in named if isinstance(one, type)), None)
        with torch.device("meta"):
            if chosen is not None:
                return _of_type(chosen(made), dtype)
            for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
                if type(made) in auto._model_mapping:  # noqa: SLF001
                    return _of_type(auto.from_config(made), dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} makes no model of {config}: {type(error).__name__}: {error}"
        ) from error
    raise ConfigError(f"transformers {transformers.__version__} has no model for {kind!r}")


def _of_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return model.to(dtype)


# --- by names alone ----------------------------------------------------------------------------


class _Container(nn.Module):
    """A module of which nothing is known but what it holds."""


def described_by_names(path: Path, dtype: torch.dtype | None) -> nn.Module:
    """A tree of modules with the tensors that safetensors name; numbers in names are places in a list.

    Args:
        path: a file, an index, or a folder; only headers are read.
        dtype: of the parameters; None: as the files say.

    Raises:
        ConfigError: there are no safetensors there.
        CorruptionError: a file is damaged or cut short.
    """
    from memascend.checkpoint.weights import WeightFiles

    files = WeightFiles(path)
    root = _Container()
    for name in sorted(files.keys, key=_place):
        kind, shape = files.described(name)
        if kind is None:
            raise ConfigError(f"{name} in {path} is of a type that torch does not have")
        *parents, last = name.split(".")
        module: nn.Module = root
        for at, part in enumerate(parents):
            below = dict(module.named_children())
            if part not in below:
                following = [*parents, last][at + 1]
                below[part] = nn.ModuleList() if following.isdigit() and at + 1 < len(parents) else _Container()
                module.add_module(part, below[part])
            module = below[part]
        if not kind.is_floating_point or _BUFFERS.search(name):
            module.register_buffer(last, torch.empty(shape, dtype=kind, device="meta"))
        else:
            wanted = kind if dtype is None else dtype
            module.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=wanted, device="meta")))
    return root


def _place(name: str) -> tuple[bool, Iterable[tuple[bool, int, str]]]:
    """Numbers by their value; embeddings first, which is how alphabets have it, and the head last."""
    parts = tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split("."))
    return _HEAD.search(name) is not None, parts
