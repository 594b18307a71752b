"""Attaches a model to its run, and detaches it: gates, state dict hooks, the way to its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.device.recurrent import Flattening
from memascend.residency.gates import close_gates, open_gates
from memascend.run.plain_copy import allow_copies, forbid_copies

if TYPE_CHECKING:
    import torch

    from memascend.residency.gates import Frames
    from memascend.residency.residency import Residency
    from memascend.residency.unit_slot import Home
    from memascend.run.optimizer import OffloadedOptimizer
    from memascend.run.state_dicts import StateDicts


class Attachment:
    """The hooks of one model; nothing of it changes before `enter`."""

    def __init__(
        self,
        model: torch.nn.Module,
        gates: list[tuple[torch.nn.Module, tuple[Home, ...]]],
        residency: Residency,
        frames: Frames,
        state_dicts: StateDicts,
        *,
        on_device: bool,
    ) -> None:
        """`gates` are modules with the units that each binds; `on_device`: the host does not compute."""
        self.model = model
        self._gates = gates
        self._residency = residency
        self._frames = frames
        self._state_dicts = state_dicts
        self._flattening = Flattening(model)
        self._on_device = on_device

    def enter(self, optimizer: OffloadedOptimizer) -> None:
        """Let the model be an offloaded one, whose optimizer this is."""
        open_gates(self.model, self._gates, self._residency, self._frames)
        if self._on_device:
            self._flattening.stop()
        self._state_dicts.install()
        allow_copies(self.model.modules())
        self.model.__dict__["_memascend"] = optimizer

    def leave(self) -> None:
        """Let it be a plain one."""
        forbid_copies(self.model.modules())
        self._state_dicts.remove()
        close_gates(module for module, _ in self._gates)
        self._flattening.resume()
        self.model.__dict__.pop("_memascend", None)
