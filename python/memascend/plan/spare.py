"""Computes the host memory that a run takes where no budget is given: as much as its machine can spare."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.plan.table import Plan

_GIB = 1 << 30
# The margin that stays free of RAM, or of a cgroup's limit, for the system and for programs that start later.
_MARGIN_PART, _MARGIN_MIN = 1 / 8, 2 * _GIB
# The part of RAM that is registered with CUDA at most: the system can neither move nor swap such pages.
_REGISTERED_PART = 0.8
# The part that memascend takes of a CPU's memory where torch's need there is not known.
_SHARED_PART = 0.5
# Host memory of Python, torch and transformers without a model.
IMPORTS = 740 << 20
# Host memory of a CUDA context, and of CUDA's libraries with their kernels (of an H100).
CONTEXT = 700 << 20


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of a machine, or of the cgroup that limits this process; in bytes."""

    total: int
    available: int  # the part that is not in use

    @classmethod
    def here(cls) -> HostMemory:
        """The memory of this machine, now."""
        limits = memory.limits()
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(total=min(ram, limits["cgroup_limit"] or ram), available=limits["available"])

    @property
    def usable(self) -> int:
        """The bytes that one run may take in all: at most the total without the margin."""
        margin = max(_MARGIN_MIN, int(self.total * _MARGIN_PART))
        return max(0, min(self.available, self.total - margin))


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A `host_memory=` that stands for the bytes that a machine can spare; it counts as not given."""

    machine: HostMemory | None = None  # None: this one, as it is when a run begins
    processes: int = field(default_factory=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # share the machine
    torch_bytes: int | None = None  # of torch on a CPU; None: not known
    taken: int = 0  # bytes of this process that another model takes
    agreed: int | None = None  # the budget that the ranks of a run agreed on; None: they did not
    stored: int | None = None  # the budget of the store, which a later resume prefers again where it is not free now

    def budget(self, *, on_host: bool) -> int:
        """The budget of one process in whole GiB; 0 where less is left. `on_host`: the CPU computes the model."""
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
        """Whether a budget that an earlier process had is free now."""
        machine = self.machine or HostMemory.here()
        return budget + IMPORTS + self.taken + (self.torch_bytes or 0) <= machine.available // self.processes


def with_spare(made: Callable[[int | None], Plan], spare: int) -> Plan:
    """The plan of the largest budget up to `spare` that a run can use; at least the default one.

    `made` makes the plan of a budget, or with None the default one.
    """
    default = made(None)
    if spare <= default.budget:
        return default
    plan = made(spare)
    used = max(default.budget, -(-plan.host_peak // _GIB) * _GIB)
    return plan if used >= spare else made(used)


# A larger budget is worth a word if a step then takes at most this part of its time.
_FASTER = 0.9


def faster(plan: Plan, free: int, seconds: float, waited: float) -> tuple[int, float] | None:
    """The largest budget up to `free` bytes with which a step is faster, and its seconds; None: there is none.

    A step took `seconds`; for `waited` of them the training loop waited for the drive, whose bytes a budget saves.
    """
    fitting = [budget for budget in plan.larger if budget <= free]
    if not fitting or not plan.moved_bytes:
        return None
    budget = max(fitting)
    took = max(seconds - waited, seconds * plan.larger[budget].total / plan.moved_bytes)
    return (budget, took) if took <= _FASTER * seconds else None
