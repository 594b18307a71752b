"""Installs hooks into torch that act on the whole process, as long as any model is offloaded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._foreach_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memascend.errors import ConfigError, UsageError
from memascend.gradients.handle import GradientHandle
from memascend.residency.gates import refuse_wrapper
from memascend.run.optimizer import OffloadedOptimizer
from memascend.run.plain_copy import copy_module, is_offloaded

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["ProcessHooks"]

# The types that torch's functions of lists take.
_LISTED: list[Any] = torch.utils._foreach_utils._foreach_supported_types  # noqa: SLF001


class ProcessHooks:
    """One run's share in the hooks: the first installs them, and they leave with the last."""

    _lock = threading.Lock()
    _runs = 0
    _handles: tuple[RemovableHandle, ...] = ()

    def __init__(self) -> None:
        self._held = True
        with self._lock:
            ProcessHooks._runs += 1
            if self._runs == 1:
                ProcessHooks._handles = (
                    torch.nn.modules.module.register_module_module_registration_hook(refuse_wrapper),
                    torch.nn.modules.module.register_module_module_registration_hook(_refuse_trainable),
                    torch.nn.modules.module.register_module_parameter_registration_hook(_refuse_trainable),
                    register_optimizer_step_pre_hook(_refuse_foreign_step),
                )
                # torch picks list kernels by exact type, and on a GPU a list's norm has other bits than a tensor's.
                _LISTED.append(GradientHandle)
                torch.nn.Module.__deepcopy__ = copy_module  # type: ignore[attr-defined]

    def release(self) -> None:
        """The run is over. Twice is fine."""
        with self._lock:
            if not self._held:
                return
            self._held = False
            ProcessHooks._runs -= 1
            if self._runs == 0:
                for handle in self._handles:
                    handle.remove()
                ProcessHooks._handles = ()
                _LISTED.remove(GradientHandle)
                del torch.nn.Module.__deepcopy__  # type: ignore[attr-defined]


def _refuse_trainable(module: torch.nn.Module, name: str, given: torch.nn.Module | torch.nn.Parameter | None) -> None:
    """Refuse trainable parameters that come to an offloaded model: no unit and no update has them."""
    # One that takes another's place is refused by the next forward.
    if given is None or not is_offloaded(module) or name in module._parameters:  # noqa: SLF001
        return
    inner = given.named_parameters(name) if isinstance(given, torch.nn.Module) else [(name, given)]
    for full, parameter in inner:
        if parameter.requires_grad and "_memascend" not in parameter.__dict__:
            raise ConfigError(
                f"{full!r} would be a new trainable parameter of a {type(module).__name__} that is offloaded: save(), "
                "add it to a plain model with those weights, and offload() anew; one with requires_grad=False may be "
                "added at any time"
            )


def _refuse_foreign_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Refuse a step of an optimizer that owns offloaded parameters and is not the one that offload() returned."""
    del args, options
    if isinstance(optimizer, OffloadedOptimizer):
        return
    if any("_memascend" in parameter.__dict__ for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"this {type(optimizer).__name__} is not the optimizer that offload() returned, and its parameters are "
            "offloaded: step the returned one; a Trainer takes it as Trainer(optimizers=(optimizer, None))"
        )
