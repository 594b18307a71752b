"""Lists private names of transformers, accelerate and TRL; checks that the methods and functions among them exist."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import trainer as transformers_trainer
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from memascend.errors import ConfigError

__all__ = ["ExportableState", "PreTrainedModel", "is_newest_checkpoint", "newest_checkpoint", "transformers_trainer"]

_TRIED = "transformers 5.6 to 5.23, accelerate 1.11 to 1.15, TRL 0.24 to 1.16"
# Methods that the Trainer must have. `Resume` replaces all of them except `_inner_training_loop` on the Trainer object.
METHODS = (
    *("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch", "_load_rng_state"),
    *("_maybe_log_save_evaluate", "_finalize_training", "_clip_grad_norm", "_get_grad_norm", "get_batch_samples"),
    *("training_step", "floating_point_ops", "_track_num_input_tokens", "get_train_dataloader", "train"),
    *("create_optimizer", "hyperparameter_search", "_load_best_model", "save_model"),
    "_save_optimizer_and_scheduler",
)
# Callback events of a step that the Trainer fires before `step()`.
BEFORE_STEP = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step")
# Attributes with the running sums and the starting counts from which the Trainer computes the values of its log.
SUMS = (
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos"),
    *("_initial_num_input_tokens_seen", "_total_train_tokens"),
)
# Attributes in which the Trainers of TRL, Axolotl and sentence-transformers collect numbers by name. These Trainers log
# the averages of the numbers.
AVERAGES = ("_metrics", "_stored_metrics", "accum_loss_components")
# The attribute of accelerate's optimizer that is True if its last step was skipped.
SKIPPED = "_is_overflow"
# The name of the file in a Trainer's checkpoint that has the scheduler's state.
SCHEDULER = "scheduler.pt"
# The name of the file in a Trainer's checkpoint that has TrainerState.
STATE = "trainer_state.json"
# The classes of callbacks that print the log.
PRINTING = (PrinterCallback, ProgressCallback)
# The name of the function that the Trainer's loop calls to skip batches at a resume. memascend replaces this function,
# because `Feed` skips the batches.
SKIP = "skip_first_batches"
# The name of the method by which from_pretrained() reads weight files into a model on the meta device.
LOADER = "_load_pretrained_model"


def require(trainer: Any) -> None:
    """Checks that the Trainer has the methods in `METHODS`, and that its module has the function `SKIP`.

    Raises:
        ConfigError: `trainer` is not a Trainer of transformers, or one of these methods or the function is missing.
    """
    if not isinstance(trainer, transformers_trainer.Trainer):
        raise ConfigError(
            "memascend.trainer.offload() takes a Trainer of transformers or of a subclass, not "
            f"{type(trainer).__name__}. Without a Trainer, pass the model and the optimizer to memascend.offload()"
        )
    missing = [name for name in METHODS if not callable(getattr(trainer, name, None))]
    missing += [name for name in (SKIP,) if not hasattr(transformers_trainer, name)]
    if missing:
        raise _untried(f"{type(trainer).__name__} has no {missing[0]}()")


def require_loader() -> tuple[type[Any], Any]:
    """Returns transformers' LoadStateDictInfo and build_glob_alternation.

    LoadStateDictInfo reports missing and unexpected keys. build_glob_alternation() makes a pattern that matches the
    names of parameters whose dtype differs from the model's dtype.

    Raises:
        ConfigError: this version of transformers does not have one of these names, or loads weights by another method.
    """
    if not callable(getattr(PreTrainedModel, LOADER, None)):
        raise _untried(f"PreTrainedModel has no {LOADER}()")
    try:
        from transformers.core_model_loading import build_glob_alternation
        from transformers.utils.loading_report import LoadStateDictInfo
    except ImportError as error:
        raise _untried(str(error)) from error
    return LoadStateDictInfo, build_glob_alternation


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Returns the newest checkpoint of a Trainer in a folder; None if the folder has no checkpoint."""
    # get_last_checkpoint() has no annotations.
    last: Any = get_last_checkpoint
    found = last(folder) if Path(folder).is_dir() else None
    return None if found is None else Path(found)


def is_newest_checkpoint(checkpoint: str | Path) -> bool:
    """True if a checkpoint is the newest checkpoint in its parent folder."""
    newest = newest_checkpoint(Path(checkpoint).parent)
    return newest is not None and newest.resolve() == Path(checkpoint).resolve()


def _untried(what: str) -> ConfigError:
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "accelerate"))
    return ConfigError(f"{what} ({found}). memascend.trainer was tested with {_TRIED}: install one of these versions")
