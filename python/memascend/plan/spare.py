"""Computes how much host memory a machine can spare for a run, and how much time a larger budget would save."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.plan.table import Plan

_GIB = 1 << 30
# The part of RAM, or of a cgroup's limit, that stays free for the system and for programs that start later. This part
# is called the margin. `_MARGIN_MIN` is the smallest margin in bytes.
_MARGIN_PART, _MARGIN_MIN = 1 / 8, 2 * _GIB
# The part of RAM that may be registered with CUDA. The rest must stay unregistered, because the system can neither move
# nor swap registered pages.
_REGISTERED_PART = 0.8
# The part of the spare memory that memascend takes if the CPU computes, and if the memory that torch needs is unknown.
_SHARED_PART = 0.5
# Bytes of host memory that Python, torch and transformers take without a model.
IMPORTS = 740 << 20
# Bytes of host memory that a CUDA context and CUDA's libraries take, measured with an H100.
CONTEXT = 700 << 20


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory, in bytes, of a machine, or of the cgroup that limits this process."""

    total: int
    available: int  # bytes that processes can still take

    @classmethod
    def here(cls) -> HostMemory:
        """Measures the memory of this machine."""
        limits = memory.limits()
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(total=min(ram, limits["cgroup_limit"] or ram), available=limits["available"])

    @property
    def usable(self) -> int:
        """Bytes that all processes of a run may take together: `available`, but at most `total` minus the margin."""
        margin = max(_MARGIN_MIN, int(self.total * _MARGIN_PART))
        return max(0, min(self.available, self.total - margin))


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A value of `host_memory=`: the budget is all memory that the machine can spare.

    If the default plan needs more memory than this budget, the run still uses the default plan.
    """

    machine: HostMemory | None = None  # None: this machine, measured when a run begins
    # The number of processes that share the machine.
    processes: int = field(default_factory=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch_bytes: int | None = None  # bytes that torch needs for the computation if the CPU computes; None: unknown
    taken: int = 0  # bytes that another model of this process takes
    agreed: int | None = None  # the budget that the ranks of a run agreed on; None: the ranks have not agreed yet
    stored: int | None = None  # the budget that an earlier process of this run wrote into the store

    def budget(self, *, on_host: bool) -> int:
        """Returns `agreed`; if it is None, the spare memory of one process in whole GiB (0 if less than 1 GiB is left).

        `on_host` is True if the CPU computes.
        """
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
        """True if this machine has enough free memory for `budget`, the budget of an earlier process."""
        machine = self.machine or HostMemory.here()
        return budget + IMPORTS + self.taken + (self.torch_bytes or 0) <= machine.available // self.processes


def with_spare(made: Callable[[int | None], Plan], spare: int) -> Plan:
    """Returns the plan for a budget of `spare` bytes, or of fewer bytes if a run cannot use all of them.

    Returns the default plan if `spare` is not larger than the default plan's budget. The function `made` takes a budget
    and returns the plan for this budget. `made(None)` returns the default plan.
    """
    default = made(None)
    if spare <= default.budget:
        return default
    plan = made(spare)
    used = max(default.budget, -(-plan.host_peak // _GIB) * _GIB)
    return plan if used >= spare else made(used)


# `faster` returns a larger budget only if the larger budget reduces the time of a step to this part or less.
_FASTER = 0.9


def faster(plan: Plan, free: int, seconds: float, waited: float) -> tuple[int, float] | None:
    """Returns the largest budget in `plan.larger` up to `free` bytes, and the seconds of a step with this budget.

    Returns None if there is no such budget, or if a step would not be much faster. A step took `seconds`. During
    `waited` of these seconds, the training loop waited for the drive. A step that moves fewer bytes saves at most the
    `waited` seconds.
    """
    fitting = [budget for budget in plan.larger if budget <= free]
    if not fitting or not plan.moved_bytes:
        return None
    budget = max(fitting)
    took = max(seconds - waited, seconds * plan.larger[budget].total / plan.moved_bytes)
    return (budget, took) if took <= _FASTER * seconds else None
