"""Attaches a model to its run, and detaches it: hooks, deep copies, later parameters, autocast."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.init import persistent_buffers
from memascend.errors import ConfigError
from memascend.params.module_hooks import close_gates, open_gates
from memascend.text import warn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from memascend.params.unit import Home
    from memascend.session.run import Run


class Newcomers:
    """The parameters that were added to a model after `offload()`.

    They are checked when the model is used, not when they are added: peft registers an adapter before it freezes it.
    """

    # The number of modules and parameters that were registered in the process.
    _registrations = 0

    def __init__(self, model: torch.nn.Module, *, look: bool) -> None:
        """`look`: False where FSDP2 registers parameters all the time; then all of them pass."""
        self._model = model
        self._look = look
        self._judged = self._registrations

    @classmethod
    def note_registration(cls, module: torch.nn.Module, name: str, given: Any) -> None:
        """A module of the process registered a module or a parameter."""
        del module, name
        cls._registrations += given is not None

    def judge(self) -> None:
        """Before a forward: reject new trainable parameters; without gradients nothing is trained, so it can wait."""
        if self._judged != self._registrations and torch.is_grad_enabled():
            self.require_none()

    def unsaved(self, buffers: Collection[str]) -> list[str]:
        """New frozen parameters and new persistent buffers, which no checkpoint has; `buffers` are the known ones."""
        new = [name for name, one in self._model.named_parameters() if "_memascend" not in one.__dict__]
        return new + [place.name for place in persistent_buffers(self._model) if place.name not in buffers]

    def require_none(self) -> None:
        """Before a step: reject new trainable parameters.

        Raises:
            ConfigError: there is one; nothing was changed.
        """
        now = self._registrations
        if self._judged == now or not self._look:
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and "_memascend" not in parameter.__dict__:
                raise ConfigError(
                    f"{name!r} is a new trainable parameter of a model that is offloaded, and no update has it: freeze "
                    "it with requires_grad_(False), or save(), add it to a plain model with those weights, and "
                    "offload() anew"
                )
        self._judged = now


# A smaller part of a model in 32 bits (norms, routers) gets no warning.
_SHARE = 10


class AutocastWatch:
    """Warns once, when a forward runs under autocast and most of its weights are in 32 bits."""

    def __init__(self, parameters: Iterable[torch.Tensor], device: str) -> None:
        """`device` is the type of the device that computes."""
        self.device = device
        every = list(parameters)
        # autocast copies the weights of matrix products and convolutions.
        copied = sum(p.numel() for p in every if p.dtype == torch.float32 and p.dim() > 1)
        self._nbytes = 2 * copied
        self._silent = copied * _SHARE < sum(p.numel() for p in every)

    def look(self) -> None:
        """A module is entered under autocast."""
        if self._silent:
            return
        self._silent = True
        warn(
            f"autocast over float32 weights keeps 16-bit copies of them all in memory ({self._nbytes / 2**20:.0f} MiB, "
            "outside of host_memory), in the graph and in its cache: make the model 16-bit (model.to(torch.bfloat16)) "
            "before offload(), which keeps fp32 master weights on storage, and leave autocast out"
        )


# The attribute of a module that copy.deepcopy() calls.
_COPIER = "__deepcopy__"
# The attributes of an offloaded module that are ours.
_OURS = (_COPIER, "__prepare_scriptable__", "_memascend")
_KEY = "memascend"
_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


def copy_module(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module deeply as a plain one: this is `torch.nn.Module.__deepcopy__` while there is any run.

    An attribute of each module would cost one or two kilobytes: its dict would no longer share the keys of its class.
    """
    with _plain(module):
        # As copy.deepcopy() does it where a class has no `__deepcopy__`.
        return copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined]  # noqa: SLF001


def _copied(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    with _plain(module):
        return copy.deepcopy(module, memo)


@contextlib.contextmanager
def _plain(module: torch.nn.Module) -> Iterator[None]:
    """Remove our attributes and hooks from the module inside."""
    own = module.__dict__
    ours = {name: own.pop(name) for name in _OURS if name in own}
    tables = {name: own[name] for name in _TABLES if _KEY in own.get(name, ())}
    try:
        for name, table in tables.items():
            own[name] = type(table)((key, hook) for key, hook in table.items() if key != _KEY)
        yield
    finally:
        own.update(ours)
        own.update(tables)


@dataclass(eq=False)
class Attachment:
    """The hooks of one model, which does not change before `enter`."""

    model: torch.nn.Module
    _gates: list[tuple[torch.nn.Module, tuple[Home, ...]]]  # modules with hooks, and the units that each materializes
    _run: Run

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the model an offloaded one with this optimizer."""
        open_gates(self.model, self._gates, self._run.residency)
        for module in self.model.modules():
            # A class with a `__deepcopy__` of its own would copy our attributes, too.
            if getattr(type(module), _COPIER, copy_module) is not copy_module:
                module.__dict__[_COPIER] = functools.partial(_copied, module)
        self.model.__dict__["_memascend"] = optimizer

    def leave(self) -> None:
        """Make the model a plain one."""
        for module in self.model.modules():
            module.__dict__.pop(_COPIER, None)
        close_gates(module for module, _ in self._gates)
        self.model.__dict__.pop("_memascend", None)
