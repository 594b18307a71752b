"""Implements `memascend.trainer.loading()`: `from_pretrained()` makes models without reading their weights.

`memascend.offload()` later streams the weights from their files into the store.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from memascend.checkpoint.files import Names
from memascend.checkpoint.quantized import refusal, require_readable
from memascend.checkpoint.weights import Source, WeightFiles
from memascend.errors import ConfigError, UsageError
from memascend.tensors import same_bits
from memascend.text import replaced
from memascend.trainer import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_log = logging.getLogger("memascend")
# A ContextVar, so that other threads, and code after the block, load as usual.
_inside = contextvars.ContextVar("_inside", default=False)
# A thread holds this lock during a block, since blocks of other threads replace methods of the same classes.
_turn = threading.RLock()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Makes models that do not fit in memory, for `memascend.trainer.offload()` or `memascend.offload()`.

    Inside the block, `from_pretrained` of transformers makes models on the meta device, reads no weights, and moves
    nothing to another device; this includes calls by TRL's Trainers. The dtype is the one passed to `from_pretrained`,
    or that of the files; TRL passes float32 unless `model_init_kwargs` has another. `offload()` later streams the
    weights from their files.

    ```
    with memascend.trainer.loading():
        trainer = SFTTrainer("folder", ...)
    memascend.trainer.offload(trainer, storage="run.store")
    ```

    `offload()` dequantizes weights in MXFP4 and in FP8 with block scales as they stream, and the model is built as if
    it had never been quantized. The model's own code initialises parameters that the files lack (the head of a reward
    model, adapters), in memory, as usual.

    Raises:
        ConfigError: a model has another quantization, or its weights are not in safetensors.
        UsageError: code in the block needs the values of weights.
    """
    names.require_loader()
    with _turn, contextlib.ExitStack() as undo:
        _replace(undo, PreTrainedModel, names.LOADER, _load)
        _replace(undo, PreTrainedModel, "from_pretrained", _from_pretrained)
        _replace(undo, torch.nn.Module, "to", _to)
        undo.callback(_inside.reset, _inside.set(True))
        try:
            yield
        except (NotImplementedError, RuntimeError) as error:
            if "meta tensor" not in str(error) or isinstance(error, UsageError):
                raise
            raise UsageError(
                f"code within loading() needs values of weights, which are not read there ({error}): leave out the "
                "option that does (precompute_ref_log_probs, new tokens, adapters that begin with the weights), or "
                "make the model outside of loading()"
            ) from error


def _replace(undo: contextlib.ExitStack, owner: type, name: str, instead: Callable[..., Any]) -> None:
    """Replaces a method: inside the block, `instead(own method, *arguments)` runs in its place.

    Code outside the block (other threads) still gets the own method. `undo` restores it.
    """
    there = vars(owner)[name]
    own = getattr(there, "__func__", there)

    def method(*given: Any, **named: Any) -> Any:
        return instead(own, *given, **named) if _inside.get() else own(*given, **named)

    undo.enter_context(replaced(owner, name, method if own is there else type(there)(method)))


def _from_pretrained(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Runs `from_pretrained()` without `device_map`, and makes a quantized model as a plain one."""
    if named.get("key_mapping"):
        raise ConfigError("loading() knows no key_mapping=: load it once without loading(), and save_pretrained() it")
    path = named.get("pretrained_model_name_or_path", given[1] if len(given) > 1 else None)
    with contextlib.ExitStack() as undo:
        _replace(undo, HfQuantizer, "__init__", functools.partial(_dequantize, path))
        try:
            made = own(*given, **named | {"device_map": None})
        except ImportError as error:
            # transformers misses the package of a quantization that `_dequantize()` does not support.
            if "quantiz" not in str(error) or "accelerate" in str(error):
                raise
            raise refusal(path, str(error)) from error
        config = getattr(made[0] if isinstance(made, tuple) else made, "config", None)
        text = getattr(config, "get_text_config", lambda: None)()
        if text is not None and text is not config and getattr(text, "quantization_config", None) is not None:
            # transformers removes `quantization_config` from the model's config, but not from its text config.
            del text.quantization_config
        return made


def _dequantize(path: Any, own: Callable[..., Any], quantizer: Any, config: Any, **named: Any) -> None:
    """Sets `dequantize` in a new HfQuantizer: then transformers makes a plain model, and does not look for kernels."""
    own(quantizer, config, **named)
    method = getattr(config.quant_method, "value", config.quant_method)
    if not quantizer.pre_quantized:
        raise ConfigError(
            f"quantization_config= would quantize {path} ({method}) while it is loaded, and loading() streams weights "
            "as they are: leave it out, or make the model outside of loading()"
        )
    require_readable(path, method)
    config.dequantize = True
    # Otherwise transformers keeps these modules (embeddings) in 8 bits.
    if getattr(config, "modules_to_convert", None):
        config.modules_to_convert = None


def _to(own: Callable[..., Any], module: torch.nn.Module, *given: Any, **named: Any) -> Any:
    """Runs `Module.to()`, but ignores the device if the module has meta parameters; peft's adapters stay in place."""
    device, dtype, *_ = torch._C._nn._parse_to(*given, **named)  # noqa: SLF001
    if device is None or (device.type != "meta" and not any(one.is_meta for one in module.parameters())):
        return own(module, *given, **named)
    return module if dtype is None else own(module, dtype=dtype)


def _load(
    own: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Notes each parameter's source instead of reading it; transformers initialises parameters that have no source."""
    if state_dict is not None or rest or named:
        # The caller gave the values, or loads an adapter: load as usual.
        return own(model, state_dict, checkpoint_files, load_config, *rest, **named)
    path = load_config.pretrained_model_name_or_path
    if not checkpoint_files or any(not str(file).endswith(".safetensors") for file in checkpoint_files):
        raise ConfigError(
            f"{path} has its weights in no safetensors, and others cannot be read one by one: load it once without "
            "loading(), and save_pretrained() it"
        )
    return _noted(model, checkpoint_files, load_config), None


def _noted(model: Any, checkpoint_files: Sequence[str], load_config: Any) -> Any:
    """Notes the source of each parameter; returns transformers' report of missing and unexpected keys."""
    report, alternation = names.require_loader()
    paths = [Path(file) for file in checkpoint_files]
    quantizer = load_config.hf_quantizer
    method = None if quantizer is None else quantizer.quantization_config.to_dict()
    files = WeightFiles(paths[0].parent, [file.name for file in paths], method=method)
    found = files.matched(Names(model))
    state = model.state_dict(keep_vars=True)
    keys = {name: of[0] for name, of in found.of.items() if name in state}
    for name, source in list(model.all_tied_weights_keys.items()):
        if name in keys and source in keys:
            if same_bits(files.at(keys[name]), files.at(keys[source])):
                # The parameters are tied: noting the source of one is enough.
                del keys[name]
            else:
                _log.warning("%s has other values for %s than for %s: they are not tied", files.path, name, source)
                del model.all_tied_weights_keys[name]
    shapes = {name: tuple(files.on_meta(key).shape) for name, key in keys.items()}
    unfit = {(name, shape, tuple(state[name].shape)) for name, shape in shapes.items() if shape != state[name].shape}
    plan = load_config.dtype_plan
    pattern, groups, _ = alternation(list(plan)) if plan else (None, {}, None)
    for name in keys.keys() - {name for name, *_ in unfit}:
        planned = pattern and pattern.search(name)
        dtype = plan[groups[planned.lastgroup]] if planned else state[name].dtype
        _note(model, name, Source(files, keys[name], dtype))
    return report(
        missing_keys=state.keys() - keys.keys(),
        unexpected_keys=set(found.unexpected),
        mismatched_keys=unfit,
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def _note(model: Any, name: str, source: Source) -> None:
    """Notes the source of a parameter on it; reads a buffer at once, since it is small."""
    module, _, short = name.rpartition(".")
    owner = model.get_submodule(module)
    tensor = getattr(owner, short)
    if isinstance(tensor, torch.nn.Parameter):
        tensor.data = tensor.data.to(source.dtype)
        source.note(tensor)
    else:
        tensor = source.values().clone()
        setattr(owner, short, tensor)
    # Tells transformers not to initialise the tensor.
    tensor._is_hf_initialized = True  # noqa: SLF001
