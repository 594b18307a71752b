"""Tests which records a plan keeps in RAM, and the bytes that a step then moves."""

import dataclasses
import itertools
import shutil

import pytest
import torch
from plan.test_memory_plan import PAGE, model, sizes_of
from plan.test_units import Language
from torch import nn

from memascend.plan.cost import Drive, Work, assumed_host, moves, seconds, update_seconds, ways
from memascend.plan.decision import free_space_beside
from memascend.plan.memory_plan import Requirements, make_plan
from memascend.plan.options import Options
from memascend.session.decide import planned
from memascend.text import bytes_shown, size_option


def run_of(units, update_values="resident", **more):
    # The optimizer state of each record has five times as many bytes as the record's values.
    records = {name: (each.nbytes, 5 * each.nbytes) for each in units for name in each.parameters}
    sizes = dataclasses.replace(sizes_of(units), record_bytes=records)
    gradients = {name: values for name, (values, _) in records.items()}
    given = {"gradients": "fused", "update_values": update_values, **more}
    return Requirements(units=units, sizes=sizes, gradient_bytes=gradients, **given)


def ram_tier_bytes(run, plan):
    return sum(map(sum, (run.sizes.record_bytes[name] for name in plan.ram_tier)))


def test_room_beside_subtracts_only_unallocated_shard_bytes(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    shards = [tmp_path / "one", tmp_path / "two"]
    assert free_space_beside([*map(str, shards)], 600) == 400
    for shard in shards:
        shard.write_bytes(bytes(300))
    assert free_space_beside([*map(str, shards)], 600) == 1000


def test_budget_above_comfortable_keeps_the_first_units_in_ram():
    run = run_of(model())
    first = make_plan(run)
    assert "records in RAM" not in first.host
    assert {make_plan(run, budget=budget).ram_tier for budget in (None, first.smallest, first.comfortable)} == {()}
    nbytes = sum(run.sizes.record_bytes["embedding.weight"])
    waits = run.gradient_bytes["embedding.weight"]
    plan = make_plan(run, budget=first.comfortable + nbytes + waits)
    assert plan.ram_tier == ("embedding.weight",)
    assert plan.ram_tier_units == {"embedding"}
    assert (plan.host["records in RAM"], plan.host["gradients in RAM"]) == (nbytes, waits)
    assert plan.host_peak <= plan.budget
    # Modules compute directly with the records in RAM, which need no slots. So the arena's slots for other units do not
    # change.
    assert plan.classes == first.classes
    # With one byte less, the embedding's record is too large. The plan then keeps smaller records in RAM instead,
    # beginning with the first block.
    fewer = make_plan(run, budget=first.comfortable + nbytes + waits - 1)
    assert fewer.ram_tier[0] == "layers.0.weight"
    assert ram_tier_bytes(run, fewer) == fewer.host["records in RAM"] < nbytes


@pytest.mark.parametrize(("part", "has_first"), [(0.1, False), (0.2, True), (0.34, True), (0.5, True), (0.7, True)])
def test_units_in_ram_are_at_equal_distances(part, has_first):
    run = run_of(model(layers=24))
    first = make_plan(run)
    plan = make_plan(run, budget=int(first.comfortable + part * (first.all_in_ram - first.comfortable)))
    assert ("embedding" in plan.ram_tier_units) == has_first
    blocks = [index for index in range(24) if f"layers.{index}" in plan.ram_tier_units]
    apart = [later - earlier for earlier, later in itertools.pairwise(blocks)]
    assert max(apart) - min(apart) <= 1
    assert blocks[0] < max(apart)
    assert 24 - blocks[-1] <= max(apart) + 1


def test_ram_tier_needs_no_gradient_memory_with_gradients_ram():
    run = dataclasses.replace(run_of(model()), gradients="ram")
    first = make_plan(run)
    plan = make_plan(run, budget=first.all_in_ram)
    assert set(plan.ram_tier) == set(run.sizes.record_bytes)
    assert "gradients in RAM" not in plan.host
    assert first.all_in_ram - first.comfortable == ram_tier_bytes(run, plan)


@pytest.mark.parametrize("update_values", ["resident", "read", "never"])
def test_larger_budgets_read_fewer_bytes_until_all_records_are_in_ram(update_values):
    run = run_of(model(), update_values)
    first = make_plan(run)
    reads = []
    for part in range(6):
        plan = make_plan(run, budget=first.comfortable + (first.all_in_ram - first.comfortable) * part // 5)
        assert ram_tier_bytes(run, plan) == plan.host.get("records in RAM", 0) <= plan.budget
        reads.append(sum(plan.read_bytes.values()))
        # Without a log, a step also writes the records in RAM, so it writes the same bytes with every budget.
        assert plan.written_bytes == first.written_bytes
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0
    assert len(set(reads)) == len(reads)
    everything = make_plan(run, budget=first.all_in_ram)
    assert set(everything.ram_tier) == set(run.sizes.record_bytes)
    assert everything.larger == {}
    assert make_plan(run, budget=first.all_in_ram - 1).ram_tier != everything.ram_tier


def test_plan_table_lists_ram_tier_and_traffic_of_larger_budgets():
    run = run_of(model())
    first = make_plan(run)
    assert list(first.larger)[-1] == first.all_in_ram
    for budget, moved in first.larger.items():
        assert make_plan(run, budget=budget).moved_bytes <= moved.total
        assert f'host_memory="{size_option(budget)}"' in str(first)
        assert f'"{size_option(budget)}": ' in moves(first)
    everything = make_plan(run, budget=first.all_in_ram)
    assert "records in RAM" in str(everything)
    assert "a larger budget would save nothing" in str(everything)
    assert moves(everything).startswith(f"{len(everything.ram_tier)} parameters are kept in RAM")
    assert everything.to_dict()["ram_tier_units"] == sorted(each.name for each in run.units)
    assert everything.saved_bytes == first.moved_bytes - everything.moved_bytes


def test_ram_tier_includes_frozen_values():
    units = model(frozen=True)
    run = run_of(units)
    records = {name: (nbytes, 0) for name, (nbytes, _) in run.sizes.record_bytes.items()}
    sizes = dataclasses.replace(run.sizes, record_bytes=records)
    run = dataclasses.replace(run, sizes=sizes, gradient_bytes={})
    first = make_plan(run)
    assert first.all_in_ram - first.comfortable == sum(each.nbytes for each in units) >= PAGE
    plan = make_plan(run, budget=first.all_in_ram)
    assert plan.read_bytes.get("values, forward", 0) + plan.read_bytes.get("values, backward", 0) == 0


@pytest.mark.parametrize("applies", [False, True])
def test_predicted_seconds_of_larger_budgets_match_their_plans(applies):
    run = run_of(model())
    run = dataclasses.replace(run, applied=run.gradient_bytes.keys() if applies else ())
    host = dataclasses.replace(assumed_host(None, shared=True), ram_tier_threads=2)
    drive = Drive(read=5e6, write=4e6)

    def took(plan):
        own = dataclasses.replace(host, update=update_seconds(plan, host.update))
        return seconds(ways(plan, Work(forward=0.0, backward=0.0), drive, own)["fused"])

    first = make_plan(run)
    assert took(first.moving(first.without)) == took(first)
    for budget, traffic in first.larger.items():
        own, last = make_plan(run, budget=budget), took(first.moving(traffic))
        # `own` may be faster than predicted, because it caches units in memory that is too small for another record.
        assert 0.98 * last <= took(own) <= 1.01 * last
        assert took(own.moving(own.without)) == pytest.approx(took(first))
    assert took(first) > last
    # With the whole model in RAM, step() updates the model with two threads. If `applies` is true, durability is
    # "none". Then the only other work of step() is to compute checksums of values.
    elements = sum(each.elements for each in run.units)
    assert last >= elements * host.update / 2
    if applies:
        values = sum(each.nbytes for each in run.units)
        assert last == pytest.approx((elements * host.update + 2 * values * host.check) / 2)


def test_deferred_updates_read_values_for_modules_of_the_next_step():
    units = model()
    run = dataclasses.replace(run_of(units), gradients="ssd")
    names = run.gradient_bytes.keys()
    values = sum(run.gradient_bytes.values())
    assert make_plan(run).spared is None
    assert make_plan(dataclasses.replace(run, deferrable=names - {"rest.weight"})).spared is None
    deferring = dataclasses.replace(run, deferrable=names)
    plan = make_plan(deferring)
    back = plan.read_bytes["values, backward"]
    assert plan.spared == (values, back)
    forward, backward, early = (plan.by(way) for way in ("next forward", "next backward", "early"))
    update = {"values, update": values, "state": 5 * values, "gradients": values}
    assert forward.read_bytes == {"values, backward": back, **update}
    assert backward.read_bytes == {**update, "last step's update, forward": 7 * values}
    assert early.read_bytes == {"values, forward": values, "values, backward": back, "state": 5 * values}
    for way in (forward, backward, early):
        assert way.written_bytes == plan.written_bytes
        # by() returns the same plan for a way, even if it is called on the plan for another way.
        assert way.by("next backward") == way
    assert f"read: last step's update, forward  {bytes_shown(7 * values)}" in str(backward)
    # Updates of parameters in RAM read no bytes. `backward.larger` has the bytes that the way "next backward" moves
    # with larger budgets.
    budget = list(plan.larger)[1]
    half = make_plan(deferring, budget=budget).by("next backward")
    streams = sum(nbytes for name, nbytes in run.gradient_bytes.items() if name not in half.ram_tier)
    assert 0 < streams < values
    assert half.read_bytes["last step's update, forward"] == 7 * streams
    assert half.moved_bytes <= backward.larger[budget].total < backward.moved_bytes
    assert half.without.total == backward.moved_bytes
    # With all records in RAM, step() makes all updates at once and defers no update.
    assert make_plan(deferring, budget=plan.all_in_ram).spared is None


def test_streamed_parameters_are_never_in_the_ram_tier():
    run = run_of(model())
    name = run.units[0].parameters[0]
    first = make_plan(dataclasses.replace(run, streamed={name}))
    everything = make_plan(dataclasses.replace(run, streamed={name}), budget=1 << 40)
    assert set(everything.ram_tier) == set(run.sizes.record_bytes) - {name}
    assert first.all_in_ram == make_plan(run).all_in_ram - sum(run.sizes.record_bytes[name]) - run.gradient_bytes[name]


WIDTH = 768
# Bytes that a step moves for an element that streams.
MOVED = {torch.float32: 28, torch.bfloat16: 26}
# Bytes that an element needs in RAM: its value, its optimizer state, and its gradient, which waits for step().
RAM_TIER = {torch.float32: 16, torch.bfloat16: 14}
# Bytes that a step writes for an element in RAM if there is a gradient log. Each step writes the gradient to the log.
# Each whole record is written once in 16 steps, so a step writes a sixteenth of the value and state on average.
LOGGED = {torch.float32: 4 + 12 / 16, torch.bfloat16: 2 + 12 / 16}


@pytest.mark.parametrize(
    ("kind", "durability"), [(torch.optim.AdamW, "step"), (torch.optim.AdamW, "none"), (torch.optim.SGD, "none")]
)
@pytest.mark.parametrize("dtype", MOVED)
def test_moved_bytes_fall_linearly_from_comfortable_to_all_in_ram(dtype, kind, durability):
    with torch.device("meta"):
        # The model has 124 M parameters. Most parameters are in blocks, as in large models.
        model = Language(25, WIDTH, 4096).to(dtype)
    elements = sum(parameter.numel() for parameter in model.parameters())
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    log = {"storage": "store", "log_steps": 16} if durability == "step" else {}

    def plan_of(budget):
        options = Options(host_memory=budget, gradients="fused", durability=durability, device="cpu", **log)
        return planned(model, kind(model.parameters(), lr=0.1, **momentum), options).plan

    default = plan_of(None)
    moved, takes = MOVED[dtype] * elements, RAM_TIER[dtype] * elements
    still = LOGGED[dtype] * elements if log else 0
    if kind is torch.optim.SGD:
        # The constants above are for AdamW, so this test takes the bytes for SGD from the plan.
        moved, takes = default.moved_bytes, default.all_in_ram - default.comfortable
    assert default.all_in_ram - default.comfortable == pytest.approx(takes, rel=0.01)
    for part in range(6):
        plan = plan_of(default.comfortable + (default.all_in_ram - default.comfortable) * part // 5)
        line = moved - (moved - still) * (plan.budget - default.comfortable) / takes
        assert plan.moved_bytes == pytest.approx(line, abs=0.03 * moved), part
        assert plan.ram_tier_part == pytest.approx(part / 5, abs=0.05)
    assert log or plan.moved_bytes == 0


def test_each_state_format_writes_the_expected_bytes_per_element():
    width = 1024
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    # With fp32 state, `budget` has room for a part of the records in RAM.
    plain = planned(model, optimizer, Options(device="cpu")).plan
    budget = (plain.ample + plain.all_in_ram) // 2
    # Bytes that a step writes for an element: its value, the half of its master weight that the value does not contain,
    # and its moments. The state "8bit" adds one bit for each element, and two scales of 4 bytes for each 256 elements.
    wanted = {"fp32": 12.0, "bf16": 8.0, "8bit": 2 + 2 + 2 + 1 / 8 + 2 * 4 / 256}
    plans = {
        # Without a log, each step also writes the records in RAM.
        state: planned(model, optimizer, Options(device="cpu", log_steps=0, state=state, host_memory=budget)).plan
        for state in wanted
    }
    for state, plan in plans.items():
        assert sum(plan.written_bytes.values()) / (6 * width**2) == pytest.approx(wanted[state], rel=0.01), state
    assert plans["fp32"].ram_tier_part < plans["bf16"].ram_tier_part < plans["8bit"].ram_tier_part
    assert plans["8bit"].disk_bytes < 0.6 * plans["fp32"].disk_bytes
