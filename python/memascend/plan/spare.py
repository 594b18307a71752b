"""Computes how much host memory a machine can spare for a run without a given budget."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.plan.table import Plan

_GIB = 1 << 30
# The margin: the part of RAM, or of a cgroup's limit, that stays free for the system and for programs that start later;
# and its minimum in bytes.
_MARGIN_PART, _MARGIN_MIN = 1 / 8, 2 * _GIB
# The part of RAM that may be registered with CUDA: the system can neither move nor swap registered pages.
_REGISTERED_PART = 0.8
# The part of the spare memory that memascend takes if the CPU computes and torch's need is unknown.
_SHARED_PART = 0.5
# Host memory of Python, torch and transformers without a model.
IMPORTS = 740 << 20
# Host memory of a CUDA context, and of CUDA's libraries with their kernels (of an H100).
CONTEXT = 700 << 20


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of a machine, or of the cgroup that limits this process, in bytes."""

    total: int
    available: int  # not in use

    @classmethod
    def here(cls) -> HostMemory:
        """Measures the memory of this machine."""
        limits = memory.limits()
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(total=min(ram, limits["cgroup_limit"] or ram), available=limits["available"])

    @property
    def usable(self) -> int:
        """Bytes that all processes of a run may take together: `available`, at most `total` less the margin."""
        margin = max(_MARGIN_MIN, int(self.total * _MARGIN_PART))
        return max(0, min(self.available, self.total - margin))


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A value of `host_memory=` for all memory that a machine can spare; a run may exceed it, as without a budget."""

    machine: HostMemory | None = None  # None: this machine, measured when a run begins
    # The number of processes that share the machine.
    processes: int = field(default_factory=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch_bytes: int | None = None  # bytes that torch takes for the computation on a CPU; None: unknown
    taken: int = 0  # bytes that another model of this process takes
    agreed: int | None = None  # the budget that the ranks of a run agreed on; None: no agreement yet
    stored: int | None = None  # the budget in the store; commits keep it for later resumes

    def budget(self, *, on_host: bool) -> int:
        """Returns the budget of one process in whole GiB; 0 if less than 1 is left. `on_host`: the CPU computes."""
        if self.agreed is not None:
            return self.agreed
        machine = self.machine or HostMemory.here()
        left = machine.usable // self.processes - IMPORTS - self.taken
        if not on_host:
            registered = int(machine.total * _REGISTERED_PART) // self.processes - self.taken
            left = min(left - CONTEXT, registered)
        elif self.torch_bytes is None:
            left = int(left * _SHARED_PART)
        else:
            left -= self.torch_bytes
        return max(0, left) // _GIB * _GIB

    def fits(self, budget: int) -> bool:
        """True if this machine has enough free memory for the budget of an earlier process."""
        machine = self.machine or HostMemory.here()
        return budget + IMPORTS + self.taken + (self.torch_bytes or 0) <= machine.available // self.processes


def with_spare(made: Callable[[int | None], Plan], spare: int) -> Plan:
    """Returns the plan of the largest budget up to `spare` that a run can use, but at least the default plan.

    `made` makes the plan of a budget; `made(None)` is the default plan.
    """
    default = made(None)
    if spare <= default.budget:
        return default
    plan = made(spare)
    used = max(default.budget, -(-plan.host_peak // _GIB) * _GIB)
    return plan if used >= spare else made(used)


# `faster` returns a larger budget only if a step with that budget takes at most this part of its present time.
_FASTER = 0.9


def faster(plan: Plan, free: int, seconds: float, waited: float) -> tuple[int, float] | None:
    """Returns the largest budget up to `free` bytes, and the seconds of a step with it; None if it is not much faster.

    A step took `seconds`; in `waited` of these seconds the training loop waited for the drive, so only these can be
    saved by moving fewer bytes.
    """
    fitting = [budget for budget in plan.larger if budget <= free]
    if not fitting or not plan.moved_bytes:
        return None
    budget = max(fitting)
    took = max(seconds - waited, seconds * plan.larger[budget].total / plan.moved_bytes)
    return (budget, took) if took <= _FASTER * seconds else None
