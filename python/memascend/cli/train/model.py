"""Builds the model of a folder on "meta", with its tokenizer, its adapters and its optimizer."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.files import Names
from memascend.checkpoint.weights import WeightFiles
from memascend.cli.plan.model import optimizer_class, read_config, recompute, untie, with_adapters
from memascend.cli.train.data import seed_of
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memascend.cli.train.settings import Settings


_CONFIG = "config.json"
_GENERATION = "generation_config.json"
# The alignment of each tensor of a merged model.
_ALIGNED = 64


def require_transformers() -> Any:
    """The module transformers.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "memascend train needs transformers, which is not installed: run pip install 'memascend[train]'"
        ) from error
    return transformers


@dataclass(frozen=True)
class Described:
    """A model without values, and the source of its values."""

    model: Any  # on "meta"; adapters are on the CPU, with their first values
    weights: str | Callable[[str, torch.Tensor], torch.Tensor]  # for `offload(weights=)`
    adapted: bool  # whether only adapters are trained

    @property
    def own(self) -> Any:
        """The model of transformers, without adapters."""
        return self.model.get_base_model() if self.adapted else self.model

    @property
    def nbytes(self) -> int:
        """The bytes of all values, as they are saved."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder.

    Raises:
        ConfigError: there is none, or transformers cannot read it or the config beside it.
    """
    transformers = require_transformers()
    # AutoTokenizer reads the config, too.
    if (folder / _CONFIG).is_file():
        read_config(folder / _CONFIG)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer of {folder} cannot be read ({type(error).__name__}: {error}): fetch its files again"
        ) from error


def describe_model(folder: Path, settings: Settings) -> Described:
    """The language model of a folder, with the adapters of --lora.

    Raises:
        ConfigError: transformers knows no causal language model of this kind, or the weights do not fit.
    """
    model, files = _plain(folder)
    model.train()
    recompute(model)
    files.check(Names(model), dict(model.named_parameters()))
    if settings.lora is None:
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
    untie(model, files.untied(Names(model)))
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
    """Reject bidirectional attention, which sees the token that it would predict."""
    config, source = model.config, inspect.getsource(sys.modules[type(model).__module__])
    # Some configs have is_decoder although the model's code does not read it.
    looks_back = getattr(config, "is_decoder", True) or "config.is_decoder" not in source
    if looks_back and getattr(config, "causal", True) and config.model_type != "xlnet":
        return
    raise ConfigError(
        f"{folder} is an encoder ({', '.join(config.architectures or [config.model_type])}): its attention sees the "
        "tokens that it would predict, so the loss would mean nothing. memascend train trains causal decoders only: "
        "train an encoder in your own loop, with memascend.offload()"
    )


def keeps_rows_apart(model: Any) -> bool:
    """Whether position ids keep attention within an example if several share a sequence."""
    source = inspect.getsource(sys.modules[type(model).__module__])
    kinds = set(getattr(model.config, "layer_types", None) or ())
    return (
        "position_ids=position_ids" in source
        and "causal_mask" in source
        and kinds <= {"full_attention", "sliding_attention", "chunked_attention"}
        and not any(isinstance(module, torch.nn.Conv1d) for module in model.modules())
    )


def _dtype(config: Any, files: WeightFiles) -> torch.dtype:
    """The dtype of the config, or else of the files."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    found = next((dtype for dtype, _ in map(files.described, files.keys) if dtype and dtype.is_floating_point), None)
    return found or torch.bfloat16


def _adapted(model: Any, files: WeightFiles, folder: Path, settings: Settings) -> Described:
    """The model with adapters on linear layers. Adapters are on the CPU; the model stays on "meta"."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert settings.lora is not None
    # peft writes this name into the adapters' config.
    model.name_or_path = str(folder.absolute())
    adapted = with_adapters(
        model,
        settings.lora,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
        targets=settings.lora_targets,
    )
    from peft.tuners import lora

    layer: Any = lora.LoraLayer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(settings.seed, "adapters", 0))
        for name, module in adapted.named_modules():
            if isinstance(module, layer):
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
    """Write the model of a folder, with adapters added, into a new folder.

    Meanwhile the values are in a temporary file there, and not in memory.
    """
    import safetensors

    model, files = _plain(folder)
    settings = json.loads((adapters / "adapter_config.json").read_text(encoding="utf-8"))
    scale = settings["lora_alpha"] / settings["r"]
    files.check(Names(model), dict(model.named_parameters()))
    tied = Names(model).tied
    # Tied names share one tensor.
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
                # The weight of transformers' Conv1D is transposed.
                if not isinstance(model.get_submodule(module), torch.nn.Linear):
                    change = change.T
                value.copy_((value.float() + change).to(like.dtype))
            values[name] = value
            shared[id(like)] = name
        model.save_pretrained(merged, state_dict=values)
    tokenizer.save_pretrained(merged)


def make_optimizer(settings: Settings, described: Described) -> list[torch.optim.Optimizer]:
    """The optimizer, or the two optimizers of muon. Biases and norms do not decay.

    Raises:
        ConfigError: torch has no optimizer of this name, or the optimizer lacks an option.
    """
    given: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    further = {"betas": settings.pair_of_betas(), "eps": settings.eps, "momentum": settings.momentum}
    given |= {name: value for name, value in further.items() if value is not None}
    if settings.optimizer.lower() == "muon":
        momentum = {"momentum": given.pop("momentum")} if "momentum" in given else {}
        rates = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        hidden, others = _hidden_matrices(described)
        # The authors of Muon divide parameters in this way. Both optimizers take AdamW's learning rates.
        asked: list[tuple[Any, Any, dict[str, Any]]] = [
            (torch.optim.Muon, hidden, {**rates, **momentum, "adjust_lr_fn": "match_rms_adamw"}),
            (torch.optim.AdamW, _groups(others, settings.weight_decay), given),
        ]
    else:
        kind = optimizer_class(settings.optimizer, "muon or ")
        asked = [(kind, _groups(described.trained, settings.weight_decay), given)]
    made = [_made(kind, groups, options) for kind, groups, options in asked if groups]
    for group in (group for optimizer in made for group in optimizer.param_groups):
        # It marks the stored learning rate as scheduled: offload() does not warn that it differs.
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


def _groups(trained: list[torch.nn.Parameter], decay: float) -> Any:
    if not decay:
        return trained
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    # Biases and norms are a separate group.
    return [group for group in ({"params": matrices}, {"params": others, "weight_decay": 0.0}) if group["params"]]


def _hidden_matrices(described: Described) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices of hidden layers, which Muon trains; and the rest: embeddings, LM head, biases and norms."""
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
