"""Attaches a model to a run and detaches it: hooks, deep copies, checks for added parameters and for autocast."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.init import persistent_buffers
from memascend.errors import ConfigError
from memascend.params.module_hooks import install_hooks, remove_hooks
from memascend.text import warn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from memascend.params.unit import CachedUnit
    from memascend.session.run import Run


class AddedParameters:
    """Rejects trainable parameters that were added to a model after `offload()`.

    The check runs when the model is used, not when a parameter is registered: peft registers an adapter before it
    freezes the adapter.
    """

    # How many modules and parameters code of this process has registered while a run was open. When this number has
    # changed, `require_none` checks the model again.
    _registrations = 0

    def __init__(self, model: torch.nn.Module, *, look: bool) -> None:
        """With `look=False`, the checks reject nothing: FSDP2 itself replaces parameters of modules in each forward."""
        self._model = model
        self._look = look
        # The value of `_registrations` at the last check that found no new trainable parameter.
        self._judged = self._registrations

    @classmethod
    def note_registration(cls, module: torch.nn.Module, name: str, given: Any) -> None:
        """Counts a registration. torch calls this hook when any module registers a submodule or a parameter."""
        del module, name
        cls._registrations += given is not None

    def check_before_forward(self) -> None:
        """Rejects new trainable parameters before a forward, unless the forward runs without gradients."""
        if self._judged != self._registrations and torch.is_grad_enabled():
            self.require_none()

    def unsaved(self, buffers: Collection[str]) -> list[str]:
        """Returns the names of new parameters and new persistent buffers, which checkpoints do not contain.

        `buffers` are the names of the buffers that the model had at `offload()`.
        """
        new = [name for name, one in self._model.named_parameters() if "_memascend" not in one.__dict__]
        return new + [place.name for place in persistent_buffers(self._model) if place.name not in buffers]

    def require_none(self) -> None:
        """Rejects new trainable parameters.

        Raises:
            ConfigError: the model has a new trainable parameter; nothing was changed.
        """
        now = self._registrations
        if self._judged == now or not self._look:
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and "_memascend" not in parameter.__dict__:
                raise ConfigError(
                    f"{name!r} is a new trainable parameter, which was added after offload(), so step() cannot update "
                    "it. Freeze it with requires_grad_(False). Or call optimizer.save(folder), add the parameter to a "
                    "plain model with the saved weights, and call offload() again"
                )
        self._judged = now


# `AutocastWatch` does not warn if less than 1 / `_SHARE` of a model's elements are in float32 matrices. For example,
# the routers of a bf16 model may be small float32 matrices.
_SHARE = 10


class AutocastWatch:
    """Warns once if a forward runs under autocast and 1 / `_SHARE` of the model or more is in float32 matrices."""

    def __init__(self, parameters: Iterable[torch.Tensor], device: str) -> None:
        """`device` is the type of the device that computes the model."""
        self.device = device
        every = list(parameters)
        # autocast makes 16-bit copies of the weights of matrix products and convolutions.
        copied = sum(p.numel() for p in every if p.dtype == torch.float32 and p.dim() > 1)
        self._nbytes = 2 * copied
        self._silent = copied * _SHARE < sum(p.numel() for p in every)

    def look(self) -> None:
        """Warns once, if a large part of the model is in float32 matrices.

        `Session.entered` calls this method when a module is entered under autocast.
        """
        if self._silent:
            return
        self._silent = True
        warn(
            f"autocast keeps 16-bit copies of float32 weights in memory (up to {self._nbytes / 2**20:.0f} MiB, which "
            "host_memory does not limit). Instead, remove autocast, and convert the model with "
            "model.to(torch.bfloat16) before offload(): fp32 master weights are then kept on storage"
        )


# The name of the method that copy.deepcopy() calls on an object, if the object has it.
_COPIER = "__deepcopy__"
# The attributes that memascend sets on an offloaded module.
_OURS = (_COPIER, "__prepare_scriptable__", "_memascend")
# The key of memascend's hook in a module's tables of hooks.
_KEY = "memascend"
_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


def copy_module(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """Copies a module deeply, without the attributes and hooks of memascend.

    `ProcessHooks` sets this function as `torch.nn.Module.__deepcopy__` while any run is open. Setting the function on
    each module instead would cost one or two kilobytes for each module, because the module's `__dict__` could no longer
    share its keys with other modules of the same class.
    """
    with _plain(module):
        # copy.deepcopy() makes this call for an object of a class without `__deepcopy__`.
        return copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined]  # noqa: SLF001


def _copied(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """Copies a module by its class's own `__deepcopy__`, without the attributes and hooks of memascend."""
    with _plain(module):
        return copy.deepcopy(module, memo)


@contextlib.contextmanager
def _plain(module: torch.nn.Module) -> Iterator[None]:
    """Removes the attributes and hooks of memascend from the module for the duration of a `with` block."""
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
    """Attaches one model to its run (`enter`), and detaches the model (`leave`). The constructor changes nothing."""

    model: torch.nn.Module
    _hooked_modules: list[
        tuple[torch.nn.Module, tuple[CachedUnit, ...]]
    ]  # the modules to hook, each with the units that its hook materializes
    _run: Run

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Installs hooks and `__deepcopy__` functions on modules; sets `model._memascend` to `optimizer`."""
        install_hooks(self.model, self._hooked_modules, self._run.residency)
        for module in self.model.modules():
            # A class with its own `__deepcopy__` would copy the attributes of memascend, too.
            if getattr(type(module), _COPIER, copy_module) is not copy_module:
                module.__dict__[_COPIER] = functools.partial(_copied, module)
        self.model.__dict__["_memascend"] = optimizer

    def leave(self) -> None:
        """Detaches the model: removes the hooks and attributes of memascend."""
        for module in self.model.modules():
            module.__dict__.pop(_COPIER, None)
        remove_hooks(module for module, _ in self._hooked_modules)
        self.model.__dict__.pop("_memascend", None)
