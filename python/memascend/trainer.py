"""Integrates with the Hugging Face Trainer: full checkpoints, log figures, resuming."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_modules

from memascend.checkpoint.reader import Checkpoint, identity_of
from memascend.errors import ConfigError, MemascendError, UsageError
from memascend.session.offload import offload
from memascend.session.optimizer import OffloadedOptimizer, session_of
from memascend.session.run import shown
from memascend.session.schedule import steps_alone
from memascend.tensors import same_bits

try:
    from transformers import PreTrainedModel, TrainerCallback
except ImportError as error:
    raise ImportError(
        "memascend.trainer is for the Trainer of transformers: pip install transformers accelerate"
    ) from error

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch.utils.hooks import RemovableHandle
    from transformers import TrainerState, TrainingArguments

    from memascend.session.session import Session

__all__ = ["Callback", "Offload", "by_layer", "last_checkpoint"]

_log = logging.getLogger("memascend")
# The Trainer's names of checkpoints.
_FOLDER = re.compile(r"checkpoint-(\d+)")
# The last file that the Trainer writes to one of its checkpoints.
_LAST_FILE = "trainer_state.json"
# Stages of a report in which the training loop waits.
_WAITING = ("waiting for units", "handing on gradients", "step()")
# Hooks that reject other weights than the store's: outside of a training, a Trainer loads those of a resume.
_GUARDS: weakref.WeakKeyDictionary[Session, RemovableHandle] = weakref.WeakKeyDictionary()


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of a Trainer, for `offload(checkpoint=)` and `train(resume_from_checkpoint=)`.

    A checkpoint that a killed process left unfinished is skipped.

    Args:
        folder: the Trainer's `output_dir`, which need not exist.

    Returns:
        The checkpoint, or None if there is none.
    """
    matches = [_FOLDER.fullmatch(path.name) for path in Path(folder).glob("checkpoint-*")]
    for match in sorted(filter(None, matches), key=lambda match: -int(match[1])):
        path = Path(folder, match[0])
        with contextlib.suppress(MemascendError):
            if (path / _LAST_FILE).is_file():
                Checkpoint(path)
                return path
    return None


def _resumes() -> bool:
    """Whether a Trainer's resume is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_name != "_load_from_checkpoint":
        frame = frame.f_back
    return frame is not None


class Callback(TrainerCallback):
    """For `Trainer(callbacks=[memascend.trainer.Callback()])` with an offloaded model and optimizer.

    Each checkpoint of the Trainer gets the files of `OffloadedOptimizer.save`, and each log with a loss gets:

    - `host_memory_bytes`: memascend's peak so far.
    - `read_bytes`, `written_bytes`: from and to storage since the last log.
    - `waiting_seconds`: of the training loop, for units, for space for gradients and in `step()`, since the last log.

    They appear in the Trainer's log history and printed logs. Reporters that it calls before its callbacks
    (`report_to`) do not see them.

    The weights of a transformers model are streamed once from storage into the checkpoint. Other models (peft) are
    saved by the Trainer first and then again. With `save_only_model` nothing is added.

    To resume from a checkpoint, begin from it, and pass it to the Trainer: see `last_checkpoint`. If a Trainer resumes
    from other weights than the store's, an error is raised before they overwrite the store.

    Each commit has the learning rates of the next step, and the state of the Trainer's scheduler, as with
    `OffloadedOptimizer.schedule`. The Trainer advances it, and its log has the rates that it has without memascend.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._watches = False
        # The figures at the last log: bytes read and written, seconds of waiting.
        self._before = (0, 0, 0.0)

    def on_init_end(self, args: TrainingArguments, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Find the offloaded optimizer; from here on, weights that a Trainer loads are those of a resume."""
        self._attach(others.get("optimizer"))
        self._watch(others["model"])

    def _watch(self, model: torch.nn.Module) -> None:
        assert self._session is not None
        self._unwatch()
        # Copies of the model share a function, and would copy the object of a method.
        check = lambda *given: self._require_same(*given)  # noqa: E731, PLW0108
        _GUARDS[self._session] = model.register_load_state_dict_pre_hook(check)

    def _unwatch(self) -> None:
        assert self._session is not None
        guard = _GUARDS.pop(self._session, None)
        if guard is not None:
            guard.remove()

    def _attach(self, optimizer: Any) -> None:
        self._session = session_of(_optimizer_of(optimizer))
        self._before = self._counted()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:
        """Take over the writing of checkpoints."""
        if self._session is None:
            self._attach(others.get("optimizer"))
        assert self._session is not None
        self._watches = self._session in _GUARDS
        self._unwatch()
        self._schedule(others.get("lr_scheduler"))
        model = others["model"]
        if _is_streamed(model, self._session) and not args.save_only_model:
            model.save_pretrained = _Saving(model.save_pretrained, self._session, state)

    def _schedule(self, scheduler: Any) -> None:
        """Commit the Trainer's scheduler with each step, from where the Trainer made or loaded it."""
        assert self._session is not None
        self._session.run.metadata.schedule.catch_up()
        # One that needs a metric is advanced at an evaluation.
        if scheduler is None or not steps_alone(scheduler):
            return
        try:
            self._session.schedule([scheduler], restore=False)
        except ConfigError as error:
            _log.info("the Trainer alone keeps its scheduler, in its checkpoints: %s", error)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Let the Trainer log the rate of this step, and advance the scheduler as step() did."""
        if self._session is not None:
            self._session.run.metadata.schedule.rewind()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Have the scheduler where the commit has it."""
        if self._session is not None:
            self._session.run.metadata.schedule.catch_up()

    def on_train_end(self, *_: Any, **others: Any) -> None:
        """Restore the model's own `save_pretrained`; from here on a resume is watched again."""
        others["model"].__dict__.pop("save_pretrained", None)
        if self._watches:
            self._watch(others["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Add our files to a checkpoint that the model wrote itself."""
        folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        if self._session is None or args.save_only_model or not folder.is_dir():
            return
        if identity_of(folder) != self._session.run.metadata.identity():
            self._session.saving.save(folder, among_others=True)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Add the figures."""
        logs: dict[str, Any] = others["logs"]
        if self._session is None or "loss" not in logs:
            return
        then, now = self._before, self._counted()
        self._before = now
        figures = {
            "host_memory_bytes": self._session.report().peak,
            "read_bytes": now[0] - then[0],
            "written_bytes": now[1] - then[1],
            "waiting_seconds": round(now[2] - then[2], 4),
        }
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def _require_same(self, model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Reject weights that differ from the store's, before any is loaded; after a training those of a resume."""
        assert self._session is not None
        if self._watches and not _resumes():
            return
        for name, parameter in model.named_parameters():
            given = state_dict.get(prefix + name)
            if given is None or given.shape != parameter.shape:
                continue
            values = parameter.detach().cpu()
            if not same_bits(values, given.detach().to("cpu", values.dtype)):
                raise UsageError(
                    f"a Trainer loads other weights ({name} differs) than those of "
                    f"{shown(self._session.run.metadata.identity())}, which the storage holds, and storage was "
                    'left as it is: to resume from a checkpoint, begin from it with offload(existing="replace", '
                    "checkpoint=...); to take weights alone, load them before the Trainer is made"
                )

    def _counted(self) -> tuple[int, int, float]:
        assert self._session is not None
        report = self._session.report()
        # offload() itself wrote the first values.
        written = sum(nbytes for kind, nbytes in report.written.items() if kind != "first values")
        return sum(report.read.values()), written, sum(report.seconds.get(stage, 0.0) for stage in _WAITING)


class Offload(Callback):
    """For `Trainer(callbacks=[memascend.trainer.Offload(storage=...)])` on several ranks, sharded by FSDP2.

    There the Trainer itself prepares model and optimizer (`fsdp="full_shard"`, `fsdp_config={"fsdp_version": 2}`). So
    this callback offloads them when training begins. Its log gets the figures of `Callback`.
    """

    optimizer: OffloadedOptimizer  # of `memascend.offload()`, once training has begun

    def __init__(self, **options: Any) -> None:
        """`options` are those of `memascend.offload()`."""
        super().__init__()
        self._options = options

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Reject checkpoints that the Trainer cannot write."""
        if args.save_strategy != "no" and not args.save_only_model:
            raise ConfigError(
                "the Trainer's checkpoints want state that torch gathers, and it is on storage: pass "
                "TrainingArguments(save_strategy='no'), since the store has every step, and call "
                ".optimizer.save(folder) on each rank for a checkpoint; or save_only_model=True"
            )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:
        """Offload the model and optimizer that the Trainer has prepared."""
        existing = self._options.get("existing", "refuse")
        if state.global_step or existing in ("resume", "previous"):
            what = "resume_from_checkpoint=" if state.global_step else f"Offload(existing={existing!r})"
            raise ConfigError(
                f"{what} cannot resume where a Trainer of several ranks ended: the storage has every step, and no "
                "checkpoint of the Trainer has its data's place and schedule beside it. A loop of your own and "
                "`torchrun -m memascend train` resume bit-identically; to begin a new training from values and state "
                "that .optimizer.save(folder) wrote, give Offload(checkpoint=folder, existing='replace')"
            )
        _, self.optimizer = offload(others["model"], others["optimizer"], **self._options)
        super().on_train_begin(args, state, **{**others, "optimizer": self.optimizer})


def by_layer(trainer: Any) -> None:
    """Have a Trainer compute the micro-batches of each step by layer, where that is known to be exact.

    It is one line before `train()`. With `gradient_accumulation_steps` a step then moves as many bytes as one with a
    single micro-batch. Losses, logs and weights are bit-identical to those of the Trainer without this line. So by
    layer go only losses, modules and hooks that were tested: `training_step` and `compute_loss` of the Trainer and of
    TRL's SFTTrainer and RewardTrainer; modules of torch, transformers and peft; no hook or callback of
    yours between micro-batches; no random numbers (dropout). Of all others, the Trainer computes one micro-batch
    after the other as usual, and the log says why.

    Raises:
        ConfigError: the Trainer's optimizer is not offloaded.
    """
    _optimizer_of(trainer.optimizer)
    _Steps(trainer)


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


class _Steps:
    """Replaces two methods of a Trainer, and its accelerator's backward while micro-batches are computed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._get_batch_samples, self._training_step = trainer.get_batch_samples, trainer.training_step
        # Of this step: the micro-batches that the Trainer has not passed yet, and the results of training_step().
        self._samples: list[Any] = []
        self._results: list[Any] | None = None
        # The loss of the micro-batch that this thread computes.
        self._local = threading.local()
        trainer.get_batch_samples, trainer.training_step = self.get_batch_samples, self.training_step

    def get_batch_samples(self, *given: Any, **options: Any) -> Any:
        """The micro-batches of one step, which are recorded."""
        found = self._get_batch_samples(*given, **options)
        self._samples, self._results = list(found[0]), None
        return found

    def training_step(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        """The loss of one micro-batch; the first call of a step computes all of them."""
        if self._results is None:
            if not self._goes_by_layer(inputs):
                self._samples = []
                return self._training_step(model, inputs, *given, **options)
            self._results = self._computed(lambda one: self._training_step(model, one, *given, **options))
        expected = self._samples.pop(0)
        if inputs is not expected:
            raise UsageError(
                "the Trainer takes the micro-batches of a step in another order than get_batch_samples() gave them: "
                "leave memascend.trainer.by_layer() out"
            )
        return self._results.pop(0)

    def _goes_by_layer(self, inputs: Any) -> bool:
        if len(self._samples) < 2 or inputs is not self._samples[0]:
            return False
        trainer = self._trainer
        reasons = itertools.chain(_in_methods(trainer), _in_settings(trainer), _in_modules(trainer.model))
        why = next(reasons, None)
        if why is not None:
            session_of(_optimizer_of(trainer.optimizer)).accumulation.explain(why)
        return why is None

    def _computed(self, step: Callable[[Any], Any]) -> list[Any]:
        accelerator = self._trainer.accelerator

        def loss_of(inputs: Any) -> tuple[Any, Any]:
            result = step(inputs)
            return self._local.__dict__.pop("loss"), result

        # An attribute of the object hides the method of its class.
        accelerator.backward = self._begun
        try:
            session = session_of(_optimizer_of(self._trainer.optimizer))
            # Random numbers would be others than the Trainer's own.
            results = session.accumulate(loss_of, self._samples, scale=1.0, by_layer=True, seeded=False)
            return [result for _, result in results]
        finally:
            del accelerator.backward

    def _begun(self, loss: Any, **_: Any) -> None:
        # accelerate divides in the same way.
        self._local.loss = loss / self._trainer.accelerator.gradient_accumulation_steps


class _Saving:
    """`save_pretrained` of a model during training: streams a checkpoint of the Trainer, with all state."""

    def __init__(self, own: Callable[..., Any], session: Session, state: TrainerState) -> None:
        # An earlier training that ended with an error may have left a _Saving.
        self._own: Callable[..., Any] = own._own if isinstance(own, _Saving) else own  # noqa: SLF001
        self._session = session
        self._state = state

    def __call__(self, save_directory: str | os.PathLike[str], *rest: Any, **options: Any) -> Any:
        plain = not rest and all(value in (None, True) for value in options.values())
        theirs = Path(save_directory).name == f"checkpoint-{self._state.global_step}"
        if plain and theirs and not self._session.run.resources.closed:
            return self._session.saving.save(save_directory, among_others=True)
        return self._own(save_directory, *rest, **options)


def _optimizer_of(optimizer: Any) -> OffloadedOptimizer:
    """The offloaded optimizer of a Trainer, without accelerate's wrapper."""
    while not isinstance(optimizer, OffloadedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            raise ConfigError(
                "the Trainer's optimizer is not offloaded: give it Trainer(optimizers=(optimizer, scheduler)) with the "
                "optimizer that offload() returned"
            )
    return optimizer


def _is_streamed(model: Any, session: Session) -> bool:
    """Whether `save_pretrained` of the model writes only its weights and configuration."""
    saves: Any = getattr(model, "save_pretrained", None)
    its_own = isinstance(saves, _Saving) or getattr(saves, "__func__", None) is PreTrainedModel.save_pretrained
    return (
        its_own
        and session.attachment.model is model
        and isinstance(model, PreTrainedModel)
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "_auto_class", None) is None
    )
