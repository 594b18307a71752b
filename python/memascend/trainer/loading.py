"""Implements `memascend.trainer.loading()`: inside the block, `from_pretrained()` reads no weights.

`memascend.offload()` later streams the weights from the model's files into the store.
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
# True inside a block of `loading()`. This is a ContextVar, so that other threads load models as usual during the block.
_inside = contextvars.ContextVar("_inside", default=False)
# A thread holds this lock during a block, because each block replaces methods of the same classes.
_turn = threading.RLock()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Lets you make models that do not fit in memory, for `memascend.trainer.offload()` or `memascend.offload()`.

    Inside the block, `from_pretrained` of transformers makes models on the meta device, reads no weights, and moves
    nothing to another device. This also applies to calls by TRL's Trainers. The model gets the dtype that is passed to
    `from_pretrained`, otherwise the dtype of the files. TRL passes float32 unless `model_init_kwargs` has another
    dtype. `offload()` later streams the weights from the model's files.

    ```
    with memascend.trainer.loading():
        trainer = SFTTrainer("folder", ...)
    memascend.trainer.offload(trainer, storage="run.store")
    ```

    If the weights are quantized in MXFP4, or in FP8 with block scales, `from_pretrained` makes the model without
    quantization, and `offload()` dequantizes the weights while it streams them. If the files do not contain a parameter
    (the head of a reward model, an adapter), the model's own code initialises the parameter in memory, as usual.

    Raises:
        ConfigError: a model has another quantization than MXFP4 or FP8, its weights are not in safetensors files,
            `from_pretrained` gets `key_mapping=`, or `quantization_config=` for weights that are not quantized, or
            `loading()` does not support this version of transformers.
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
                f"code inside loading() needs the values of weights, but loading() reads no weights ({error}). Remove "
                "the option that needs the values (precompute_ref_log_probs, new tokens, adapters that start from the "
                "weights), or make the model outside of loading()"
            ) from error


def _replace(undo: contextlib.ExitStack, owner: type, name: str, instead: Callable[..., Any]) -> None:
    """Replaces a method: inside the block, calls of the method run `instead(original, *arguments)`.

    Outside the block, for example in other threads, the original method still runs. Closing `undo` restores the
    original method.
    """
    there = vars(owner)[name]
    own = getattr(there, "__func__", there)

    def method(*given: Any, **named: Any) -> Any:
        return instead(own, *given, **named) if _inside.get() else own(*given, **named)

    undo.enter_context(replaced(owner, name, method if own is there else type(there)(method)))


def _from_pretrained(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Runs `from_pretrained()` without `device_map`, and makes a quantized model without its quantization."""
    if named.get("key_mapping"):
        raise ConfigError(
            "loading() does not support key_mapping=. Load the model once without loading(), save the model with "
            "save_pretrained(), and load it from that folder"
        )
    path = named.get("pretrained_model_name_or_path", given[1] if len(given) > 1 else None)
    with contextlib.ExitStack() as undo:
        _replace(undo, HfQuantizer, "__init__", functools.partial(_dequantize, path))
        try:
            made = own(*given, **named | {"device_map": None})
        except ImportError as error:
            # transformers looks for the package of the quantization before `_dequantize()` can reject the quantization.
            if "quantiz" not in str(error) or "accelerate" in str(error):
                raise
            raise refusal(path, str(error)) from error
        config = getattr(made[0] if isinstance(made, tuple) else made, "config", None)
        text = getattr(config, "get_text_config", lambda: None)()
        if text is not None and text is not config and getattr(text, "quantization_config", None) is not None:
            # transformers removes `quantization_config` from the model's config, but not from the text config inside.
            del text.quantization_config
        return made


def _dequantize(path: Any, own: Callable[..., Any], quantizer: Any, config: Any, **named: Any) -> None:
    """Runs `HfQuantizer.__init__()`, and sets `dequantize` in the quantizer's configuration.

    transformers then makes a plain model, and does not look for kernels. Rejects a quantization that `offload()` cannot
    read.
    """
    own(quantizer, config, **named)
    method = getattr(config.quant_method, "value", config.quant_method)
    if not quantizer.pre_quantized:
        raise ConfigError(
            f"quantization_config= would quantize {path} ({method}) while it is loaded, but loading() does not "
            "quantize weights. Remove quantization_config=, or make the model outside of loading()"
        )
    require_readable(path, method)
    config.dequantize = True
    # If `modules_to_convert` stays set, transformers keeps these modules (embeddings) in 8 bits.
    if getattr(config, "modules_to_convert", None):
        config.modules_to_convert = None


def _to(own: Callable[..., Any], module: torch.nn.Module, *given: Any, **named: Any) -> Any:
    """Runs `Module.to()`, but ignores the device if it is "meta" or if the module has meta parameters.

    So the peft adapters of a module with meta parameters also stay on their device.
    """
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
    """Notes the source of each parameter instead of reading its values.

    transformers initialises the parameters that have no source.
    """
    if state_dict is not None or rest or named:
        # The caller passed the values or loads an adapter, so load as usual.
        return own(model, state_dict, checkpoint_files, load_config, *rest, **named)
    path = load_config.pretrained_model_name_or_path
    if not checkpoint_files or any(not str(file).endswith(".safetensors") for file in checkpoint_files):
        raise ConfigError(
            f"the weights of {path} are not in safetensors files, and loading() cannot read other files. Load the "
            "model once without loading(), save the model with save_pretrained(), and load it from that folder"
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
                # The two parameters are tied, so the source of one of them is enough.
                del keys[name]
            else:
                _log.warning(
                    "%s has different values for %s and %s, so these two parameters are not tied",
                    files.path,
                    name,
                    source,
                )
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
    """Stores the source of a parameter on the parameter.

    For a buffer, reads the values now instead, because buffers are small.
    """
    module, _, short = name.rpartition(".")
    owner = model.get_submodule(module)
    tensor = getattr(owner, short)
    if isinstance(tensor, torch.nn.Parameter):
        tensor.data = tensor.data.to(source.dtype)
        source.note(tensor)
    else:
        tensor = source.values().clone()
        setattr(owner, short, tensor)
    # transformers does not initialise a tensor that has this attribute.
    tensor._is_hf_initialized = True  # noqa: SLF001
