"""Computes the micro-batches of a Trainer's step by layer, if all code that takes part was tested to be exact by layer.

By layer means that each unit computes all micro-batches before the next unit computes: each unit is read once per step.
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

# Packages whose code was tested by layer.
_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "trl", "memascend"})
# Modules and classes whose training_step() and compute_loss() were tested. TRL's other Trainers switch adapters or
# checkpointing on and off within these methods.
_TESTED = {
    "transformers.trainer": "Trainer",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.reward_trainer": "RewardTrainer",
}
# Methods that a subclass may override: none of them runs while a micro-batch is computed.
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
# The share of a GPU's memory that a step by layer may fill: gaps between torch's allocations need the rest.
_FILLED = 0.9
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_known(code: Any) -> bool:
    """True if a function, method, class or object, and every function it wraps, belongs to one of `_LIBRARIES`."""
    while code is not None:
        code = getattr(code, "__func__", code)
        if isinstance(code, functools.partial):
            code = code.func
            continue
        if isinstance(code, types.FunctionType):
            # functools.wraps() copies `__module__` of the wrapped function; `__globals__` stay the wrapper's own.
            module = code.__globals__.get("__name__", "")
        else:
            module = (code if isinstance(code, type | types.BuiltinFunctionType) else type(code)).__module__ or ""
        if module.partition(".")[0] not in _LIBRARIES:
            return False
        code = None if isinstance(code, type) else getattr(code, "__wrapped__", None)
    return True


def _in_methods(trainer: Any) -> Iterator[str]:
    """Yields the reasons in the Trainer's methods not to compute by layer."""
    kinds = type(trainer).__mro__[:-1]
    for name in ("training_step", "compute_loss"):
        method = getattr(type(trainer), name)
        if method.__qualname__ != f"{_TESTED.get(method.__module__)}.{name}" or not _is_known(method):
            yield f"{name}() of {type(trainer).__name__} was not tested by layer"
    known = {name for kind in kinds if _is_known(kind) for name in vars(kind)}
    for kind in kinds:
        replaced = () if _is_known(kind) else (vars(kind).keys() & known) - _OUTSIDE
        # Python itself adds names such as `__module__` to each class: of names with "__", only `_CALLS` are overrides.
        named = sorted(name for name in replaced if not name.startswith("__") or name in _CALLS)
        yield from (f"{kind.__name__} has a {name} of its own" for name in named)
    for name, value in vars(trainer).items():
        if callable(getattr(type(trainer), name, None)) and not _is_known(value):
            yield f"the Trainer was given a {name}() of its own"


def _in_settings(trainer: Any) -> Iterator[str]:
    """Yields the reasons in the Trainer's settings and callbacks not to compute by layer."""
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
    """Yields the reasons in the model's modules and hooks not to compute by layer."""
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

    `measured()` measures the first micro-batch of the process. The estimate scales its activations by the number of
    elements in the inputs.
    """

    def __init__(self, device: torch.device, tied: int) -> None:
        """`tied`: bytes of the gradients of tied parameters; by layer, each micro-batch keeps a copy of them."""
        self._device, self._tied = device, tied
        # The measured micro-batch: elements of its inputs, and bytes that its forward keeps for its backward.
        self._elements, self._kept = 0, 0
        # Bytes allocated before the measured micro-batch, and the peak of bytes until the next micro-batch begins.
        self._before, self._peak = 0, 0

    def measured(self, step: Callable[[Any], Any], model: torch.nn.Module) -> Callable[[Any], Any]:
        """Wraps `step`, which computes one micro-batch's loss, so that its first call measures GPU memory."""
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
            # Measure before the head: by layer too, the head's activations exist for one micro-batch at a time.
            handle = _without_head(model).register_forward_hook(ended)
            try:
                return step(inputs)
            finally:
                handle.remove()

        return first

    def lacks(self, samples: Sequence[Any]) -> bool:
        """True if these micro-batches need more memory than the GPU has; False before the first measurement."""
        if not self._peak:
            return False
        sizes = [_elements(inputs) for inputs in samples]
        largest = max(sizes)
        alone = self._peak + (self._peak - self._before) * max(0, largest - self._elements) // self._elements
        others = self._kept * (sum(sizes) - largest) // self._elements + self._tied * (len(samples) - 1)
        return alone + others > _FILLED * _allocatable(self._device)


def _without_head(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the base model of a transformers or peft model, without its head; any other model whole."""
    inner = getattr(model, "base_model", model)
    return model if inner is model else _without_head(inner)


def _elements(inputs: Any) -> int:
    """Returns the number of elements in the tensors of a micro-batch, at least 1."""
    # tree_leaves() would treat transformers' own mapping class as one leaf.
    leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    return max(1, sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _allocatable(device: torch.device) -> int:
    """Returns the bytes that torch can allocate in total: its reserved memory plus free memory, up to its limit."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + torch.cuda.memory_reserved(device), int(allowed))


class Steps:
    """Computes the micro-batches of each step by layer, or hands them to the Trainer one by one.

    A step is computed by layer only if all code that takes part was tested: `training_step` and `compute_loss` of the
    Trainer and of TRL's SFTTrainer and RewardTrainer; modules of torch, transformers and peft; no hook or callback of
    the user's between micro-batches; no random numbers (dropout); activations that fit on the GPU together. Otherwise
    the Trainer computes one micro-batch after the other as usual, and the log gives the reason.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # In this step: micro-batches that the Trainer has not given to training_step() yet, and results that
        # training_step() has not returned yet; None before the micro-batches are computed.
        self._samples: list[Any] = []
        self._results: list[Any] | None = None
        # `loss`: the loss of the micro-batch that the current thread computes.
        self._local = threading.local()
        self._room: Room | None = None  # the first step makes it

    def begin(self, samples: Sequence[Any]) -> None:
        """Begins a step with these micro-batches."""
        self._samples, self._results = list(samples), None

    def training_step(self, own: Callable[..., Any], model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        """Returns the loss of one micro-batch; by layer, the first call of a step computes all of the step's losses.

        `own` is the Trainer's own `training_step()`.
        """
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
        """True if this step is computed by layer; otherwise logs the reason."""
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
        """Computes all micro-batches of the step by layer; returns the results of `step`."""
        assert self._room is not None
        measured = self._room.measured(step, self._trainer.model)

        def loss_of(inputs: Any) -> tuple[Any, Any]:
            result = measured(inputs)
            return self._local.__dict__.pop("loss"), result

        with replaced(self._trainer.accelerator, "backward", self._begun):
            session = session_of(offloaded_optimizer(self._trainer.optimizer))
            # accumulate()'s own seeds would change the random numbers that dropout draws in the plain Trainer. Without
            # seeds, accumulate() computes one micro-batch after the other if the model draws random numbers.
            results = session.accumulate(loss_of, self._samples, scale=1.0, by_layer=True, seeded=False)
            return [result for _, result in results]

    def _begun(self, loss: Any, **_: Any) -> None:
        """Stands in for `accelerator.backward()`: keeps the loss for `accumulate()`, divided as accelerate divides."""
        self._local.loss = loss / self._trainer.accelerator.gradient_accumulation_steps
