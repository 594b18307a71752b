"""Adds memascend's training state to a Trainer's checkpoints, and figures of memory and I/O to its log."""

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
        "memascend.trainer is for the Trainer of transformers: pip install transformers accelerate"
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

__all__ = ["FIGURES", "Callback", "counted_in", "is_streamed", "offloaded_optimizer"]

_log = logging.getLogger("memascend")
# The names of the figures in a log; `Callback` describes them.
FIGURES = ("host_memory_bytes", "read_bytes", "written_bytes", "waiting_seconds")


def _resumes() -> bool:
    """True if a Trainer's resume, `_load_from_checkpoint()`, is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_name != "_load_from_checkpoint":
        frame = frame.f_back
    return frame is not None


class Callback(TrainerCallback):
    """Connects a Trainer to an offloaded model and optimizer: `Trainer(callbacks=[memascend.trainer.Callback()])`.

    The callback adds the files of `OffloadedOptimizer.save` to each checkpoint of the Trainer, and these figures to
    each log that has a loss:

    - `host_memory_bytes`: memascend's peak so far.
    - `read_bytes`, `written_bytes`: bytes read from and written to storage since the last log.
    - `waiting_seconds`: seconds since the last log in which the training loop waited for units, for space for gradients
      and in `step()`.

    The figures appear in the Trainer's log history and printed logs. Reporters (`report_to`) that the Trainer calls
    before this callback do not see them.

    The callback streams the weights of a transformers model once, from storage into the checkpoint. The Trainer saves
    other models (peft) itself first, and the callback then adds a second copy. With `save_only_model` the callback adds
    nothing.

    To resume from a checkpoint, call `offload(existing="replace", checkpoint=...)` and pass the same checkpoint to the
    Trainer. If a Trainer resumes from weights other than the store's, the callback raises an error before they
    overwrite the store.

    Each commit stores the learning rates of the next step and the state of the Trainer's scheduler, as with
    `OffloadedOptimizer.schedule`. The Trainer still advances the scheduler, and logs the same learning rates as without
    memascend. `memascend.trainer.offload()` adds such a callback itself, and stores rates and scheduler in the
    Trainer's position.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._guard: RemovableHandle | None = None
        # Totals at the last log: bytes read, bytes written, seconds of waiting.
        self._before = (0, 0, 0.0)
        self._advised = False

    def on_init_end(self, args: TrainingArguments, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Finds the offloaded optimizer, and begins to reject a resume that loads weights other than the store's."""
        self.attach(others.get("optimizer"))
        self._watch(others["model"])

    def _watch(self, model: torch.nn.Module) -> None:
        """Calls `_require_same()` before each `load_state_dict()` of the model."""
        # deepcopy() of the model shares a function, but would copy the callback with a bound method.
        check = lambda *given: self._require_same(*given)  # noqa: E731, PLW0108
        self._guard = model.register_load_state_dict_pre_hook(check)

    def attach(self, optimizer: Any) -> None:
        """Takes figures and checkpoints from the session of `optimizer`, which accelerate may have wrapped."""
        self._session = session_of(offloaded_optimizer(optimizer))
        self._before = counted_in(self._session.report())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:
        """Replaces the model's `save_pretrained`, so that it streams checkpoints from the store.

        From here on each step also commits the Trainer's scheduler.
        """
        if self._session is None:
            self.attach(others.get("optimizer"))
        assert self._session is not None
        if self._guard is not None:
            # Stop the check: `load_best_model_at_end` loads weights other than the store's at the end of the training.
            self._guard.remove()
        self._schedule(others.get("lr_scheduler"))
        model = others["model"]
        if is_streamed(model, self._session) and not args.save_only_model:
            model.save_pretrained = _Saving(model.save_pretrained, self._session, state)

    def _schedule(self, scheduler: Any) -> None:
        """Makes each step commit the Trainer's scheduler, which has its initial or resumed state now."""
        assert self._session is not None
        self._session.run.metadata.schedule.catch_up()
        # The Trainer advances a scheduler that needs a metric (ReduceLROnPlateau) at evaluations, not at steps.
        if scheduler is None or not steps_alone(scheduler):
            return
        try:
            self._session.schedule([scheduler], restore=False)
        except ConfigError as error:
            _log.info("the Trainer alone keeps its scheduler, in its checkpoints: %s", error)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Undoes the scheduler's advance in `step()`: the Trainer logs this step's rate, then steps the scheduler."""
        if self._session is not None:
            self._session.run.metadata.schedule.rewind()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Sets the scheduler to its state in the commit, whether the Trainer advanced it or not."""
        if self._session is not None:
            self._session.run.metadata.schedule.catch_up()

    def on_train_end(self, *_: Any, **others: Any) -> None:
        """Restores the model's own `save_pretrained`, and checks the weights of resumes again."""
        others["model"].__dict__.pop("save_pretrained", None)
        if self._guard is not None:
            self._watch(others["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Adds memascend's files to a checkpoint whose weights the model wrote itself."""
        folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        if self._session is None or args.save_only_model or not folder.is_dir():
            return
        if identity_of(folder) != self._session.run.metadata.identity():
            self._session.saving.save(folder, among_others=True)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Adds the figures to a log that has a loss, and the logged losses to the report's history."""
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
        """Rejects weights of a Trainer's resume that differ from the store's, before any of them is loaded."""
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
                    f"a Trainer loads other weights ({name} differs) than those of "
                    f"{shown(self._session.run.metadata.identity())}, which the storage holds; storage was "
                    'left as it is: to resume from a checkpoint, begin from it with offload(existing="replace", '
                    "checkpoint=...); to take weights alone, load them before the Trainer is made"
                )


def counted_in(report: Report) -> tuple[int, int, float]:
    """Returns the bytes that the training read, the bytes that it wrote, and its seconds of waiting."""
    # Leave out the first values, which offload() wrote before the training.
    written = sum(nbytes for kind, nbytes in report.written.items() if kind != "first values")
    return sum(report.read.values()), written, sum(report.seconds.get(stage, 0.0) for stage in WAITING)


class _Saving:
    """Replaces `save_pretrained` of a model during training: streams the Trainer's checkpoints, with all state.

    Calls with another folder or with options reach the model's own `save_pretrained`.
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
    while not isinstance(optimizer, OffloadedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            raise ConfigError(
                "the Trainer's optimizer is not offloaded: give it Trainer(optimizers=(optimizer, scheduler)) with the "
                "optimizer that offload() returned"
            )
    return optimizer


def is_streamed(model: Any, session: Session) -> bool:
    """True if the model's `save_pretrained` writes only weights and configuration, so that the store can stream it."""
    saves: Any = getattr(model, "save_pretrained", None)
    its_own = isinstance(saves, _Saving) or getattr(saves, "__func__", None) is PreTrainedModel.save_pretrained
    return (
        its_own
        and session.attachment.model is model
        and isinstance(model, PreTrainedModel)
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "_auto_class", None) is None
    )
