"""Builds models on "meta", and counts what torch computes and holds in one forward and backward of them."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import re
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
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
        raise ConfigError(
            f"{path} does not exist: give a config.json, a safetensors file, or a folder with one of them"
        )
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
    from memascend.checkpoint.files import Names
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
        raise ConfigError(
            f"{config} is larger than {_CONFIG_BYTES_MAX} bytes, so it is no config: give the model's config.json"
        )
    try:
        values = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{config} is no JSON ({error}): fetch it again") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{config} is no config: it holds a {type(values).__name__}, and no object. Give the model's config.json"
        )
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
        raise ConfigError(f"{config} has no model_type, so that its model is not known: correct it")
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
            f"transformers {transformers.__version__} makes no model of {config} ({type(error).__name__}: {error}): "
            "correct the config, or install another transformers"
        ) from error
    raise ConfigError(
        f"transformers {transformers.__version__} has no model for {kind!r}: install a newer one, or correct model_type"
    )


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
            raise ConfigError(
                f"{name} in {path} is of a type that torch does not have: give another file, or config.json"
            )
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


@dataclass
class Pass:
    """What a forward or a backward computes."""

    flops: int = 0  # floating-point operations of matrix products and attention; of causal attention what is not masked

    def add(self, flops: int) -> None:
        """Count so many more."""
        self.flops += flops


@dataclass(frozen=True)
class Trace:
    """What one backward takes of torch, beside the parameters."""

    tokens: int  # of the batch
    forward: Pass  # what it computes
    backward: Pass  # likewise, with what is recomputed
    peak: int  # bytes of torch's own memory at its highest, gradients being gone as soon as they are whole
    held: dict[str, int]  # of these, by what they are: logits, gradients, activations
    kept: int  # bytes that the forward leaves for the backward: what each of several micro-batches holds
    recomputes: bool  # whether blocks are computed again in the backward

    @property
    def flops(self) -> int:
        """Of both passes."""
        return self.forward.flops + self.backward.flops


class _Watch(TorchDispatchMode):
    """Counts every operator below autograd, and every storage from its first tensor to its end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = Pass()
        self.peak = 0
        self.at_peak: list[tuple[int, tuple[int, ...]]] = []
        self._bytes = 0
        own = (*model.parameters(), *model.buffers())
        # Views of parameters share their storages, which are counted elsewhere.
        self._own = {tensor.untyped_storage()._cdata for tensor in own}  # noqa: SLF001
        self._living: dict[int, tuple[int, tuple[int, ...]]] = {}

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
        self._now.add(_flops(function, args, kwargs, out))
        return out

    def begin(self, now: Pass) -> None:
        """Count what is computed from here on in this pass."""
        self._now = now

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        if key in self._living or key in self._own or _is_mask(tensor):
            return
        nbytes = storage.nbytes()
        self._living[key] = nbytes, tuple(tensor.shape)
        self._bytes += nbytes
        weakref.finalize(storage, self._gone, key)
        if self._bytes > self.peak:
            self.peak = self._bytes
            # A tenth more than the last look, or large ones: copying the list at every small tensor would take long.
            self.at_peak = list(self._living.values())

    @property
    def living(self) -> list[tuple[int, tuple[int, ...]]]:
        """Bytes and shape of each storage that there is now."""
        return list(self._living.values())

    def _gone(self, key: int) -> None:
        nbytes, _ = self._living.pop(key, (0, ()))
        self._bytes -= nbytes


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether it is one of those that transformers makes while it is traced: else attention is told to be causal."""
    return tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[2] == tensor.shape[3]


def _unmasked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of attention as it is made without such a mask."""
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
    packet = function.overloadpacket
    # Attention on a CPU has no formula in torch 2.11; others' is the same.
    alike = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), None)
    count = flop_registry.get(packet) or flop_registry.get(alike)
    if count is None:
        return 0
    flops = int(count(*args, **kwargs, out_val=out))
    names = [argument.name for argument in function._schema.arguments]  # noqa: SLF001
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Kernels skip what the mask of a causal attention leaves out, which is half of it.
    return flops // 2 if given.get("is_causal") is True else flops


def trace(model: nn.Module, batch: int, length: int, *, recomputes: bool) -> Trace | str:
    """Run one forward and backward of a language model, on tensors that have shapes and no memory.

    Args:
        model: as transformers makes it, on "meta".
        batch: sequences.
        length: tokens of each.
        recomputes: whether its blocks keep their inputs alone, and are computed again in the backward.

    Returns:
        What it took, or why that cannot be said.
    """
    if getattr(model, "main_input_name", None) != "input_ids":
        return "tokens are counted for language models of transformers"
    model = copy.deepcopy(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        settle(model)
    model.train()
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    if recomputes:
        recompute(model)
    watch = _Watch(model)
    forward, backward, kept = Pass(), Pass(), 0
    failed = ""
    with fake, without_gradients_kept(model), watch, _without_torchs_log():
        watch.begin(forward)
        try:
            tokens = torch.zeros(batch, length, dtype=torch.long)
            loss = model(input_ids=tokens, labels=tokens).loss
            kept = _kinds(model, watch.living)["activations"]
            watch.begin(backward)
            loss.backward()
            del loss
        except Exception as error:  # noqa: BLE001
            # Whatever a model's code does that depends on values (the routes of some mixtures of experts).
            failed = f"{type(model).__name__} cannot be traced without values ({type(error).__name__})"
    if failed:
        # A checkpoint in which it ended leaves its hooks to all that is saved later, until it is collected.
        gc.collect()
        return failed
    return Trace(
        tokens=batch * length,
        forward=forward,
        backward=backward,
        peak=watch.peak,
        held=_kinds(model, watch.at_peak),
        kept=kept,
        recomputes=recomputes,
    )


@contextlib.contextmanager
def _without_torchs_log() -> Iterator[None]:
    """What cannot be traced is told in one line. Who keeps the stack that torch logs keeps a checkpoint's hooks."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def grown(one: Trace, two: Trace, times: int) -> Trace:
    """What a larger batch takes: `one` and so many times what `two` takes more."""

    def line(first: int, second: int) -> int:
        return first + times * (second - first)

    return Trace(
        tokens=line(one.tokens, two.tokens),
        forward=Pass(line(one.forward.flops, two.forward.flops)),
        backward=Pass(line(one.backward.flops, two.backward.flops)),
        peak=line(one.peak, two.peak),
        held={kind: line(nbytes, two.held[kind]) for kind, nbytes in one.held.items()},
        kept=line(one.kept, two.kept),
        recomputes=one.recomputes,
    )


def settle(model: nn.Module) -> None:
    """Give it parameters and buffers that count as the CPU's; tied ones stay tied."""
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


def recompute(model: nn.Module) -> None:
    """Have the blocks computed again in the backward, as far as the model can."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    change = getattr(model, f"{name}_checkpointing_enable", None)
    if change is not None:
        with contextlib.suppress(ValueError):
            change()


@contextlib.contextmanager
def without_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Gradients are gone as soon as they are whole, as they are in training."""

    def gone(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(gone)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kinds(model: nn.Module, living: list[tuple[int, tuple[int, ...]]]) -> dict[str, int]:
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
