"""Recognises the 8-bit Adams of bitsandbytes, without importing it, and reads the state that they keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.residency.away import dense_strides

if TYPE_CHECKING:
    from collections.abc import Mapping

# Elements that share a scale.
BLOCK = 256
# Parameters of fewer elements keep 32 bits, unless its user said otherwise.
MIN_8BIT_SIZE = 4096
_CLASSES = frozenset(
    (f"bitsandbytes.optim.{name.lower()}", f"{paged}{name}{bits}")
    for name in ("Adam", "AdamW")
    for paged in ("", "Paged")
    for bits in ("", "8bit")
)
# What may be said of one parameter alone.
_OVERRIDDEN = frozenset({"optim_bits", "min_8bit_size"})
_NAMES = {"state1": "exp_avg", "state2": "exp_avg_sq", "absmax1": "exp_avg_absmax", "absmax2": "exp_avg_sq_absmax"}


def is_8bit_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Adam8bit or AdamW8bit of bitsandbytes, by the exact type, with the options that we compute."""
    kind = type(optimizer)
    if (kind.__module__, kind.__qualname__) not in _CLASSES:
        return False
    arguments = getattr(optimizer, "args", None)
    wanted = {"optim_bits": 8, "max_unorm": 0.0, "skip_zeros": False}
    return all(getattr(arguments, name, None) == value for name, value in wanted.items())


def has_8_bits(optimizer: Any, group: int, place: int) -> bool:
    """Whether its parameter number `place` of that group keeps 8 bits: as its state is, or would be made.

    Raises:
        ConfigError: bitsandbytes' GlobalOptimManager has other options for this parameter alone.
    """
    parameter = optimizer.param_groups[group]["params"][place]
    state = optimizer.state.get(parameter) or {}
    said = _overridden(optimizer, parameter, (group, place))
    others = sorted(said.keys() - _OVERRIDDEN)
    if others:
        raise ConfigError(
            f"bitsandbytes' GlobalOptimManager has {others[0]!r} for one parameter alone; give that parameter a group "
            "of the optimizer with these options instead"
        )
    if "state1" in state:
        return bool(state["state1"].dtype == torch.uint8)
    if said.get("optim_bits", 8) == 32:
        return False
    smallest = said.get("min_8bit_size", getattr(optimizer.args, "min_8bit_size", MIN_8BIT_SIZE))
    return bool(parameter.numel() >= smallest)


def _overridden(optimizer: Any, parameter: torch.Tensor, index: tuple[int, int]) -> Mapping[str, Any]:
    """What its manager of overrides says of one parameter."""
    manager = optimizer.mng
    said: dict[str, Any] = {**manager.index2config.get(index, {}), **manager.pid2config.get(id(parameter), {})}
    # Those of modules are looked up in its first step only.
    for module, name, config in manager.module_weight_config_triple:
        if getattr(module, name, None) is parameter:
            said.update(config)
    return said


def state_of(optimizer: Any, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """The state that it keeps for a parameter, by our names, and how many updates made it.

    Codes come with the largest of each block; state of 32 bits is float32.

    Raises:
        ConfigError: blocks of the parameter are not what lies together in it.
    """
    state = optimizer.state.get(parameter) or {}
    if "state1" not in state:
        return {}, 0
    found = {}
    for theirs, ours in _NAMES.items():
        if theirs not in state:
            continue
        tensor = state[theirs].detach().cpu()
        if tensor.dtype == torch.uint8 and not parameter.is_contiguous():
            raise ConfigError(
                f"a parameter of shape {list(parameter.shape)} is not row-major, and bitsandbytes' blocks of its state "
                "are: make the parameter contiguous, or start without the state"
            )
        if tensor.shape == parameter.shape:
            tensor = torch.empty_strided(parameter.shape, dense_strides(parameter), dtype=tensor.dtype).copy_(tensor)
        found[ours] = tensor
    return found, int(state["step"])
