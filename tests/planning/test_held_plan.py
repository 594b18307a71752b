"""Tests which entries a plan holds in memory, and what a step then reads."""

import dataclasses

import pytest
from planning.test_budget import PAGE, model, sizes_of

from memascend.planning.plan import make_plan
from memascend.planning.requirements import Requirements


def run_of(units, update_values="resident", **more):
    # Values of two bytes, and five times as much state.
    entries = {name: (each.nbytes, 5 * each.nbytes) for each in units for name in each.parameters}
    sizes = dataclasses.replace(sizes_of(units), entry_bytes=entries)
    given = {
        "largest_gradient": max(each.nbytes for each in units),
        "all_gradients": sum(each.nbytes for each in units),
    }
    return Requirements(
        units=units, sizes=sizes, gradients="fused", trained=set(entries), update_values=update_values, **given, **more
    )


def held_bytes(run, plan):
    return sum(map(sum, (run.sizes.entry_bytes[name] for name in plan.held)))


def test_nothing_is_held_unasked():
    run = run_of(model())
    plan = make_plan(run)
    assert plan.held == ()
    assert "held entries" not in plan.host
    assert make_plan(run, budget=plan.smallest).held == ()
    assert make_plan(run, budget=plan.ample).held == ()


def test_what_a_budget_has_left_holds_the_first_units():
    run = run_of(model())
    first = make_plan(run)
    one = sum(run.sizes.entry_bytes["embedding.weight"])
    plan = make_plan(run, budget=first.ample + one)
    assert plan.held == ("embedding.weight",)
    assert plan.host["held entries"] == one
    assert plan.host_peak <= plan.budget
    # One byte less, and what fits is held instead, in the same order.
    fewer = make_plan(run, budget=first.ample + one - 1)
    assert fewer.held[0] == "layers.0.weight"
    assert held_bytes(run, fewer) == fewer.host["held entries"] < one


@pytest.mark.parametrize("update_values", ["resident", "read", "never"])
def test_each_byte_of_a_budget_reads_less_until_all_is_held(update_values):
    run = run_of(model(), update_values)
    first = make_plan(run)
    reads = []
    for part in range(6):
        plan = make_plan(run, budget=first.ample + (first.all_held - first.ample) * part // 5)
        assert held_bytes(run, plan) == plan.host.get("held entries", 0) <= plan.budget
        reads.append(sum(plan.read_bytes.values()))
        # What is written does not change.
        assert plan.written_bytes == first.written_bytes
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0
    assert len(set(reads)) == len(reads)
    everything = make_plan(run, budget=first.all_held)
    assert set(everything.held) == set(run.sizes.entry_bytes)
    assert everything.holdable_bytes == 0
    assert make_plan(run, budget=first.all_held - 1).held != everything.held


def test_the_table_says_what_is_held_and_what_more_would_hold():
    run = run_of(model())
    first = make_plan(run)
    ample = make_plan(run, budget=first.ample)
    assert f"host_memory={first.all_held}" in str(ample)
    assert "would hold all state" in str(ample)
    everything = make_plan(run, budget=first.all_held)
    assert "held entries" in str(everything)
    assert "a larger budget would save nothing" in str(everything)
    assert (
        everything.to_dict()["held"] == list(everything.held) or tuple(everything.to_dict()["held"]) == everything.held
    )


def test_frozen_values_are_held_too():
    units = model(frozen=True)
    run = dataclasses.replace(run_of(units), trained=set())
    entries = {name: (nbytes, 0) for name, (nbytes, _) in run.sizes.entry_bytes.items()}
    run = dataclasses.replace(run, sizes=dataclasses.replace(run.sizes, entry_bytes=entries))
    first = make_plan(run)
    assert first.all_held - first.ample == sum(each.nbytes for each in units) >= PAGE
    plan = make_plan(run, budget=first.all_held)
    assert plan.read_bytes.get("values, forward", 0) + plan.read_bytes.get("values, backward", 0) == 0
