"""Computes the micro-batches of a Trainer's step by layer, where that is known to be exact."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_leaves

from memascend.errors import UsageError
from memascend.plan.units import tied_bytes
from memascend.session.optimizer import session_of
from memascend.text import replaced
from memascend.trainer.callback import offloaded_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Whose code was tested by layer.
_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "trl", "memascend"})
# The methods that compute one micro-batch. TRL's others switch adapters or checkpointing on and off meanwhile.
_TESTED = {
    "transformers.trainer": "Trainer",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.reward_trainer": "RewardTrainer",
}
# What a subclass may define anew, as it does not run while a micro-batch is computed.
_OUTSIDE = frozenset(
    {
        *("__init__", "log", "evaluate", "evaluation_loop", "prediction_step", "predict", "train", "store_flos"),
        *("save_model", "_save", "_save_checkpoint", "create_optimizer", "create_scheduler"),
        *("create_optimizer_and_scheduler", "get_decay_parameter_names", "get_train_dataloader"),
        *("get_eval_dataloader", "get_test_dataloader", "_get_train_sampler", "_get_eval_sampler"),
    }
)
_CALLS = frozenset({"__call__", "__getattr__", "__getattribute__", "__setattr__"})
_ATTENTION = frozenset({None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"})
# The part of a GPU's memory that activations of all micro-batches may fill: gaps of the allocator need the rest.
_FILLED = 0.9
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_known(code: Any) -> bool:
    """Whether a function, a method, a class or an object, and all that it wraps, is of a library that was tested."""
    while code is not None:
        code = getattr(code, "__func__", code)
        if isinstance(code, functools.partial):
            code = code.func
            continue
        if isinstance(code, types.FunctionType):
            # functools.wraps() gives a function the names of what it wraps, but not its place.
            module = code.__globals__.get("__name__", "")
        else:
            module = (code if isinstance(code, type | types.BuiltinFunctionType) else type(code)).__module__ or ""
        if module.partition(".")[0] not in _LIBRARIES:
            return False
        code = None if isinstance(code, type) else getattr(code, "__wrapped__", None)
    return True


def _in_methods(trainer: Any) -> Iterator[str]:
    kinds = type(trainer).__mro__[:-1]
    for name in ("training_step", "compute_loss"):
        method = getattr(type(trainer), name)
        if method.__qualname__ != f"{_TESTED.get(method.__module__)}.{name}" or not _is_known(method):
            yield f"{name}() of {type(trainer).__name__} was not tested by layer"
    known = {name for kind in kinds if _is_known(kind) for name in vars(kind)}
    for kind in kinds:
        replaced = () if _is_known(kind) else (vars(kind).keys() & known) - _OUTSIDE
        # Python itself puts names with two underscores into each class.
        named = sorted(name for name in replaced if not name.startswith("__") or name in _CALLS)
        yield from (f"{kind.__name__} has a {name} of its own" for name in named)
    for name, value in vars(trainer).items():
        if callable(getattr(type(trainer), name, None)) and not _is_known(value):
            yield f"the Trainer was given a {name}() of its own"


def _in_settings(trainer: Any) -> Iterator[str]:
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func is a function of yours"
    if getattr(trainer.accelerator, "scaler", None) is not None:
        yield "losses are scaled for fp16"
    if not isinstance(getattr(trainer, "maybe_activation_offload_context", None), contextlib.nullcontext | None):
        yield "activations are offloaded by TRL"
    for callback in trainer.callback_handler.callbacks:
        if not _is_known(type(callback).on_substep_end):
            yield f"{type(callback).__name__} has an on_substep_end()"


def _in_modules(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        title = f"module {name!r}" if name else "the model"
        for code in (type(module), type(module).forward, vars(module).get("forward", type(module))):
            if not _is_known(code):
                yield f"{title} has code of yours ({getattr(code, '__qualname__', code)})"
        if not all(_is_known(hook) for table in _HOOKS for hook in vars(module)[table].values()):
            yield f"{title} has a hook of yours"
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if attention not in _ATTENTION or not _is_known(getattr(module, "_loss_function", None) or type(module)):
            yield f"{title} has an attention or a loss of yours"
    if any(getattr(torch_modules, f"_global{table}") for table in _HOOKS):
        yield "a hook of yours is called for all modules"
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        hooked = [name for name, parameter in model.named_parameters() if parameter._backward_hooks]  # noqa: SLF001
    yield from (f"a hook of yours is called for the gradient of {name!r}" for name in hooked)


class Room:
    """Whether the activations of all micro-batches of a step fit on the GPU at once.

    The first step of a process goes one after the other, and its first micro-batch is measured. Activations grow with
    the elements of the inputs.
    """

    def __init__(self, device: torch.device, tied: int) -> None:
        """`tied`: bytes of the gradients of tied parameters, of which each micro-batch by layer has its own."""
        self._device, self._tied = device, tied
        # Of the measured micro-batch: its elements, and the bytes that its forward leaves to its backward.
        self._elements, self._kept = 0, 0
        self._before, self._peak = 0, 0  # bytes before it, and the most until the next one

    def measured(self, step: Callable[[Any], Any], model: torch.nn.Module) -> Callable[[Any], Any]:
        """A function that computes one micro-batch's loss, and measures the first one."""
        if self._device.type != "cuda" or self._peak:
            return step

        def ended(*_: Any) -> None:
            self._kept = max(1, torch.cuda.memory_allocated(self._device) - self._before)

        def first(inputs: Any) -> Any:
            if self._kept:
                self._peak = self._peak or torch.cuda.max_memory_allocated(self._device)
                return step(inputs)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before, self._elements = torch.cuda.memory_allocated(self._device), _elements(inputs)
            # What the head leaves is there for one micro-batch at a time.
            handle = _without_head(model).register_forward_hook(ended)
            try:
                return step(inputs)
            finally:
                handle.remove()

        return first

    def lacks(self, samples: Sequence[Any]) -> bool:
        """Whether these micro-batches need more than there is; never where nothing was measured yet."""
        if not self._peak:
            return False
        sizes = [_elements(inputs) for inputs in samples]
        largest = max(sizes)
        alone = self._peak + (self._peak - self._before) * max(0, largest - self._elements) // self._elements
        others = self._kept * (sum(sizes) - largest) // self._elements + self._tied * (len(samples) - 1)
        return alone + others > _FILLED * _allocatable(self._device)


def _without_head(model: torch.nn.Module) -> torch.nn.Module:
    """The part of a model of transformers or peft that its head follows; of others, all of it."""
    inner = getattr(model, "base_model", model)
    return model if inner is model else _without_head(inner)


def _elements(inputs: Any) -> int:
    # A mapping of transformers is a leaf by itself.
    leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    return max(1, sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _allocatable(device: torch.device) -> int:
    """Bytes that tensors may have in all: what torch has reserved, and what it may still get."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + torch.cuda.memory_reserved(device), int(allowed))


class Steps:
    """Computes the micro-batches of each step; its accelerator's backward is replaced meanwhile.

    By layer go only losses, modules and hooks that were tested: `training_step` and `compute_loss` of the Trainer and
    of TRL's SFTTrainer and RewardTrainer; modules of torch, transformers and peft; no hook or callback of the user's
    between micro-batches; no random numbers (dropout); activations that fit on the GPU together. Of all others, the
    Trainer computes one micro-batch after the other as usual, and the log says why.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Of this step: the micro-batches that the Trainer has not passed yet, and the results of training_step().
        self._samples: list[Any] = []
        self._results: list[Any] | None = None
        # The loss of the micro-batch that this thread computes.
        self._local = threading.local()
        self._room: Room | None = None  # from the first step on

    def begin(self, samples: Sequence[Any]) -> None:
        """Begin a step of these micro-batches."""
        self._samples, self._results = list(samples), None

    def training_step(self, own: Callable[..., Any], model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        """The loss of one micro-batch, by the Trainer's own method; the first call of a step computes all of them."""
        if self._results is None:
            if not self._goes_by_layer(inputs):
                self._samples = []
                return own(model, inputs, *given, **options)
            self._results = self._computed(lambda one: own(model, one, *given, **options))
        expected = self._samples.pop(0)
        if inputs is not expected:
            raise UsageError(
                "the Trainer takes the micro-batches of a step in another order than get_batch_samples() gave them: "
                "leave get_batch_samples() and the loop as they are"
            )
        return self._results.pop(0)

    def _goes_by_layer(self, inputs: Any) -> bool:
        if len(self._samples) < 2 or inputs is not self._samples[0]:
            return False
        trainer = self._trainer
        reasons = itertools.chain(_in_methods(trainer), _in_settings(trainer), _in_modules(trainer.model))
        why = next(reasons, None)
        accumulation = session_of(offloaded_optimizer(trainer.optimizer)).accumulation
        if self._room is None:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                self._room = Room(accumulation.device, tied_bytes(trainer.model))
        if why is None and self._room.lacks(self._samples):
            why = (
                'the GPU has no room for the activations of all of them: activations="ssd" or "host" takes them off it'
            )
        if why is not None:
            accumulation.explain(why)
        return why is None

    def _computed(self, step: Callable[[Any], Any]) -> list[Any]:
        assert self._room is not None
        measured = self._room.measured(step, self._trainer.model)

        def loss_of(inputs: Any) -> tuple[Any, Any]:
            result = measured(inputs)
            return self._local.__dict__.pop("loss"), result

        with replaced(self._trainer.accelerator, "backward", self._begun):
            session = session_of(offloaded_optimizer(self._trainer.optimizer))
            # Random numbers would be others than the Trainer's own.
            results = session.accumulate(loss_of, self._samples, scale=1.0, by_layer=True, seeded=False)
            return [result for _, result in results]

    def _begun(self, loss: Any, **_: Any) -> None:
        # accelerate divides in the same way.
        self._local.loss = loss / self._trainer.accelerator.gradient_accumulation_steps
