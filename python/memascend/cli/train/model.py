"""Builds the model of a folder on "meta", with its tokenizer, and adapters where they are asked for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.names import Names
from memascend.checkpoint.weights import WeightFiles
from memascend.cli.plan.sources import read_config
from memascend.cli.train.batches import seed_of
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_INSTALL = "pip install 'memascend[train]'"


def require_transformers() -> Any:
    """It.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"memascend train needs transformers, which is not installed: {_INSTALL}") from error
    return transformers


@dataclass(frozen=True)
class Described:
    """A model without values, and where they come from."""

    model: Any  # on "meta", but for adapters, which have their first values
    weights: str | Callable[[str, torch.Tensor], torch.Tensor]  # for `offload(weights=)`
    adapted: bool  # whether adapters alone are trained

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that learn."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder.

    Raises:
        ConfigError: there is none, or transformers cannot read it; or the config beside it is none.
    """
    transformers = require_transformers()
    if not folder.is_dir():
        raise ConfigError(
            f"--model {folder} is no folder: download the model first, with `hf download NAME --local-dir {folder}`"
        )
    # The tokenizer looks at it, too.
    if (folder / _CONFIG).is_file():
        read_config(folder / _CONFIG)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{folder} has no tokenizer that can be read: {type(error).__name__}: {error}") from error


def describe_model(folder: Path, rank: int | None, seed: int) -> Described:
    """The language model of a folder.

    Args:
        folder: with config.json and safetensors.
        rank: of adapters, which are then all that is trained; None: everything is.
        seed: of the adapters' first values.

    Raises:
        ConfigError: it is no causal language model that transformers knows, or its weights do not fit it.
    """
    transformers = require_transformers()
    files = WeightFiles(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=_dtype(config, files), trust_remote_code=False
            )
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} makes no causal language model of {folder}: "
            f"{type(error).__name__}: {error}"
        ) from error
    names = Names(model)
    for name in files.untied(names):
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, torch.nn.Parameter(torch.empty_like(model.get_parameter(name))))
    # A folder need not have one.
    if (folder / _GENERATION).exists():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ConfigError(
                f"{folder / _GENERATION} is no configuration that transformers reads: {type(error).__name__}: {error}; "
                "mend it, or take it away"
            ) from error
    model.train()
    _recompute(model)
    if rank is None:
        files.check(Names(model), dict(model.named_parameters()))
        return Described(model, str(folder), adapted=False)
    return _adapted(model, files, folder, rank, seed)


def _dtype(config: Any, files: WeightFiles) -> torch.dtype:
    """As the config says, or else the files."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    found = next((dtype for dtype, _ in map(files.described, files.keys) if dtype and dtype.is_floating_point), None)
    return found or torch.bfloat16


def _recompute(model: Any) -> None:
    """Let the backward compute each block again: memory then holds one block's activations, and not all."""
    if not model.supports_gradient_checkpointing:
        return
    how = {"use_reentrant": False}
    # Its name in later versions.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _adapted(model: Any, files: WeightFiles, folder: Path, rank: int, seed: int) -> Described:
    """The model with adapters on all linear layers but the head; they are on the CPU, and the model stays on meta."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"--lora needs peft, which is not installed: {_INSTALL}") from error
    lora: Any = peft.tuners.lora.LoraLayer
    named = dict(model.named_parameters())
    files.check(Names(model), named)
    first_names = {id(parameter): name for name, parameter in named.items()}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    # The adapters say what they belong to.
    model.name_or_path = str(folder.absolute())
    with warnings.catch_warnings():
        # peft asks transformers for what later versions call otherwise.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.get_peft_model(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "adapters", 0))
        for module in adapted.modules():
            if isinstance(module, lora):
                for factor in (*module.lora_A.values(), *module.lora_B.values()):
                    factor.to_empty(device="cpu")
                for name in module.lora_A:
                    module.reset_lora_parameters(name, init_lora_weights=True)
    own = {name: first_names[id(p)] for name, p in adapted.named_parameters() if id(p) in first_names}

    def values(name: str, like: torch.Tensor) -> torch.Tensor:
        return files.tensor(own.get(name, name), like)

    return Described(adapted, values, adapted=True)
