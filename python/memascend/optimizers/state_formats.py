"""Decides in which format the engine keeps each parameter's state, and what it refuses by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend.errors import ConfigError
from memascend.optimizers import bitsandbytes_state
from memascend.optimizers.clone import named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_16_BITS = frozenset({torch.bfloat16, torch.float16})


def rule_of(optimizer: torch.optim.Optimizer) -> Literal["adam", "momentum"] | None:
    """By which of the engine's rules it can be updated; None where it runs its own code."""
    if type(optimizer) in {torch.optim.AdamW, torch.optim.Adam} or bitsandbytes_state.is_8bit_adam(optimizer):
        return "adam"
    if type(optimizer) is torch.optim.SGD and all(group["momentum"] for group in optimizer.param_groups):
        return "momentum"
    return None


def momentum_options(group: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of `engine.Momentum` for a group of SGD; None where it keeps no momentum now."""
    if not group["momentum"]:
        return None
    return {
        "lr": float(group["lr"]),
        "momentum": float(group["momentum"]),
        "dampening": float(group["dampening"]),
        "nesterov": bool(group["nesterov"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group["maximize"]),
    }


def options_of_formats(formats: Iterable[str | None]) -> str:
    """The options of `offload()` that make entries of these formats of the engine, as they are written."""
    words = {word for given in formats for word in (given or "").split()}
    state = next((f"state={width!r}" for width in ("bf16", "8bit") if width in words), "state=None")
    return f"{state}, master_dtype=None, rounding='stochastic'" if "stochastic" in words else state


@dataclass(frozen=True, kw_only=True)
class StateFormats:
    """What the options of `offload()` say of formats."""

    # In how many bits moments are kept; None: as the optimizer has them.
    state: Literal["fp32", "bf16", "8bit"] | None = None
    stochastic: bool = False  # 16-bit parameters have no masters, and are rounded stochastically
    seed: int = 0  # of what is rounded stochastically
    whole: frozenset[int] = frozenset()  # the ids of parameters that keep 32 bits where others have 8: embeddings
    # By the ids of parameters that are rows of others, how many those have in all.
    elements: Mapping[int, int] = field(default_factory=dict)

    def of(self, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> dict[int, str]:
        """The engine's format of each parameter, by its id, where the choice is ours; others are as without formats.

        Raises:
            ConfigError: optimizer, options, or a parameter do not go with it.
        """
        taken = bitsandbytes_state.is_8bit_adam(optimizer)
        if taken and self.elements:
            raise ConfigError(
                f"{named(optimizer)} of bitsandbytes decides by whole parameters which have 8 bits, and ranks have "
                "rows of them: give a torch.optim.AdamW, with state='8bit'"
            )
        if taken and self.state is None and not self.stochastic and master_dtype is None:
            # As bitsandbytes has it in RAM: its own code.
            return {}
        if not taken and self.state in (None, "fp32") and not self.stochastic:
            self._require_fp32(optimizer, master_dtype)
            return {}
        self._require_rule(optimizer, taken=taken)
        found = {}
        for number, group in enumerate(optimizer.param_groups):
            if group.get("amsgrad"):
                raise ConfigError(
                    f"amsgrad keeps a third moment, which has no format of {self._asked}: set amsgrad=False, or leave "
                    f"{self._asked} out"
                )
            for place, parameter in enumerate(group["params"]):
                if not parameter.is_floating_point():
                    continue
                if taken:
                    width = "8bit" if bitsandbytes_state.has_8_bits(optimizer, number, place) else ""
                else:
                    width = self._width(parameter)
                found[id(parameter)] = self._format(parameter, width, master_dtype)
        if self.stochastic and not any(given.startswith("stochastic") for given in found.values()):
            raise ConfigError(
                "rounding='stochastic' is for parameters of bfloat16 and float16, and the optimizer has none: leave it "
                "out"
            )
        return found

    @property
    def _asked(self) -> str:
        if self.stochastic and self.state in (None, "fp32"):
            return "rounding='stochastic'"
        return f"state={self.state or '8bit'!r}"

    def _require_fp32(self, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> None:
        """state="fp32" is what is there without it, or refused."""
        if self.state is None:
            return
        if rule_of(optimizer) is None:
            self._require_rule(optimizer, taken=False)
        if master_dtype is None and any(
            parameter.dtype in _16_BITS for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise ConfigError(
                "state='fp32' with master_dtype=None: 16-bit parameters without masters have moments of 16 bits in "
                "torch; pass rounding='stochastic' for moments of 32, or leave master_dtype out"
            )

    def _require_rule(self, optimizer: torch.optim.Optimizer, *, taken: bool) -> None:
        if taken and self.state not in (None, "8bit"):
            raise ConfigError(
                f"{named(optimizer)} of bitsandbytes keeps 8 bits, not {self.state!r}: leave state= out, or give a "
                "torch.optim.AdamW"
            )
        if rule_of(optimizer) is None:
            asked = "rounding='stochastic'" if self.state is None else f"state={self.state!r}"
            what = "SGD without momentum" if type(optimizer) is torch.optim.SGD else named(optimizer)
            raise ConfigError(
                f"{asked} is for torch's Adam, AdamW and SGD with momentum, and for bitsandbytes' Adam8bit and "
                f"AdamW8bit; the optimizer is {what}: leave it out"
            )

    def _width(self, parameter: torch.Tensor) -> str:
        if self.state in (None, "fp32"):
            return ""
        elements = self.elements.get(id(parameter), parameter.numel())
        small = elements < bitsandbytes_state.MIN_8BIT_SIZE or id(parameter) in self.whole
        return "" if self.state == "8bit" and small else str(self.state)

    def _format(self, parameter: torch.Tensor, width: str, master_dtype: torch.dtype | None) -> str:
        dtype = parameter.dtype
        if dtype not in _16_BITS | {torch.float32}:
            raise ConfigError(
                f"a parameter is {dtype}, and {self._asked} is for float32, bfloat16 and float16: freeze it, or leave "
                f"{self._asked} out"
            )
        if dtype == torch.float32:
            return width
        if self.stochastic:
            return f"stochastic {width}".strip()
        if master_dtype is None:
            raise ConfigError(
                f"{self._asked} with master_dtype=None: 16-bit parameters without masters are updated with "
                "rounding='stochastic' alone; pass that, or leave master_dtype out"
            )
        # The master of bfloat16 is the value and the bits after it.
        return f"compact {width}" if width and dtype == torch.bfloat16 else width
