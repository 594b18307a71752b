"""Fine-tunes every parameter of a model that does not fit in memory.

`__getattr__` imports each public name on first use, so `import memascend` loads no torch.
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
        DeviceError,
        MemascendError,
        MemoryLimitError,
        RankError,
        StorageError,
        TimeoutExpired,
        UsageError,
    )
    from memascend.plan.table import Plan
    from memascend.session.materialize import materialized
    from memascend.session.offload import offload
    from memascend.session.optimizer import OffloadedOptimizer
    from memascend.session.report import Report

__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptionError",
    "DeviceError",
    "MemascendError",
    "MemoryLimitError",
    "OffloadedOptimizer",
    "Plan",
    "RankError",
    "Report",
    "StorageError",
    "TimeoutExpired",
    "UsageError",
    "__version__",
    "engine",
    "kernels",
    "materialized",
    "memory",
    "nvme",
    "offload",
]

# `__all__` leaves out "trainer", because "trainer" imports packages that may be missing (transformers, accelerate).
_MODULES = ("engine", "kernels", "memory", "nvme", "trainer")
_OWNERS = {
    "OffloadedOptimizer": "session.optimizer",
    "Plan": "plan.table",
    "Report": "session.report",
    "materialized": "session.materialize",
    "offload": "session.offload",
}
_OWNERS |= {name: "errors" for name in __all__ if name[0].isupper() and name not in _OWNERS}


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(importlib.import_module(f"memascend.{_OWNERS[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"memascend.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("memascend")
    raise AttributeError(f"module 'memascend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
