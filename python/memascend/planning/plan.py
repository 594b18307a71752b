"""Plans a run within a budget: units in memory, sizes of slots, and the bytes that a step moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import BudgetError, ConfigError
from memascend.formatting import bytes_shown
from memascend.planning.held_entries import NOTHING, choose_held
from memascend.planning.ladder import choose, rungs
from memascend.planning.memory_split import MemoryPlanner
from memascend.planning.table import Plan
from memascend.planning.traffic import Traffic, with_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.planning.held_entries import Held
    from memascend.planning.memory_split import MemorySplit, Reads
    from memascend.planning.requirements import Requirements

# A plan says what larger budgets buy, up to the one that holds everything, in so many equal parts.
_PARTS = 4


def make_plan(run: Requirements, *, budget: int | None = None, device_budget: int | None = None) -> Plan:
    """Decide what lies in memory.

    Args:
        run: what it needs memory for.
        budget: bytes of host memory; None: the smallest that keeps disk and compute busy. Of a larger one, units stay
            resident.
        device_budget: likewise of the device, where one computes.

    Raises:
        BudgetError: a budget is too small; `smallest` is the one that works, to the byte.
    """
    if run.segment < 1:
        raise ConfigError(f"a checkpoint segment has at least one unit, not {run.segment}")
    planner = MemoryPlanner(run)
    steps = rungs(planner)
    comfortable, ample = steps[-1], planner.widened(steps[-1], None)
    smallest, device_smallest = _require_room(run, steps, budget, device_budget)
    budget = comfortable.peak if budget is None else budget
    device_budget = comfortable.device_peak if device_budget is None else device_budget
    chosen = choose(planner, steps, budget, None if run.staging is None else device_budget)
    if run.group_bytes:
        # What is left, from here on.
        more = (budget - chosen.peak) // run.group_bytes
        chosen = chosen.with_activations(chosen.activation_groups + more, run.group_bytes)
    held, everything = choose_held(run, budget - chosen.peak), choose_held(run, None)
    holding, chosen = MemoryPlanner(run, held), chosen.holding(held)
    if run.staging is None and chosen.peak >= comfortable.peak:
        chosen = holding.widened(chosen, budget)
    now = holding.count_reads(chosen.classes)
    moved = _traffic(run, chosen, now, held)
    without = _traffic_with(run, comfortable, NOTHING)
    log_steps, log_bytes = _log(run, held)
    larger = [comfortable.peak + everything.room * part // _PARTS for part in range(1, _PARTS + 1)]
    return Plan(
        units=tuple(run.units),
        order=tuple(unit.name for unit in planner.order),
        classes=chosen.classes,
        window=chosen.window,
        segment=run.segment,
        chunks=chosen.chunks,
        activation_groups=chosen.activation_groups,
        gradients=run.gradients,
        queue_bytes=chosen.queue_bytes,
        resident=now.resident,
        held=held.names,
        held_units=held.units,
        whole_bytes=run.whole_bytes,
        host=chosen.host,
        host_peak=chosen.peak,
        device=chosen.device,
        device_peak=chosen.device_peak,
        device_budget=0 if run.staging is None else device_budget,
        device_smallest=device_smallest,
        device_comfortable=comfortable.device_peak,
        device_ample=ample.device_peak,
        budget=budget,
        smallest=smallest,
        comfortable=comfortable.peak,
        ample=ample.peak,
        all_held=comfortable.peak + everything.room,
        disk_bytes=run.sizes.total_bytes,
        logged=held.logged,
        logged_bytes=held.logged_bytes,
        log_steps=log_steps,
        log_bytes=log_bytes,
        log_wanted=0 if run.log is None else run.log.wanted(held.logged),
        read_bytes=moved.read,
        written_bytes=moved.written,
        held_part=moved.held,
        saved_bytes=max(0, without.total - moved.total),
        without=without,
        larger={nbytes: _traffic_at(run, comfortable, nbytes) for nbytes in larger if nbytes > budget},
        device_savable_bytes=max(0, now.total - planner.count_reads(ample.classes).total) if run.staging else 0,
    )


def _log(run: Requirements, held: Held) -> tuple[int, int]:
    return (0, 0) if run.log is None else run.log.plan(held.logged)


def _traffic_at(run: Requirements, comfortable: MemorySplit, budget: int) -> Traffic:
    """About what a step moves with another budget, from the comfortable one on."""
    return _traffic_with(run, comfortable, choose_held(run, budget - comfortable.peak))


def _traffic_with(run: Requirements, comfortable: MemorySplit, held: Held) -> Traffic:
    reads = MemoryPlanner(run, held).count_reads(comfortable.classes)
    return _traffic(run, comfortable, reads, held)


def _require_room(
    run: Requirements, steps: Sequence[MemorySplit], budget: int | None, device_budget: int | None
) -> tuple[int, int]:
    """The smallest budgets that work, on the host and on the device; given ones may not be smaller."""
    smallest = min(step.peak for step in steps)
    if budget is not None and budget < smallest:
        largest = max(run.units, key=run.bytes_of)
        note = f"; the largest unit, {largest.name!r}, has {bytes_shown(run.bytes_of(largest))}"
        raise _too_small("host_memory", budget, smallest, f"{_owners(steps[0].host)}{note}")
    device_smallest = min(step.device_peak for step in steps)
    if device_budget is not None and device_budget < device_smallest:
        raise _too_small("device_memory", device_budget, device_smallest, _owners(steps[0].device))
    return smallest, device_smallest


def _too_small(option: str, budget: int, smallest: int, owners: str) -> BudgetError:
    return BudgetError(
        f"{option} {bytes_shown(budget)} is too small: the smallest budget that works is {smallest} bytes "
        f"({bytes_shown(smallest)}), of which {owners}",
        smallest=smallest,
    )


def _owners(split: Mapping[str, int]) -> str:
    ranked = sorted(split.items(), key=lambda item: -item[1])
    return ", ".join(f"{owner} {bytes_shown(nbytes)}" for owner, nbytes in ranked if nbytes)


def _traffic(run: Requirements, chosen: MemorySplit, reads: Reads, held: Held) -> Traffic:
    """What a step reads and writes."""
    trained = sum(map(run.trained_bytes, run.units))
    # Below the comfortable window, a unit may have made room before its update is done.
    evicted = chosen.window < 2 or run.gradients in ("ssd", "ram")
    updated = {
        "read": trained - held.update,
        "resident": trained - held.update if evicted else 0,
        "never": 0,
    }
    state = run.sizes.slot_bytes - sum(run.sizes.unit_bytes.values())
    waiting = sum(run.gradient_bytes.get(name, 0) for name in held.names)
    spilled = max(0, run.all_gradients - waiting) if run.gradients == "ssd" else 0
    read = {
        "values, forward": reads.forward,
        "values, backward": reads.backward,
        "values, update": updated[run.update_values],
        "state": state - held.state,
        "gradients": spilled,
    }
    spared = (held.update, held.state) if run.applies else (0, 0)
    whole = {"values": trained - spared[0], "state": state - spared[1], "gradients": spilled}
    written = with_log(whole, held.logged_bytes, _log(run, held)[0])
    return Traffic(
        {kind: nbytes for kind, nbytes in read.items() if nbytes},
        {kind: nbytes for kind, nbytes in written.items() if nbytes},
        held.update / trained if trained else 0.0,
    )
