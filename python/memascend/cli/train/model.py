"""Builds the model of a folder on "meta", with its tokenizer, its adapters and the optimizer that was asked for."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.files import Names
from memascend.checkpoint.weights import WeightFiles
from memascend.cli.plan.model import read_config
from memascend.cli.train.data import seed_of
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memascend.cli.train.settings import Settings


_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_INSTALL = "pip install 'memascend[train]'"
# Where each tensor of a merged model begins.
_ALIGNED = 64


def require_transformers() -> Any:
    """It.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"memascend train needs transformers, which is not installed: run {_INSTALL}") from error
    return transformers


@dataclass(frozen=True)
class Described:
    """A model without values, and where they come from."""

    model: Any  # on "meta", but for adapters, which have their first values
    weights: str | Callable[[str, torch.Tensor], torch.Tensor]  # for `offload(weights=)`
    adapted: bool  # whether adapters alone are trained

    @property
    def own(self) -> Any:
        """The model of transformers, below adapters."""
        return self.model.get_base_model() if self.adapted else self.model

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
    # The tokenizer looks at it, too.
    if (folder / _CONFIG).is_file():
        read_config(folder / _CONFIG)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer of {folder} cannot be read ({type(error).__name__}: {error}): fetch its files again"
        ) from error


def describe_model(folder: Path, settings: Settings) -> Described:
    """The language model of a folder, with adapters where these are asked for.

    Raises:
        ConfigError: it is no causal language model that transformers knows, or its weights do not fit it.
    """
    model, files = _plain(folder)
    model.train()
    _recompute(model)
    if settings.lora is None:
        files.check(Names(model), dict(model.named_parameters()))
        return Described(model, str(folder), adapted=False)
    return _adapted(model, files, folder, settings)


def _plain(folder: Path) -> tuple[Any, WeightFiles]:
    """The model on "meta", and the files of its weights."""
    transformers = require_transformers()
    files = WeightFiles(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _require_one_stack(config, folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=_dtype(config, files), trust_remote_code=False
            )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} cannot make a causal language model of {folder} "
            f"({type(error).__name__}: {error}): give another model, or install another transformers"
        ) from error
    _require_causal(model, folder)
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
                f"transformers cannot read {folder / _GENERATION}: {type(error).__name__}: {error}; correct it, or "
                "remove it"
            ) from error
    return model, files


def _require_one_stack(config: Any, folder: Path) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{folder} is an encoder-decoder ({config.model_type}), and memascend train trains causal decoders only: "
            "train it in your own loop, with memascend.offload()"
        )


def _require_causal(model: Any, folder: Path) -> None:
    """Refuse attention in both directions, to which the next token is no secret."""
    config, source = model.config, inspect.getsource(sys.modules[type(model).__module__])
    # Some configurations have the word, and models that do not ask for it.
    looks_back = getattr(config, "is_decoder", True) or "config.is_decoder" not in source
    if looks_back and getattr(config, "causal", True) and config.model_type != "xlnet":
        return
    raise ConfigError(
        f"{folder} is an encoder ({', '.join(config.architectures or [config.model_type])}): its attention sees the "
        "tokens that it would predict, so the loss would mean nothing. memascend train trains causal decoders only: "
        "train an encoder in your own loop, with memascend.offload()"
    )


def keeps_rows_apart(model: Any) -> bool:
    """Whether attention stays within a row where several are in one sequence, told apart by their position ids."""
    source = inspect.getsource(sys.modules[type(model).__module__])
    kinds = set(getattr(model.config, "layer_types", None) or ())
    return (
        "position_ids=position_ids" in source
        and "causal_mask" in source
        and kinds <= {"full_attention", "sliding_attention", "chunked_attention"}
        and not any(isinstance(module, torch.nn.Conv1d) for module in model.modules())
    )


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


def _adapted(model: Any, files: WeightFiles, folder: Path, settings: Settings) -> Described:
    """The model with adapters on linear layers; they are on the CPU, and the model stays on meta."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"--lora needs peft, which is not installed: run {_INSTALL}") from error
    lora: Any = peft.tuners.lora.LoraLayer
    named = dict(model.named_parameters())
    files.check(Names(model), named)
    first_names = {id(parameter): name for name, parameter in named.items()}
    assert settings.lora is not None
    every = settings.lora_targets == "all-linear"
    config = peft.LoraConfig(
        r=settings.lora,
        lora_alpha=settings.lora_alpha or 2 * settings.lora,  # type: ignore[arg-type] # peft divides it
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear" if every else [name.strip() for name in settings.lora_targets.split(",")],
        task_type="CAUSAL_LM",
    )
    # The adapters say what they belong to.
    model.name_or_path = str(folder.absolute())
    with warnings.catch_warnings():
        # peft asks transformers for what later versions call otherwise.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"--lora-targets {settings.lora_targets}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(settings.seed, "adapters", 0))
        for name, module in adapted.named_modules():
            if isinstance(module, lora):
                if module.lora_embedding_A or not module.lora_A:
                    raise ConfigError(
                        f"--lora-targets names {name}, which is not linear: name linear layers, as q_proj,v_proj"
                    )
                for factor in (*module.lora_A.values(), *module.lora_B.values()):
                    factor.to_empty(device="cpu")
                for adapter in module.lora_A:
                    module.reset_lora_parameters(adapter, init_lora_weights=True)
    own = {name: first_names[id(p)] for name, p in adapted.named_parameters() if id(p) in first_names}

    def values(name: str, like: torch.Tensor) -> torch.Tensor:
        return files.tensor(own.get(name, name), like)

    return Described(adapted, values, adapted=True)


def merge(folder: Path, adapters: Path, merged: Path, tokenizer: Any) -> None:
    """Write the model of a folder with adapters added into another folder, which is new.

    The values lie in a file without a name beside it meanwhile, and not in memory.
    """
    import safetensors

    model, files = _plain(folder)
    settings = json.loads((adapters / "adapter_config.json").read_text(encoding="utf-8"))
    scale = settings["lora_alpha"] / settings["r"]
    files.check(Names(model), dict(model.named_parameters()))
    tied = Names(model).tied
    # Of what is tied, each name has the same tensor.
    state = model.state_dict(keep_vars=True)
    wanted = {name: like for name, like in state.items() if files.has(name) or name in tied}
    with (
        safetensors.safe_open(adapters / "adapter_model.safetensors", framework="pt") as factors,
        tempfile.NamedTemporaryFile(dir=merged) as file,
    ):
        keys: list[str] = list(factors.keys())
        added = {key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for key in keys}
        size = sum(like.nbytes + _ALIGNED for like in wanted.values())
        file.truncate(size)
        whole = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        values: dict[str, torch.Tensor] = {}
        shared: dict[int, str] = {}
        start = 0
        for name, like in wanted.items():
            if id(like) in shared:
                values[name] = values[shared[id(like)]]
                continue
            value = whole[start : start + like.nbytes].view(like.dtype).view(like.shape)
            start += -(-like.nbytes // _ALIGNED) * _ALIGNED
            value.copy_(files.tensor(name, like))
            module = name.removesuffix(".weight")
            if module in added:
                up, down = (
                    factors.get_tensor(f"base_model.model.{module}.lora_{which}.weight").float() for which in "BA"
                )
                change = (up @ down) * scale
                # transformers' Conv1D has its weight the other way round.
                if not isinstance(model.get_submodule(module), torch.nn.Linear):
                    change = change.T
                value.copy_((value.float() + change).to(like.dtype))
            values[name] = value
            shared[id(like)] = name
        model.save_pretrained(merged, state_dict=values)
    tokenizer.save_pretrained(merged)


def make_optimizer(settings: Settings, described: Described) -> list[torch.optim.Optimizer]:
    """The optimizer, or for muon the two of them, with the options that were given; biases and norms do not decay.

    Raises:
        ConfigError: torch has none of that name, or it does not have such an option.
    """
    given: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    for name in ("betas", "eps", "momentum"):
        value = settings.pair(name) if name == "betas" else getattr(settings, name)
        if value is not None:
            given[name] = value
    if settings.optimizer.lower() == "muon":
        momentum = {"momentum": given.pop("momentum")} if "momentum" in given else {}
        rates = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        hidden, others = _hidden_matrices(described)
        # The authors of Muon have it so; both are at AdamW's rates.
        asked: list[tuple[Any, Any, dict[str, Any]]] = [
            (torch.optim.Muon, hidden, {**rates, **momentum, "adjust_lr_fn": "match_rms_adamw"}),
            (torch.optim.AdamW, _groups(others, settings.weight_decay), given),
        ]
    else:
        kind = _class_of(settings.optimizer)
        asked = [(kind, _groups(described.trained, settings.weight_decay), given)]
    made = [_made(kind, groups, options) for kind, groups, options in asked if groups]
    for group in (group for optimizer in made for group in optimizer.param_groups):
        # The stored rate is the schedule's, made from this: no surprise to warn of.
        group["initial_lr"] = settings.lr
    return made


def _made(kind: Any, groups: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    known = inspect.signature(kind).parameters
    unknown = [name for name in options if name not in known]
    if unknown == ["weight_decay"] and not options["weight_decay"]:
        del options["weight_decay"]
    elif unknown:
        raise ConfigError(f"{kind.__name__} has no option --{unknown[0].replace('_', '-')}: leave it out")
    try:
        made: torch.optim.Optimizer = kind(groups, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{kind.__name__} rejects its options: {error}. Correct them") from error
    return made


# LBFGS evaluates the model several times in a step; SparseAdam takes sparse gradients alone; muon comes with AdamW.
_UNFIT = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon)


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    kinds = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in _UNFIT
    }
    kind = kinds.get(name.lower())
    if kind is None:
        raise ConfigError(f"--optimizer must be muon or one of torch.optim's {', '.join(sorted(kinds))}, not {name!r}")
    return kind


def _groups(trained: list[torch.nn.Parameter], decay: float) -> Any:
    if not decay:
        return trained
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    # A group of its own for what does not decay.
    return [group for group in ({"params": matrices}, {"params": others, "weight_decay": 0.0}) if group["params"]]


def _hidden_matrices(described: Described) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices of hidden layers, which Muon makes orthogonal; and the others: embeddings, head, biases and norms."""
    model = described.model
    ends = {
        id(parameter)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for parameter in module.parameters()
    }
    hidden = [one for one in described.trained if one.dim() == 2 and id(one) not in ends]
    orthogonal = set(map(id, hidden))
    return hidden, [one for one in described.trained if id(one) not in orthogonal]
