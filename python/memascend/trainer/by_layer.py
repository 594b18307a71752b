"""Computes the micro-batches of a Trainer's step by layer, if all code of the step was tested by layer.

By layer means that each unit computes all micro-batches before the next unit begins. So each unit is read only once for
all micro-batches.
"""

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

# Packages whose code was tested: a step by layer gives the same results as one micro-batch after the other.
_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "trl", "memascend"})
# The Trainers whose training_step() and compute_loss() were tested by layer: module -> class. Some other Trainers
# of TRL switch adapters or checkpointing on and off within these two methods.
_TESTED = {
    "transformers.trainer": "Trainer",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.reward_trainer": "RewardTrainer",
}
# Methods that a user's subclass may override, because none of these methods runs while a micro-batch is computed.
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
# The share of a GPU's memory that a step by layer may fill. The rest is for gaps between torch's allocations.
_FILLED = 0.9
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_known(code: Any) -> bool:
    """True if `code` and every function that `code` wraps belong to one of `_LIBRARIES`."""
    while code is not None:
        code = getattr(code, "__func__", code)
        if isinstance(code, functools.partial):
            code = code.func
            continue
        if isinstance(code, types.FunctionType):
            # Use `__globals__`, because functools.wraps() copies `__module__` from the wrapped function to the wrapper.
            module = code.__globals__.get("__name__", "")
        else:
            module = (code if isinstance(code, type | types.BuiltinFunctionType) else type(code)).__module__ or ""
        if module.partition(".")[0] not in _LIBRARIES:
            return False
        code = None if isinstance(code, type) else getattr(code, "__wrapped__", None)
    return True


def _in_methods(trainer: Any) -> Iterator[str]:
    """Yields each reason why the Trainer's methods prevent a step by layer."""
    kinds = type(trainer).__mro__[:-1]
    for name in ("training_step", "compute_loss"):
        method = getattr(type(trainer), name)
        if method.__qualname__ != f"{_TESTED.get(method.__module__)}.{name}" or not _is_known(method):
            yield f"{name}() of {type(trainer).__name__} was not tested by layer"
    known = {name for kind in kinds if _is_known(kind) for name in vars(kind)}
    for kind in kinds:
        replaced = () if _is_known(kind) else (vars(kind).keys() & known) - _OUTSIDE
        # Python itself adds names such as `__module__` to each class. So among names that begin with "__", count only
        # `_CALLS` as overrides.
        named = sorted(name for name in replaced if not name.startswith("__") or name in _CALLS)
        yield from (f"{kind.__name__} overrides {name}" for name in named)
    for name, value in vars(trainer).items():
        if callable(getattr(type(trainer), name, None)) and not _is_known(value):
            yield f"the Trainer object has its {name}() replaced"


def _in_settings(trainer: Any) -> Iterator[str]:
    """Yields each reason why the Trainer's settings or callbacks prevent a step by layer."""
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func is your own function"
    if getattr(trainer.accelerator, "scaler", None) is not None:
        yield "losses are scaled for fp16"
    if not isinstance(getattr(trainer, "maybe_activation_offload_context", None), contextlib.nullcontext | None):
        yield "activations are offloaded by TRL"
    for callback in trainer.callback_handler.callbacks:
        if not _is_known(type(callback).on_substep_end):
            yield f"{type(callback).__name__} has an on_substep_end()"


def _in_modules(model: torch.nn.Module) -> Iterator[str]:
    """Yields each reason why the model's modules or hooks prevent a step by layer."""
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
    """Estimates whether the activations of all micro-batches of a step fit on the GPU at once.

    The wrapper that `measured()` returns measures the first micro-batch that it computes. `lacks()` scales this
    micro-batch's memory by the number of elements in the inputs.
    """

    def __init__(self, device: torch.device, tied: int) -> None:
        """`tied`: bytes of the gradients of tied parameters.

        By layer, each micro-batch keeps a copy of these gradients.
        """
        self._device, self._tied = device, tied
        # Of the measured micro-batch: the number of elements in its inputs, and the bytes that its forward keeps for
        # its backward.
        self._elements, self._kept = 0, 0
        # The bytes allocated before the measured micro-batch, and the peak of allocated bytes until the next
        # micro-batch begins.
        self._before, self._peak = 0, 0

    def measured(self, step: Callable[[Any], Any], model: torch.nn.Module) -> Callable[[Any], Any]:
        """Returns a wrapper of `step`, which computes the loss of one micro-batch.

        The first call of the wrapper measures GPU memory. Without a GPU, or after the measurement, returns `step`.
        """
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
            # Measure before the head runs. Even by layer, the head's activations are in memory for only one micro-batch
            # at a time.
            handle = _without_head(model).register_forward_hook(ended)
            try:
                return step(inputs)
            finally:
                handle.remove()

        return first

    def lacks(self, samples: Sequence[Any]) -> bool:
        """True if the GPU probably does not have enough memory for these micro-batches by layer.

        Returns False before the first measurement.
        """
        if not self._peak:
            return False
        sizes = [_elements(inputs) for inputs in samples]
        largest = max(sizes)
        alone = self._peak + (self._peak - self._before) * max(0, largest - self._elements) // self._elements
        others = self._kept * (sum(sizes) - largest) // self._elements + self._tied * (len(samples) - 1)
        return alone + others > _FILLED * _allocatable(self._device)


def _without_head(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the base model, without the head, of a transformers or peft model; returns any other model itself."""
    inner = getattr(model, "base_model", model)
    return model if inner is model else _without_head(inner)


def _elements(inputs: Any) -> int:
    """Returns the number of elements in all tensors of a micro-batch, but at least 1."""
    # tree_leaves() would treat transformers' own mapping class as one leaf.
    leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    return max(1, sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _allocatable(device: torch.device) -> int:
    """Returns the bytes that torch can allocate in total.

    This is the memory that torch has reserved plus the free memory, up to torch's memory limit for the process.
    """
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + torch.cuda.memory_reserved(device), int(allowed))


class Steps:
    """Computes the micro-batches of each step by layer, or hands them to the Trainer one by one.

    A step is computed by layer only if `_in_methods`, `_in_settings` and `_in_modules` find no reason against it, the
    model draws no random numbers (dropout), and the activations of all micro-batches fit on the GPU at once. For
    example, `training_step` and `compute_loss` must be those of transformers' Trainer or of TRL's SFTTrainer or
    RewardTrainer, and all modules must be from `_LIBRARIES`. Otherwise the micro-batches are computed one after the
    other, and the log gives the reason.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Of this step: `_samples` has the micro-batches that the Trainer has not passed to training_step() yet.
        # `_results` has the results that training_step() has not returned yet; None before the micro-batches are
        # computed.
        self._samples: list[Any] = []
        self._results: list[Any] | None = None
        # `loss`: the loss of the micro-batch that the current thread computes.
        self._local = threading.local()
        self._room: Room | None = None  # None until the first step with several micro-batches

    def begin(self, samples: Sequence[Any]) -> None:
        """Begins a step that has these micro-batches."""
        self._samples, self._results = list(samples), None

    def training_step(self, own: Callable[..., Any], model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        """Returns the loss of one micro-batch. By layer, the first call in a step computes all micro-batches.

        `own` is the Trainer's own `training_step()`.
        """
        if self._results is None:
            if not self._runs_by_layer(inputs):
                self._samples = []
                return own(model, inputs, *given, **options)
            self._results = self._computed(lambda one: own(model, one, *given, **options))
        expected = self._samples.pop(0)
        if inputs is not expected:
            raise UsageError(
                "training_step() got another micro-batch than the next one that get_batch_samples() had returned. Do "
                "not override get_batch_samples() or the training loop"
            )
        return self._results.pop(0)

    def _runs_by_layer(self, inputs: Any) -> bool:
        """True if this step can be computed by layer. Logs the reason if code, settings or GPU memory prevent this."""
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
                "the GPU has no room for the activations of all micro-batches at once; activations='ssd' or 'host' "
                "would move the activations off the GPU"
            )
        if why is not None:
            accumulation.explain(why)
        return why is None

    def _computed(self, step: Callable[[Any], Any]) -> list[Any]:
        """Computes all micro-batches of the step by `accumulate(by_layer=True)`; returns the results of `step`."""
        assert self._room is not None
        measured = self._room.measured(step, self._trainer.model)

        def loss_of(inputs: Any) -> tuple[Any, Any]:
            result = measured(inputs)
            return self._local.__dict__.pop("loss"), result

        with replaced(self._trainer.accelerator, "backward", self._begun):
            session = session_of(offloaded_optimizer(self._trainer.optimizer))
            # Seeds of accumulate() would change the random numbers of dropout, compared with a Trainer without
            # memascend. Without seeds, accumulate() computes one micro-batch after the other if the model draws random
            # numbers.
            results = session.accumulate(loss_of, self._samples, scale=1.0, by_layer=True, seeded=False)
            return [result for _, result in results]

    def _begun(self, loss: Any, **_: Any) -> None:
        """Replaces `accelerator.backward()`.

        Keeps the loss for `accumulate()`, and divides the loss as accelerate does.
        """
        self._local.loss = loss / self._trainer.accelerator.gradient_accumulation_steps
