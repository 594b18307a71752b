"""Puts the whole state into a Trainer's checkpoints, and figures into its log."""

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
# The names of the figures in a log, as the class below describes them.
FIGURES = ("host_memory_bytes", "read_bytes", "written_bytes", "waiting_seconds")


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

    To resume from a checkpoint, begin from it, `offload(existing="replace", checkpoint=...)`, and pass it to the
    Trainer. If a Trainer resumes from other weights than the store's, an error is raised before they overwrite the
    store.

    Each commit has the learning rates of the next step, and the state of the Trainer's scheduler, as with
    `OffloadedOptimizer.schedule`. The Trainer advances it, and its log has the rates that it has without memascend.
    With `memascend.trainer.offload()`, which adds a callback of this kind itself, the Trainer's position has both.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._guard: RemovableHandle | None = None
        # The figures at the last log: bytes read and written, seconds of waiting.
        self._before = (0, 0, 0.0)
        self._advised = False

    def on_init_end(self, args: TrainingArguments, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Find the offloaded optimizer; from here on, weights that a Trainer's resume loads must be the store's."""
        self.attach(others.get("optimizer"))
        self._watch(others["model"])

    def _watch(self, model: torch.nn.Module) -> None:
        # Copies of the model share a function, and would copy the object of a method.
        check = lambda *given: self._require_same(*given)  # noqa: E731, PLW0108
        self._guard = model.register_load_state_dict_pre_hook(check)

    def attach(self, optimizer: Any) -> None:
        """Report on the optimizer of this Trainer."""
        self._session = session_of(offloaded_optimizer(optimizer))
        self._before = counted_in(self._session.report())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:
        """Take over the writing of checkpoints."""
        if self._session is None:
            self.attach(others.get("optimizer"))
        assert self._session is not None
        if self._guard is not None:
            # A training loads its best weights at its end.
            self._guard.remove()
        self._schedule(others.get("lr_scheduler"))
        model = others["model"]
        if is_streamed(model, self._session) and not args.save_only_model:
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
        if self._guard is not None:
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
        report, losses = self._session.report(), self._session.measurements.history.losses
        # At first also those before a resume.
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
        """Reject weights of a resume that differ from the store's, before any is loaded."""
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
                    f"{shown(self._session.run.metadata.identity())}, which the storage holds, and storage was "
                    'left as it is: to resume from a checkpoint, begin from it with offload(existing="replace", '
                    "checkpoint=...); to take weights alone, load them before the Trainer is made"
                )


def counted_in(report: Report) -> tuple[int, int, float]:
    """Bytes read and written by the training, and its seconds of waiting."""
    # offload() itself wrote the first values.
    written = sum(nbytes for kind, nbytes in report.written.items() if kind != "first values")
    return sum(report.read.values()), written, sum(report.seconds.get(stage, 0.0) for stage in WAITING)


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


def offloaded_optimizer(optimizer: Any) -> OffloadedOptimizer:
    """The offloaded optimizer of a Trainer, without accelerate's wrapper."""
    while not isinstance(optimizer, OffloadedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            raise ConfigError(
                "the Trainer's optimizer is not offloaded: give it Trainer(optimizers=(optimizer, scheduler)) with the "
                "optimizer that offload() returned"
            )
    return optimizer


def is_streamed(model: Any, session: Session) -> bool:
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
