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
from torch.optim._muon import muon
from torch.optim.adam import adam

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
        raise ConfigError(f"the tokenizer of {folder} cannot be read: {type(error).__name__}: {error}") from error


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
            f"transformers {transformers.__version__} cannot make a causal language model of {folder}: "
            f"{type(error).__name__}: {error}"
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


# What is no option of a class that a run may choose: these belong to the loop or to where it computes.
_ADAMW_BETAS, _ADAMW_EPS = (0.9, 0.999), 1e-8


_MUON_COEFFICIENTS = (3.4445, -4.775, 2.0315)


def make_optimizer(settings: Settings, described: Described) -> torch.optim.Optimizer:
    """The optimizer, with the options that were given; biases and norms do not decay.

    Raises:
        ConfigError: torch has none of that name, or it does not have such an option.
    """
    given: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    for name in ("betas", "eps", "momentum"):
        value = settings.pair(name) if name == "betas" else getattr(settings, name)
        if value is not None:
            given[name] = value
    if settings.optimizer.lower() == "muon":
        kind: Any = Muon
        groups = _muon_groups(described)
    else:
        kind = _class_of(settings.optimizer)
        groups = _groups(described, settings.weight_decay)
    known = inspect.signature(kind).parameters
    unknown = [name for name in given if name not in known]
    if unknown == ["weight_decay"] and not settings.weight_decay:
        del given["weight_decay"]
    elif unknown:
        raise ConfigError(f"{kind.__name__} has no option --{unknown[0].replace('_', '-')}: leave it out")
    try:
        made: torch.optim.Optimizer = kind(groups, **given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{kind.__name__} rejects its options: {error}") from error
    for group in made.param_groups:
        # The stored rate is the schedule's, made from this: no surprise to warn of.
        group["initial_lr"] = settings.lr
    return made


# LBFGS evaluates the model several times in a step; SparseAdam takes sparse gradients alone; muon is our own.
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


def _groups(described: Described, decay: float) -> Any:
    if not decay:
        return described.trained
    matrices = [parameter for parameter in described.trained if parameter.dim() > 1]
    others = [parameter for parameter in described.trained if parameter.dim() <= 1]
    # A group of its own for what does not decay.
    return [group for group in ({"params": matrices}, {"params": others, "weight_decay": 0.0}) if group["params"]]


def _muon_groups(described: Described) -> list[dict[str, Any]]:
    """Matrices of hidden layers, which are made orthogonal; and the others, as Muon's author has it, with AdamW."""
    model = described.model
    ends = {
        id(parameter)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for parameter in module.parameters()
    }
    hidden = [one for one in described.trained if one.dim() == 2 and id(one) not in ends]
    orthogonal = {id(one) for one in hidden}
    others = [one for one in described.trained if id(one) not in orthogonal]
    matrices = [one for one in others if one.dim() > 1]
    vectors = [one for one in others if one.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": hidden, "orthogonal": True},
        {"params": matrices, "orthogonal": False},
        {"params": vectors, "orthogonal": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Muon(torch.optim.Optimizer):
    """Muon for groups of matrices that are `orthogonal`, AdamW for the others, both at AdamW's rates.

    One optimizer, since a run has one; its updates are those of torch.optim.Muon with
    `adjust_lr_fn="match_rms_adamw"`, and of torch.optim.AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = _ADAMW_BETAS,
        eps: float = _ADAMW_EPS,
    ) -> None:
        """Take groups of parameters, each `orthogonal` or not."""
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update what has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    (self._orthogonal if group["orthogonal"] else self._elementwise)(parameter, group)
        return loss

    def _orthogonal(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        muon(
            [parameter],
            [parameter.grad],
            [state["momentum_buffer"]],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=True,
            ns_coefficients=_MUON_COEFFICIENTS,
            eps=1e-7,
            ns_steps=5,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )

    def _elementwise(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        adam(
            [parameter],
            [parameter.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=True,
        )
