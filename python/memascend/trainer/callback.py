"""Adds memascend's training state to a Trainer's checkpoints. Adds figures of memory and I/O to the Trainer's log."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.checkpoint.reader import identity_of
from memascend.errors import ConfigError, UsageError
from memascend.session.optimizer import OffloadedOptimizer, session_of
from memascend.session.report import WAITING
from memascend.session.run import shown
from memascend.session.schedule import steps_alone
from memascend.tensors import same_bits

try:
    from transformers import PreTrainedModel, TrainerCallback
except ImportError as error:
    raise ImportError(
        "memascend.trainer needs transformers and accelerate: pip install transformers accelerate"
    ) from error

if TYPE_CHECKING:
    import os
    import types
    from collections.abc import Callable

    import torch
    from torch.utils.hooks import RemovableHandle
    from transformers import TrainerState, TrainingArguments

    from memascend.session.report import Report
    from memascend.session.session import Session

__all__ = ["FIGURES", "Callback", "counted_in", "is_offloaded", "is_streamed", "offloaded_optimizer"]

_log = logging.getLogger("memascend")
# The names of the figures in a log. The docstring of `Callback` describes the figures.
FIGURES = ("host_memory_bytes", "read_bytes", "written_bytes", "waiting_seconds")


def _resumes() -> bool:
    """True if `_load_from_checkpoint()`, by which a Trainer resumes, is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_name != "_load_from_checkpoint":
        frame = frame.f_back
    return frame is not None


class Callback(TrainerCallback):
    """Connects a Trainer to an offloaded model and optimizer: `Trainer(callbacks=[memascend.trainer.Callback()])`.

    The callback adds the files of `OffloadedOptimizer.save` to each checkpoint of the Trainer, and these figures to
    each log that has a loss:

    - `host_memory_bytes`: the peak of the host memory that memascend has used so far.
    - `read_bytes`, `written_bytes`: bytes read from and written to storage since the last log.
    - `waiting_seconds`: the seconds that the training loop has waited since the last log. The loop may wait for units,
      for space for gradients, and in `step()`.

    The figures appear in the Trainer's log history and printed logs. Reporters (`report_to`) that the Trainer calls
    before this callback do not get the figures.

    If the model is a plain transformers model, the callback streams its weights from storage into the checkpoint, and
    the Trainer writes no weights. Another model (peft) is first saved by the Trainer, and the callback then adds a
    second copy of the weights. With `save_only_model` the callback adds nothing.

    To resume from a checkpoint, call `offload(existing="replace", checkpoint=...)` and pass the same checkpoint to the
    Trainer. If the Trainer resumes from weights that differ from the store's weights, the callback raises an error
    before the store is overwritten.

    Each commit stores the learning rates of the next step and the state of the Trainer's scheduler, as
    `OffloadedOptimizer.schedule` does; commits leave out a scheduler that needs a metric. The Trainer still advances
    the scheduler, and logs the same learning rates as without memascend.

    Do not add this callback if you call `memascend.trainer.offload()`, which adds its own callback. That callback
    stores learning rates and scheduler in the Trainer's position instead.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._guard: RemovableHandle | None = None
        # The totals at the last log: bytes read, bytes written, seconds of waiting.
        self._before = (0, 0, 0.0)
        self._advised = False

    def on_init_end(self, args: TrainingArguments, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Finds the offloaded optimizer.

        From now on, rejects a resume whose weights differ from the store's weights.
        """
        self.attach(others.get("optimizer"))
        self._watch(others["model"])

    def _watch(self, model: torch.nn.Module) -> None:
        """Makes each `load_state_dict()` of the model call `_require_same()` first."""
        # Register a function: deepcopy() of the model shares a function, but would copy a bound method and its
        # callback.
        check = lambda *given: self._require_same(*given)  # noqa: E731, PLW0108
        self._guard = model.register_load_state_dict_pre_hook(check)

    def attach(self, optimizer: Any) -> None:
        """Uses the session of `optimizer` for figures and checkpoints. accelerate may have wrapped `optimizer`."""
        self._session = session_of(offloaded_optimizer(optimizer))
        self._before = counted_in(self._session.report())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:
        """Ends the check of weights that are loaded, and calls `_schedule()`.

        If `is_streamed()`, and without `save_only_model`, also replaces the model's `save_pretrained` by a function
        that streams from the store.
        """
        if self._session is None:
            self.attach(others.get("optimizer"))
        assert self._session is not None
        if self._guard is not None:
            # Stop the check during the training. At the end of the training, `load_best_model_at_end` loads weights
            # that differ from the store's weights.
            self._guard.remove()
        self._schedule(others.get("lr_scheduler"))
        model = others["model"]
        if is_streamed(model, self._session) and not args.save_only_model:
            model.save_pretrained = _Saving(model.save_pretrained, self._session, state)

    def _schedule(self, scheduler: Any) -> None:
        """Makes each step commit the Trainer's scheduler, unless the scheduler needs a metric or cannot be stored.

        The scheduler already has its initial or its resumed state.
        """
        assert self._session is not None
        self._session.run.metadata.schedule.catch_up()
        # The Trainer advances a scheduler that needs a metric (ReduceLROnPlateau) at evaluations instead of at steps.
        # So steps do not commit such a scheduler.
        if scheduler is None or not steps_alone(scheduler):
            return
        try:
            self._session.schedule([scheduler], restore=False)
        except ConfigError as error:
            _log.info("only the Trainer's checkpoints, but no commits, store the Trainer's scheduler: %s", error)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Undoes the scheduler's advance in `step()`.

        The Trainer then logs the rate of this step, and advances the scheduler.
        """
        if self._session is not None:
            self._session.run.metadata.schedule.rewind()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Sets the scheduler to its state in the commit, even if the Trainer did not advance the scheduler."""
        if self._session is not None:
            self._session.run.metadata.schedule.catch_up()

    def on_train_end(self, *_: Any, **others: Any) -> None:
        """Restores the model's own `save_pretrained`. From now on, checks the weights of a resume again."""
        others["model"].__dict__.pop("save_pretrained", None)
        if self._guard is not None:
            self._watch(others["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Without `save_only_model`, adds memascend's files to a checkpoint that lacks those of this step."""
        folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        if self._session is None or args.save_only_model or not folder.is_dir():
            return
        if identity_of(folder) != self._session.run.metadata.identity():
            self._session.saving.save(folder, among_others=True)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Adds the figures to a log that has a loss. Adds the logged losses to the history in the report."""
        logs: dict[str, Any] = others["logs"]
        if self._session is None or "loss" not in logs:
            return
        report, losses = self._session.report(), self._session.measurements.history.losses
        # The first call also adds the losses that were logged before a resume.
        for line in state.log_history[-1:] if losses else state.log_history:
            if "loss" in line and "step" in line:
                losses[int(line["step"])] = float(line["loss"])
        then, now = self._before, counted_in(report)
        self._before = now
        if report.advice and not self._advised:
            _log.warning(report.advice)
            self._advised = True
        values = report.peak, now[0] - then[0], now[1] - then[1], round(now[2] - then[2], 4)
        figures = dict(zip(FIGURES, values, strict=True))
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def _require_same(self, model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rejects a Trainer's resume whose weights differ from the store's weights, before any weight is loaded."""
        if not _resumes():
            return
        assert self._session is not None
        for name, parameter in model.named_parameters():
            given = state_dict.get(prefix + name)
            if given is None or given.shape != parameter.shape:
                continue
            values = parameter.detach().cpu()
            if not same_bits(values, given.detach().to("cpu", values.dtype)):
                raise UsageError(
                    f"the Trainer is about to load weights that differ ({name}) from the weights in the store, which "
                    f"belong to {shown(self._session.run.metadata.identity())}. The store was not changed. To "
                    'resume from a checkpoint, call offload(existing="replace", checkpoint=...). To use only '
                    "the checkpoint's weights, load them into the model before you make the Trainer"
                )


def counted_in(report: Report) -> tuple[int, int, float]:
    """Returns three totals of a report: bytes read, bytes written (without first values), and seconds of waiting."""
    # Do not count the first values, because offload() wrote them before the training.
    written = sum(nbytes for kind, nbytes in report.written.items() if kind != "first values")
    return sum(report.read.values()), written, sum(report.seconds.get(stage, 0.0) for stage in WAITING)


class _Saving:
    """Replaces a model's `save_pretrained` during training: streams the Trainer's checkpoints with all optimizer state.

    Passes a call to the model's own `save_pretrained` if the folder is not the Trainer's checkpoint, if the call has
    arguments other than None and True, or if the run is closed.
    """

    def __init__(self, own: Callable[..., Any], session: Session, state: TrainerState) -> None:
        # `own` is a _Saving if an earlier training ended with an error, before on_train_end().
        self._own: Callable[..., Any] = own._own if isinstance(own, _Saving) else own  # noqa: SLF001
        self._session = session
        self._state = state

    def __call__(self, save_directory: str | os.PathLike[str], *rest: Any, **options: Any) -> Any:
        plain = not rest and all(value in (None, True) for value in options.values())
        theirs = Path(save_directory).name == f"checkpoint-{self._state.global_step}"
        if plain and theirs and not self._session.run.resources.closed:
            return self._session.saving.save(save_directory, among_others=True)
        return self._own(save_directory, *rest, **options)


def offloaded_optimizer(optimizer: Any) -> OffloadedOptimizer:
    """Returns the offloaded optimizer of a Trainer, without accelerate's wrappers.

    Raises:
        ConfigError: the Trainer's optimizer is not offloaded.
    """
    found = _unwrapped(optimizer)
    if found is None:
        raise ConfigError(
            "the Trainer's optimizer is not offloaded. Give the Trainer the optimizer that offload() returned: "
            "Trainer(optimizers=(optimizer, scheduler))"
        )
    return found


def is_offloaded(optimizer: Any) -> bool:
    """True if the optimizer of a Trainer, without accelerate's wrappers, is offloaded."""
    return _unwrapped(optimizer) is not None


def _unwrapped(optimizer: Any) -> OffloadedOptimizer | None:
    while optimizer is not None and not isinstance(optimizer, OffloadedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def is_streamed(model: Any, session: Session) -> bool:
    """True if the model's `save_pretrained` writes only weights and configuration. Then the store can stream these."""
    saves: Any = getattr(model, "save_pretrained", None)
    its_own = isinstance(saves, _Saving) or getattr(saves, "__func__", None) is PreTrainedModel.save_pretrained
    return (
        its_own
        and session.attachment.model is model
        and isinstance(model, PreTrainedModel)
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "_auto_class", None) is None
    )
