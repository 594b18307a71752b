"""A plugin for Axolotl: `plugins: [memascend.integrations.axolotl.MemascendPlugin]`, and `memascend:` with options."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from memascend.integrations import offload, options_of

__all__ = ["MemascendArguments", "MemascendPlugin"]


class MemascendArguments(BaseModel):
    """What the plugin adds to Axolotl's settings."""

    memascend: dict[str, Any]

    @field_validator("memascend")
    @classmethod
    def _check(cls, given: dict[str, Any]) -> dict[str, Any]:
        return options_of(given)


class MemascendPlugin(BasePlugin):  # type: ignore[misc]
    """Offloads what Axolotl's Trainer trains; the same settings started again go on at the next step."""

    def get_input_args(self) -> str:
        """Name the class of the arguments."""
        return f"{MemascendArguments.__module__}.{MemascendArguments.__qualname__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Offload model and optimizer of the Trainer, which is whole here."""
        offload(trainer, **cfg.memascend)
