"""Checks each option of `offload()`, and that the options fit together."""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from memascend import memory
from memascend.errors import ConfigError
from memascend.plan.spare import Spare
from memascend.text import paths_listed, refusal_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
# `_PART` matches a percentage, and `_SIZE` a number of bytes. No size needs an exponent of more than two digits.
_PART = re.compile(r"\s*(\d{1,3}(?:\.\d*)?)\s*%\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)(?:e\+?(\d{1,2}))?\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
# Words that `host_memory=` accepts. AUTO: the budget is the memory that the machine can spare. DEFAULT: the budget is
# the smallest budget that keeps disk and compute busy. This is also the budget without `host_memory=`.
AUTO, DEFAULT = "auto", "default"
# The largest `log_steps=`. A longer gradient log would take too much space, and its replay would take too long.
_LOG_STEPS_MAX = 4096
_Path = str | os.PathLike[str]
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "existing": ("refuse", "resume", "replace", "previous"),
    "gradients": ("auto", "fused", "ssd", "ram"),
    "nonfinite": ("raise", "skip", "commit"),
    "durability": ("step", "none"),
    "activations": ("device", "host", "ssd"),
    "state": (None, "fp32", "bf16", "8bit"),
    "rounding": ("nearest", "stochastic"),
    "reduction": ("ordered", "native"),
}


def parse_bytes(size: float | str, name: str = "a size") -> int:
    """Returns the number of bytes of a size such as 8 << 30, 8e9, "8GiB", "1.5 GiB", "500MB" or "8e9".

    1 MB is 10^6 bytes, and 1 MiB is 2^20 bytes. Error messages call the size `name`.
    """
    if isinstance(size, int) and _is_integer(size):
        nbytes = size
    elif isinstance(size, float) and size.is_integer():
        nbytes = int(size)
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None or match[3].lower() not in _UNITS:
            raise ConfigError(f'{name} must be a number of bytes, or text such as "8GiB" or "500MB", not {size!r}')
        whole, _, fraction = match[1].partition(".")
        # Integers are exact. A float would lose bytes of sizes above 8 PiB, and would round "1.1GB".
        nbytes = int(whole + fraction) * 10 ** int(match[2] or 0) * _UNITS[match[3].lower()] // 10 ** len(fraction)
    if nbytes < 1:
        raise ConfigError(f"{name} must be at least 1 byte, not {size!r}")
    return nbytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `offload()` as the user gave them. Properties such as `paths` and `host_bytes` parse them."""

    storage: _Path | Sequence[_Path] | None = None
    existing: Literal["refuse", "resume", "replace", "previous"] = "refuse"
    host_memory: float | str | Spare | None = None
    device: str | torch.device | None = None
    gradients: Literal["auto", "fused", "ssd", "ram"] = "auto"
    nonfinite: Literal["raise", "skip", "commit"] = "raise"
    max_grad_norm: float | None = None
    accumulation_steps: int = 1
    loss_scale: float | Literal["dynamic"] | None = None
    master_dtype: torch.dtype | Literal["float32"] | None = "float32"  # a name, so that torch need not be imported
    units: Sequence[str] | None = None
    weights: Any = None
    checkpoint: _Path | None = None
    scratch: _Path | None = None
    device_memory: float | str | None = None
    activations: Literal["device", "host", "ssd"] = "device"
    durability: Literal["step", "none"] = "step"
    state: Literal["fp32", "bf16", "8bit"] | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    log_steps: int | None = None
    reduction: Literal["ordered", "native"] = "ordered"
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, not {getattr(self, name)!r}")
        self._check_device()
        self._check_places()
        self._check_numbers()
        if str(self.master_dtype) not in ("None", "float32", "torch.float32"):
            raise ConfigError(f"master_dtype must be torch.float32 or None, not {self.master_dtype!r}")
        self._check_formats()
        _ = self.host_bytes, self.unit_names
        if self.gradients == "fused" and self.max_grad_norm is not None:
            raise ConfigError(
                "max_grad_norm does not work with gradients='fused', which updates each parameter before the norm of "
                "all gradients is known: pass gradients='ssd', 'ram' or 'auto', or remove max_grad_norm"
            )

    def _check_device(self) -> None:
        try:
            kind = self.computes_on
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"device must be None, 'cpu', 'cuda' or a numbered GPU such as 'cuda:1', not {self.device!r}"
            ) from error
        if kind not in ("cpu", "cuda"):
            device = str(self.where)
            raise ConfigError(f"device={device!r} cannot compute the model: pass None, 'cpu', 'cuda' or 'cuda:1'")
        _ = self.device_bytes
        if kind != "cuda" and self.device_memory is not None:
            raise ConfigError(
                "device_memory is for a CUDA device, but this model computes on the CPU: remove device_memory, or "
                "pass device='cuda'"
            )

    def _check_places(self) -> None:
        if self.weights is not None and self.checkpoint is not None:
            raise ConfigError("weights= and checkpoint= both provide the model's weights: pass only one of the two")
        if self.weights is not None and not (isinstance(self.weights, (str, os.PathLike)) or callable(self.weights)):
            raise ConfigError(
                "weights must be a safetensors file, a folder of safetensors files, or a function of (name, "
                f"parameter), not {self.weights!r}"
            )
        for name in ("storage", "scratch", "checkpoint", "weights"):
            value = getattr(self, name)
            several = value if name == "storage" and isinstance(value, (list, tuple)) else [value]
            for path in several:
                _require_possible(name, path)
            if name == "weights":
                continue
            if value is not None and not all(
                isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in several
            ):
                what = "a path or a list of paths" if name == "storage" else "a folder"
                raise ConfigError(f"{name} must be {what}, not {value!r}")
        paths = self.paths
        if paths is not None and (not paths or len(set(paths)) < len(paths)):
            raise ConfigError(f"storage must be one or more paths, each given only once, not {self.storage!r}")
        if paths is None and self.resumes:
            raise ConfigError(
                f"existing={self.existing!r} needs storage=, because without storage= each run uses a new temporary "
                "file: pass storage= with the path of the earlier run"
            )

    def _check_formats(self) -> None:
        if not _is_integer(self.seed) or not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed must be an integer from 0 to 2**64 - 1, not {self.seed!r}")
        if self.rounding == "stochastic" and self.master_dtype is not None:
            raise ConfigError(
                "rounding='stochastic' works only without fp32 master weights: pass master_dtype=None, too, or remove "
                "rounding='stochastic'"
            )

    def _check_numbers(self) -> None:
        steps = self.accumulation_steps
        if not _is_integer(steps) or steps < 1:
            raise ConfigError(f"accumulation_steps must be an integer of at least 1, not {steps!r}")
        logged = self.log_steps
        if logged is not None and not (_is_integer(logged) and 0 <= logged <= _LOG_STEPS_MAX):
            raise ConfigError(f"log_steps must be an integer from 0 to {_LOG_STEPS_MAX}, or None, not {logged!r}")
        if logged and (self.durability == "none" or not self.paths):
            why = "durability='none'" if self.paths else "a temporary store (storage=None)"
            raise ConfigError(
                f"log_steps does not work with {why}, which has no gradient log: remove log_steps, or pass a path as "
                "storage= and durability='step'"
            )
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ConfigError(f"max_grad_norm must be a number above 0, or None, not {self.max_grad_norm!r}")
        if self.timeout is not None and not (_is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise ConfigError(f"timeout must be a finite number of seconds above 0, or None, not {self.timeout!r}")
        scale = self.loss_scale
        if scale not in (None, "dynamic") and not (_is_number(scale) and 0 < scale < math.inf):  # type: ignore[operator]
            raise ConfigError(f"loss_scale must be None, 'dynamic' or a finite number above 0, not {scale!r}")

    @property
    def resumes(self) -> bool:
        """True if the run may continue from an existing store, at the store's last commit or at the commit before."""
        return self.existing in ("resume", "previous")

    @property
    def paths(self) -> tuple[str, ...] | None:
        """The paths of the store; None if the store is a temporary file."""
        return None if self.storage is None else tuple(paths_listed(self.storage))

    @property
    def where(self) -> torch.device:
        """The device that computes: `device=` if given, else CUDA if torch finds a CUDA device, else the CPU."""
        import torch

        if self.device is not None:
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def computes_on(self) -> str:
        """The type of `where`, "cpu" or "cuda"; imports torch only if `device=` is neither of these words."""
        return self.device if self.device in ("cpu", "cuda") else self.where.type

    def moves_activations(self, *, staged: bool) -> bool:
        """True if checkpointed activations are offloaded. activations="host" offloads them only from a device.

        `staged` is True if a device computes.
        """
        return self.activations == "ssd" or (self.activations == "host" and staged)

    @property
    def master(self) -> torch.dtype | None:
        """The dtype of master weights for 16-bit parameters; None: no master weights."""
        import torch

        return None if self.master_dtype is None else torch.float32

    @property
    def spare(self) -> Spare | None:
        """The `Spare` that determines the budget. None: `host_memory=` is a size, a percentage, "default" or None."""
        if self.host_memory == AUTO:
            return Spare()
        return self.host_memory if isinstance(self.host_memory, Spare) else None

    @functools.cached_property
    def host_bytes(self) -> int | None:
        """The budget of host memory in bytes; None: the user gave no size.

        The first access converts a percentage into bytes.
        """
        if self.host_memory in (None, DEFAULT) or self.spare is not None:
            return None
        part = _PART.fullmatch(self.host_memory) if isinstance(self.host_memory, str) else None
        if part is None:
            return parse_bytes(cast("float | str", self.host_memory), "host_memory")
        percent = float(part[1])
        if not 0 < percent <= 100:
            raise ConfigError(
                f"host_memory must be more than 0% and at most 100% of the free memory, not {self.host_memory!r}"
            )
        available: int = memory.limits()["available"]
        return max(1, int(available * percent / 100))

    @property
    def device_bytes(self) -> int | None:
        """The budget of the device's memory in bytes; None: `make_plan` chooses the budget."""
        return None if self.device_memory is None else parse_bytes(self.device_memory, "device_memory")

    @property
    def keeps(self) -> bool:
        """True if `max_grad_norm` or `accumulation_steps` requires that gradients are kept until step()."""
        return self.max_grad_norm is not None or self.accumulation_steps > 1

    @property
    def unit_names(self) -> tuple[str, ...] | None:
        """The names in `units=`. Each named module is one unit. None: `find_units` chooses all units."""
        if self.units is None:
            return None
        if isinstance(self.units, str) or not all(isinstance(name, str) for name in self.units):
            raise ConfigError(f"units must be a list of module names, not {self.units!r}")
        return tuple(self.units)


def _require_possible(name: str, path: object) -> None:
    """Raises ConfigError if `path`, a value of the option `name`, is a path that no file can have."""
    why = refusal_of(path) if isinstance(path, (str, os.PathLike)) else None
    if why is not None:
        raise ConfigError(f"{name} is not a valid path ({why}): {os.fspath(path)!r:.80}. Pass another path")  # type: ignore[call-overload]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and not math.isnan(value))
