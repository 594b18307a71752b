"""Refuses trainable parameters that came to a model after `offload()`: no unit and no update has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.checkpoint.buffers import persistent_buffers
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class Newcomers:
    """The parameters of one model that are not offloaded.

    They are judged where the model is used, not where they come: peft registers an adapter first and freezes it then.
    """

    def __init__(self, model: torch.nn.Module, registrations: Callable[[], int]) -> None:
        """`registrations` counts what any module of the process was given."""
        self._model = model
        self._registrations = registrations
        self._judged = registrations()

    def judge(self) -> None:
        """Before a forward: refuse those that would be trained; without gradients nothing is, and it can wait."""
        if self._judged != self._registrations() and torch.is_grad_enabled():
            self.require_none()

    def unsaved(self, buffers: Collection[str]) -> list[str]:
        """What a checkpoint has not: frozen parameters, and persistent buffers beside those that were offloaded."""
        new = [name for name, one in self._model.named_parameters() if "_memascend" not in one.__dict__]
        return new + [name for name, _, _ in persistent_buffers(self._model) if name not in buffers]

    def require_none(self) -> None:
        """Before a step: refuse those that train.

        Raises:
            ConfigError: there is one; nothing was changed.
        """
        now = self._registrations()
        if self._judged == now:
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and "_memascend" not in parameter.__dict__:
                raise ConfigError(
                    f"{name!r} is a new trainable parameter of a model that is offloaded, and no update has it: freeze "
                    "it with requires_grad_(False), or save(), add it to a plain model with those weights, and "
                    "offload() anew"
                )
        self._judged = now
