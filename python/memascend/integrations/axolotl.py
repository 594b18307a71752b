"""Offloads a model that Axolotl trains, as a plugin: `plugins: [memascend.integrations.axolotl.MemascendPlugin]`.

The entry `memascend:` in Axolotl's settings has the options of `memascend.trainer.offload()`.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator
from transformers import TrainerCallback

from memascend.integrations import offload, options_of

__all__ = ["MemascendArguments", "MemascendPlugin"]


class MemascendArguments(BaseModel):
    """The entry `memascend:` that the plugin adds to Axolotl's settings."""

    memascend: dict[str, Any]

    @field_validator("memascend")
    @classmethod
    def _check(cls, given: dict[str, Any]) -> dict[str, Any]:
        return options_of(given)


class _Interruptible(TrainerCallback):
    """Makes Ctrl-C raise KeyboardInterrupt.

    Axolotl's own handler would save the model at once, even in the middle of a commit.
    """

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Replaces Axolotl's handler of SIGINT, which Axolotl may have set by now, by Python's handler."""
        theirs = getattr(signal.getsignal(signal.SIGINT), "__module__", None) or ""
        if theirs.startswith("axolotl.") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)


class MemascendPlugin(BasePlugin):  # type: ignore[misc]
    """Offloads model and optimizer of Axolotl's Trainer; a second start with the same settings resumes the run."""

    def get_input_args(self) -> str:
        """Returns the path of the class that validates the plugin's settings."""
        return f"{MemascendArguments.__module__}.{MemascendArguments.__qualname__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Offloads model and optimizer. Axolotl calls this method once the Trainer is complete."""
        offload(trainer, **cfg.memascend)
        trainer.add_callback(_Interruptible())
