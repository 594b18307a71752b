"""A plugin for Axolotl: `plugins: [memascend.integrations.axolotl.MemascendPlugin]`, and `memascend:` with options."""

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
    """What the plugin adds to Axolotl's settings."""

    memascend: dict[str, Any]

    @field_validator("memascend")
    @classmethod
    def _check(cls, given: dict[str, Any]) -> dict[str, Any]:
        return options_of(given)


class _Interruptible(TrainerCallback):
    """Has Ctrl-C raise KeyboardInterrupt: Axolotl's handler saves the model within whatever runs, a commit as well."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """After Axolotl has set its own."""
        theirs = getattr(signal.getsignal(signal.SIGINT), "__module__", None) or ""
        if theirs.startswith("axolotl.") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)


class MemascendPlugin(BasePlugin):  # type: ignore[misc]
    """Offloads what Axolotl's Trainer trains; the same settings started again go on at the next step."""

    def get_input_args(self) -> str:
        """Name the class of the arguments."""
        return f"{MemascendArguments.__module__}.{MemascendArguments.__qualname__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Offload model and optimizer of the Trainer, which is whole here."""
        offload(trainer, **cfg.memascend)
        trainer.add_callback(_Interruptible())
