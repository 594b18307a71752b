"""Moves parameters and buffers from "meta" to the CPU, and rebuilds the values that no file holds."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.initialisation import Initialiser, is_written, unwritten
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.checkpoint.weights import Weights


def require_plain(named: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters on meta that cannot be given a body in place.

    Raises:
        ConfigError: something else holds one of them.
    """
    for name, parameter in named.items():
        if parameter.is_meta and weakref.getweakrefs(parameter):
            raise ConfigError(
                f"{name} is on meta and something holds a weak reference to it; call offload() before what made that"
            )
        used: Any = parameter
        if parameter.is_meta and (parameter.grad is not None or used._use_count() > 1):  # noqa: SLF001
            raise ConfigError(
                f"{name} is on meta and has a gradient, or is part of a graph: call zero_grad() and drop what was "
                "computed before offload()"
            )


def embody(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter on meta be on the CPU, with `values`; it stays the object that module and optimizer hold."""
    # `.data` begins a version counter of its own: `values` may be what many parameters are made of.
    other = torch.nn.Parameter(values.data, requires_grad=parameter.requires_grad)
    other.__class__ = parameter.__class__
    other.__dict__.update(parameter.__dict__)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks, None) is not None:
            setattr(other, hooks, getattr(parameter, hooks))
    swap: Any = torch.utils.swap_tensors
    swap(parameter, other)


class MetaBuffers:
    """The buffers of a model that are on meta: made real before there is a store, and meta again where that fails."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # By the tensor on meta: its names, where it stands, whether it is saved.
        self._places: dict[int, list[tuple[str, torch.nn.Module, str, bool]]] = {}
        self._old: dict[int, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            for short, tensor in module._buffers.items():  # noqa: SLF001
                if tensor is None or not tensor.is_meta:
                    continue
                name = f"{prefix}.{short}" if prefix else short
                saved = short not in module._non_persistent_buffers_set  # noqa: SLF001
                self._places.setdefault(id(tensor), []).append((name, module, short, saved))
                self._old[id(tensor)] = tensor
        self._new: dict[int, torch.Tensor] = {}

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """Those that a state dict has, by their first names."""
        found = {}
        for key, places in self._places.items():
            names = [name for name, _, _, saved in places if saved]
            if names:
                found[names[0]] = self._old[key]
        return found

    def install(self) -> None:
        """Put tensors on the CPU in their places, marked as not written."""
        for key, places in self._places.items():
            old = self._old[key]
            new = self._new[key] = unwritten(old)
            for _, module, short, _ in places:
                module._buffers[short] = new  # noqa: SLF001

    def uninstall(self) -> None:
        """Put what was there before into its places."""
        for key, places in self._places.items():
            for _, module, short, _ in places:
                module._buffers[short] = self._old[key]  # noqa: SLF001

    def rebuild(self, weights: Weights | None, *, saved: bool) -> None:
        """Let the modules compute those that are not saved, and with `saved` all; what they cannot, `weights` may have.

        Raises:
            ConfigError: the values of some are not known; it names them.
        """
        asked = {key: places for key, places in self._places.items() if saved or not any(last for *_, last in places)}
        modules = {id(module): module for places in asked.values() for _, module, _, _ in places}
        initialiser = Initialiser(self._model)
        with torch.random.fork_rng(devices=[]):
            for module in modules.values():
                made = [
                    self._new[key] for key, places in asked.items() if any(owner is module for _, owner, *_ in places)
                ]
                initialiser.buffers_of(module, made)
        lost = []
        for key, places in asked.items():
            new, name = self._new[key], places[0][0]
            if is_written(new):
                continue
            if weights is not None and weights.has(name):
                new.copy_(weights.tensor(name, self._old[key]))
            else:
                lost.append(name)
        if lost:
            raise ConfigError(
                f"nobody knows the values of the buffers {', '.join(lost)}: they are on meta, no weights have them, "
                "and no reset_parameters() or _init_weights() of the modules computes them; register them outside of "
                "torch.device('meta'), or give weights= a function that returns them"
            )
        self._require_no_others()

    def _require_no_others(self) -> None:
        for prefix, module in self._model.named_modules():
            for name, value in module.__dict__.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise ConfigError(
                        f"{f'{prefix}.' if prefix else ''}{name} is a tensor on meta, and neither a parameter nor "
                        "a buffer; make it on the CPU"
                    )
