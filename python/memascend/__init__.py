"""Fine-tune every parameter of a model that does not fit in memory.

The names below are loaded when they are first used, so that importing memascend costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memascend import engine, kernels, memory, nvme
    from memascend.errors import (
        BudgetError,
        ConfigError,
        CorruptionError,
        MemascendError,
        MemoryLimitError,
        StorageError,
        TimeoutExpired,
        UsageError,
    )

__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptionError",
    "MemascendError",
    "MemoryLimitError",
    "StorageError",
    "TimeoutExpired",
    "UsageError",
    "__version__",
    "engine",
    "kernels",
    "memory",
    "nvme",
]

_MODULES = ("engine", "kernels", "memory", "nvme")
_ERRORS = tuple(name for name in __all__ if name[0].isupper())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"memascend.{name}")
    if name in _ERRORS:
        return getattr(importlib.import_module("memascend.errors"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("memascend")
    raise AttributeError(f"module 'memascend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
