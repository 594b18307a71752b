"""Builds a model on the device "meta" from its config, and traces operations and memory of a forward and backward."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import logging
import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memascend.cli.plan.shapes import SHAPES, shape_named
from memascend.cli.plan.subject import Subject, Trace, tile_bytes
from memascend.errors import ConfigError
from memascend.plan.units import tied_bytes
from memascend.session.decide import planned
from memascend.text import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memascend.cli.plan.subject import Batch, Loss


_CONFIG = "config.json"
_CONFIG_BYTES_MAX = 16 << 20
# The largest number of layers in a model. Most published models have at most a few hundred layers, and DeepNet has
# 1,000. Even on the device "meta", each layer takes a millisecond or more, and a few hundred kilobytes.
_LAYERS_MAX = 10_000
# Matches keys of a config that give the number of layers, such as num_hidden_layers, n_layer, decoder_layers,
# num_blocks, depth.
_DEPTH = re.compile(r"(^|_)(n?layers?|blocks?|depths?)$")


def subject(path: Path, *, dtype: torch.dtype | None, optimizer: str, recomputes: bool) -> Subject:
    """Describes a model. `path` is a config.json, a folder with a config.json, or a name that `shape_named()` knows.

    `dtype` is the dtype of the parameters. If `dtype` is None, parameters have the config's dtype, or bfloat16 if the
    config names no dtype of torch. `optimizer` is the name of a class in torch.optim. `recomputes` is True if
    activation checkpointing is on.
    """
    model, by = describe(path, dtype)
    make: Any = _optimizer_class(optimizer)
    owner = make([one for one in model.parameters() if one.requires_grad])
    every = list(model.parameters())
    trained = [one for one in every if one.requires_grad]
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)

    return Subject(
        by=by,
        parameters=sum(one.numel() for one in every),
        trained=sum(one.numel() for one in trained),
        tied_bytes=tied_bytes(model),
        dtype=str(every[0].dtype).removeprefix("torch."),
        longest=longest if isinstance(longest, int) else None,
        checkpointing=_checkpointing(model),
        plan=functools.cache(functools.partial(planned, model, owner)),
        trace=functools.cache(functools.partial(trace, model, recomputes=recomputes)),
        module=model,
    )


def describe(path: Path, dtype: torch.dtype | None) -> tuple[nn.Module, str]:
    """Makes the model on the device "meta". Returns the model, and a phrase that says where its config is from.

    `path` and `dtype` are described in `subject()`.
    """
    shape = shape_named(path)
    name = None if shape is None else shape[0]
    config = path / _CONFIG if path.is_dir() else path
    if name is None and (not config.is_file() or config.suffix != ".json"):
        hidden = f", or run the command in another folder to plan the built-in {path}" if str(path) in SHAPES else ""
        raise ConfigError(
            f"{config} is missing or is not a model's config: give the config.json, or the folder that contains it"
            f"{hidden}"
        )
    values = read_config(config) if shape is None else shape[1]
    try:
        import transformers
    except ImportError as error:
        what = f"the shape of {name} with these options needs" if name else f"planning {config} needs"
        raise ConfigError(f"{what} transformers, which is not installed: pip install transformers") from error
    model = _configured(transformers, config, values, dtype)
    if values.get("tie_word_embeddings") is False:
        _untie_head(model)
    return model, f"the shape of {name}" if name else str(config)


# Optimizer classes that cannot be planned. LBFGS computes the model several times in a step. SparseAdam needs sparse
# gradients. Muon updates matrices only.
_UNFIT = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon)


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Returns the class in torch.optim with this name. Upper and lower case are equal."""
    kinds = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in _UNFIT
    }
    if name.lower() not in kinds:
        raise ConfigError(f"--optimizer must be one of torch.optim's {', '.join(sorted(kinds))}, not {name!r}")
    return kinds[name.lower()]


def _untie_head(model: nn.Module) -> None:
    """Gives the LM head a separate weight, if transformers has tied the LM head to the embedding.

    For some models (Flan-T5, for example), transformers ties the two weights of a new model, but does not tie them when
    it loads a checkpoint.
    """
    from memascend.checkpoint.files import Names

    head: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = model.get_output_embeddings()  # type: ignore[operator]
    if any(f"{name}.weight" in Names(model).tied for name, module in model.named_modules() if module is head):
        head.register_parameter("weight", nn.Parameter(torch.empty_like(head.weight)))


def read_config(config: Path) -> dict[str, Any]:
    """Reads and checks a model's config.json.

    Raises:
        ConfigError: the file is too large, is not a JSON object, or has more than `_LAYERS_MAX` layers.
    """
    if config.stat().st_size > _CONFIG_BYTES_MAX:
        raise ConfigError(
            f"{config} is larger than {_CONFIG_BYTES_MAX} bytes, so it is not a config: give the model's config.json"
        )
    try:
        values = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{config} is not valid JSON ({error}): correct the file, or download it again") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{config} is not a config, since it contains a {type(values).__name__} instead of a JSON object: give the "
            "model's config.json"
        )
    _require_layers(config, values)
    return values


def _require_layers(config: Path, values: dict[str, Any]) -> None:
    """Raises ConfigError if the config has more than `_LAYERS_MAX` layers, before transformers creates the layers."""
    for key, value in values.items():
        if isinstance(value, dict):
            _require_layers(config, value)
        elif isinstance(value, int) and value > _LAYERS_MAX and _DEPTH.search(key):
            raise ConfigError(
                f"{config} has {key} = {value}, but memascend plans models of at most {_LAYERS_MAX} layers, because "
                f"more layers would take minutes and gigabytes: correct {key}"
            )


def _configured(transformers: Any, config: Path, values: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """Makes the model that a config describes, by a class of transformers. Never runs code from the model's folder."""
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(
            f"{config} has no model_type that is text, so the kind of model is not known: set model_type in the file"
        )
    known = values.get("dtype", values.get("torch_dtype"))
    if dtype is None:
        dtype = getattr(torch, known, None) if isinstance(known, str) else None
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    try:
        made = transformers.AutoConfig.for_model(kind, **{**values, "use_cache": False})
        named = [getattr(transformers, str(name), None) for name in values.get("architectures") or ()]
        chosen = next((one for one in named if isinstance(one, type)), None)
        with torch.device("meta"):
            if chosen is not None:
                model: nn.Module = chosen(made)
                return model.to(dtype)
            for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
                if type(made) in auto._model_mapping:  # noqa: SLF001
                    model = auto.from_config(made)
                    return model.to(dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} cannot make a model from {config} ({type(error).__name__}: "
            f"{error}): correct the config, or install another version of transformers"
        ) from error
    raise ConfigError(
        f"transformers {transformers.__version__} has no model of the model_type {kind!r}: install a newer version of "
        "transformers, or correct model_type"
    )


class _Watch(TorchDispatchMode):
    """Counts the operations and the memory of all torch calls, including those of the backward.

    The bytes of a storage count from the storage's first tensor until the storage is freed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.peak = 0
        self.at_peak: list[tuple[int, tuple[int, ...]]] = []
        self._bytes = 0
        own = (*model.parameters(), *model.buffers())
        # Storages of parameters and buffers are not counted here, because the plan counts them separately.
        self._own = {tensor.untyped_storage()._cdata for tensor in own}  # noqa: SLF001
        # For each live storage, by its address: the bytes of the storage, and the shape of its first tensor.
        self.living: dict[int, tuple[int, tuple[int, ...]]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._count(tensor)
        if function.is_view or not made:
            return out
        args, kwargs = _unmasked(function, args, kwargs or {})
        self.flops += _flops(function, args, kwargs, out)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        if key in self.living or key in self._own or _is_mask(tensor):
            return
        nbytes = storage.nbytes()
        self.living[key] = nbytes, tuple(tensor.shape)
        self._bytes += nbytes
        weakref.finalize(storage, self._freed, key)
        if self._bytes > self.peak:
            self.peak = self._bytes
            self.at_peak = list(self.living.values())

    def _freed(self, key: int) -> None:
        nbytes, _ = self.living.pop(key, (0, ()))
        self._bytes -= nbytes


def _is_mask(tensor: torch.Tensor) -> bool:
    """True if the tensor has the shape of a causal mask.

    transformers makes a causal mask while a model is traced. In training without padding, it passes is_causal=True
    instead.
    """
    return tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[2] == tensor.shape[3]


def _unmasked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, with a causal mask replaced by is_causal=True."""
    mask = kwargs.get("attn_mask")
    names = [argument.name for argument in function._schema.arguments]  # noqa: SLF001
    if not isinstance(mask, torch.Tensor) or not _is_mask(mask) or "is_causal" not in names:
        return args, kwargs
    at = names.index("is_causal")
    given = {**kwargs, "attn_mask": None}
    if at < len(args):
        return (*args[:at], True, *args[at + 1 :]), given
    return args, {**given, "is_causal": True}


def _flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Returns the number of floating-point operations of a call, by the formulas of torch and `_grouped_flops`.

    Returns 0 if there is no formula for the call.
    """
    packet = function.overloadpacket
    # torch 2.11 has no formula for attention on a CPU: use the formula for other devices.
    operator = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), None)
    count = flop_registry.get(packet) or flop_registry.get(operator)
    if count is None:
        return _grouped_flops(args) if "grouped_mm" in packet.__name__ else 0
    flops = int(count(*args, **kwargs, out_val=out))
    names = [argument.name for argument in function._schema.arguments]  # noqa: SLF001
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Attention kernels do not compute the masked half of causal attention.
    return flops // 2 if given.get("is_causal") is True else flops


def _grouped_flops(args: tuple[Any, ...]) -> int:
    """Returns the operations of a grouped matrix product (of experts), for which torch has no formula.

    Each row is multiplied by one of the matrices.
    """
    rows, others = args[0], args[1]
    return 2 * int(rows.shape[-2]) * int(rows.shape[-1]) * int(others.shape[-1])


def trace(model: nn.Module, batch: Batch, *, recomputes: bool) -> Trace | str:
    """Runs one forward and backward of a language model on fake tensors, which have shapes but no memory.

    Returns the trace. If the model cannot be traced, returns the reason as text.
    """
    if getattr(model, "main_input_name", None) != "input_ids":
        return "only language models of transformers can be traced"
    model = copy.deepcopy(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        settle(model)
    model.train()
    if recomputes:
        recompute(model)
    head = _head(model) if batch.loss == "chunked" else None
    kind: Loss = "full" if batch.loss == "chunked" and head is None else batch.loss
    watch = _Watch(model)
    forward = kept = 0
    failed = ""
    # This logger is disabled because its records of a failed trace refer to a traceback, which would keep the hooks of
    # activation checkpointing alive.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with fake, without_gradients_kept(model), watch, replaced(log, "disabled", value=True):
        try:
            tokens = torch.zeros(batch.sequences, batch.length, dtype=torch.long, device="cpu")
            loss = _loss(model, head, tokens, kind, on_host=batch.on_host)
            kept = _kinds(model, list(watch.living.values()))["activations"]
            forward = watch.flops
            loss.backward()
            del loss
        except Exception as error:  # noqa: BLE001
            # The code of some models reads values of tensors, for example to route tokens to experts. Fake tensors have
            # no values.
            failed = f"{type(model).__name__} cannot be traced on tensors without values ({type(error).__name__})"
    if failed:
        # The hooks of the interrupted activation checkpointing stay active until Python collects them.
        gc.collect()
        return failed
    # `_ChunkedLoss` computes nothing, so the products of the LM head are added here. The forward has one product. The
    # backward has one product for the logits, one for the gradient of the hidden states and, if the LM head is trained,
    # one for the gradient of its weight.
    product = 0 if head is None else 2 * batch.tokens * head.weight.numel()
    times = 2 + (head is not None and head.weight.requires_grad)
    return Trace(
        tokens=batch.tokens,
        forward=forward + product,
        backward=watch.flops - forward + times * product,
        peak=watch.peak,
        held=_kinds(model, watch.at_peak),
        kept=kept,
        recomputes=recomputes,
        loss=kind,
    )


def _head(model: Any) -> Any:
    """Returns the LM head to which a chunked loss can be applied; None if the model has no such LM head."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None or getattr(model.config, "is_encoder_decoder", False) else find()
    weight = getattr(head, "weight", None)
    # In some models, a layer between the last hidden states and the LM head changes the width. A chunked loss cannot be
    # applied to such a model.
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    return head if weight is not None and weight.shape[-1] == width else None


def _loss(model: Any, head: Any, tokens: torch.Tensor, kind: Loss, *, on_host: bool) -> Any:
    """Computes the loss of a batch. `kind` is one of the values of `Loss`."""
    if kind == "full":
        return model(input_ids=tokens, labels=tokens).loss
    if kind == "score":
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits.float().mean()
    model.config.get_text_config().use_cache = False
    hidden = model.base_model(input_ids=tokens).last_hidden_state
    words, width = head.weight.shape
    nbytes = tile_bytes(tokens.numel(), words, width, on_host=on_host, element=hidden.element_size())
    return _ChunkedLoss.apply(hidden[:, :-1].reshape(-1, width), head.weight, nbytes)


class _ChunkedLoss(torch.autograd.Function):
    """Allocates the same memory as a chunked loss that sums gradients in float32, but computes nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, nbytes: int) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.nbytes = nbytes
        torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        tile = torch.empty(ctx.nbytes, dtype=torch.uint8, device="cpu")
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        sums = [torch.zeros_like(saved, dtype=torch.float32) if needs else None for saved, needs in needed]
        found = [
            None if total is None else total.to(saved.dtype)
            for total, saved in zip(sums, ctx.saved_tensors, strict=True)
        ]
        del tile
        return *found, None


def settle(model: nn.Module) -> None:
    """Replaces all parameters and buffers with uninitialised tensors on the CPU. Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")  # noqa: SLF001


def _checkpointing(model: nn.Module) -> str | None:
    """Returns the name of the model's method that turns on activation checkpointing; None if it is not supported."""
    # Newer versions of transformers call the method activation_checkpointing_enable.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    return f"{name}_checkpointing_enable" if getattr(model, "supports_gradient_checkpointing", False) else None


def recompute(model: nn.Module) -> None:
    """Turns on activation checkpointing if the model supports it."""
    method = _checkpointing(model)
    if method is not None:
        change: Any = getattr(model, method)
        change(**{method.replace("enable", "kwargs"): {"use_reentrant": False}})


@contextlib.contextmanager
def without_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Frees each gradient as soon as the gradient is complete, as training with `offload()` does."""

    def free(parameter: torch.Tensor) -> None:
        parameter.grad = None

    with contextlib.ExitStack() as hooks:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(free))
        yield


def _kinds(model: nn.Module, living: list[tuple[int, tuple[int, ...]]]) -> dict[str, int]:
    """Returns the sum of the bytes of storages by kind. The kind of a storage is guessed from its shape.

    `living` has the bytes and the shape of each storage.
    """
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes if len(shape) == 2}
    held = {"logits and their gradients": 0, "gradients of parameters": 0, "activations": 0}
    for nbytes, shape in living:
        if shape in shapes:
            held["gradients of parameters"] += nbytes
        elif vocabulary is not None and vocabulary in shape:
            held["logits and their gradients"] += nbytes
        else:
            held["activations"] += nbytes
    return held
