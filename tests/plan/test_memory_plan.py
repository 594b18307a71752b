"""Tests plans for a budget: the smallest budget, host memory, slot classes (by brute force), and bytes of a step."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memascend
from memascend import memory
from memascend.engine import Sizes
from memascend.plan.memory_plan import Requirements, arena_classes, make_plan
from memascend.plan.units import Unit, count_reads, forward_order, list_windows
from memascend.text import size_option

PAGE = 4096


def unit(name, pages, **more):
    more = {"module": name, "pinned": False, "elements": pages * PAGE // 2, **more}
    return Unit(name=name, parameters=(f"{name}.weight",), nbytes=pages * PAGE, **more)


def model(layers=6, *, block=30, embedding=100, tied=False, frozen=False):
    still = {"frozen_bytes": block * PAGE} if frozen else {}
    blocks = [unit(f"layers.{index}", block, **still) for index in range(layers)]
    again = (blocks[-1].name,) if tied else ()
    ends = [] if tied else [unit("head", embedding)]
    return [unit("embedding", embedding, again=again), *blocks, unit("rest", 1, module=None, pinned=True), *ends]


def sizes_of(units):
    values = sum(each.nbytes for each in units)
    return Sizes(
        total_bytes=12 * values,
        slot_bytes=6 * values,
        index_bytes=640,
        buffer_bytes=2 * PAGE,
        chunk_bytes=16 * PAGE,
        other_bytes=0,
        unit_bytes={each.name: each.nbytes for each in units},
    )


def plan(units, budget=None, gradients="auto", device_budget=None, **more):
    given = {"gradient_bytes": {each.name: each.nbytes for each in units}, **more}
    run = Requirements(units=units, sizes=sizes_of(units), gradients=gradients, **given)
    return make_plan(run, budget=budget, device_budget=device_budget)


def admits(classes, held):
    """True if the arena has a slot for each size in `held`. A size takes a slot of the smallest class that fits."""
    left = dict(classes)
    for nbytes in held:
        bound = min((bound for bound in left if bound >= nbytes), default=None)
        if bound is None or left[bound] == 0:
            return False
        left[bound] -= 1
    return True


@st.composite
def unit_lists(draw):
    kinds = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    pages = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    units = [unit(f"unit{index}", size) for index, size in enumerate(pages)]
    if draw(st.booleans()):
        units.insert(draw(st.integers(0, len(units))), unit("rest", draw(st.integers(1, 3)), pinned=True, module=None))
    if draw(st.booleans()):
        units[0] = unit("tied", 50, again=(units[-1].name,))
    frozen = draw(st.sets(st.integers(0, len(units) - 1)))
    for index in frozen:
        old = units[index]
        units[index] = unit(
            old.name, old.nbytes // PAGE, pinned=old.pinned, module=old.module, again=old.again, frozen_bytes=old.nbytes
        )
    return units


windows = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=6)


def cost(classes):
    return sum(size * count for size, count in classes.items())


@given(windows)
def test_classes_admit_every_window(windows):
    classes = arena_classes(windows)
    assert all(admits(classes, window) for window in windows)


@settings(max_examples=60)
@given(windows)
def test_arena_classes_are_the_cheapest_that_fit(windows):
    sizes = sorted({size for window in windows for size in window})
    best = math.inf
    for bounds in itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in range(1, len(sizes) + 1)):
        if bounds[-1] != sizes[-1]:
            continue
        fits = {size: min(bound for bound in bounds if bound >= size) for size in sizes}
        counts = {bound: max(sum(fits[size] == bound for size in window) for window in windows) for bound in bounds}
        best = min(best, cost(counts))
    assert cost(arena_classes(windows)) == best


def test_arena_classes_merge_many_sizes_and_reject_sizes_below_1_byte():
    classes = arena_classes([[size] for size in range(1, 201)])
    assert classes == {200: 1}
    for size in (0, -1):
        with pytest.raises(memascend.ConfigError, match="at least 1 byte"):
            arena_classes([[size, 5]])
    assert arena_classes([]) == {}


@settings(max_examples=150, deadline=None)
@given(unit_lists(), st.sampled_from(["auto", "fused", "ssd", "ram"]), st.integers(0, 4 << 20))
def test_the_smallest_budget_works_to_the_byte(units, gradients, spare):
    with pytest.raises(memascend.BudgetError) as refused:
        plan(units, 1, gradients)
    smallest = refused.value.smallest
    assert f"works is {size_option(smallest)}," in str(refused.value)
    with pytest.raises(memascend.BudgetError) as refused:
        plan(units, smallest - 1, gradients)
    assert refused.value.smallest == smallest
    assert plan(units, smallest, gradients).host_peak == smallest
    for budget in (smallest, smallest + spare, None):
        found = plan(units, budget, gradients)
        assert found.host_peak == sum(found.host.values()) <= found.budget
        assert found.budget == (found.comfortable if budget is None else budget)
        assert smallest == found.smallest <= found.comfortable <= found.ample
        assert found.queue_bytes >= max(each.nbytes for each in units)
        for held in list_windows(units, found.window):
            assert admits(found.classes, [each.nbytes for each in held.values()])
        json.dumps(found.to_dict())
        assert str(found)


@settings(max_examples=60, deadline=None)
@given(unit_lists(), st.integers(0, 8 << 20))
def test_saved_bytes_equal_the_reads_saved_by_a_larger_budget(units, spare):
    easy = plan(units)
    wider = plan(units, easy.comfortable + spare)
    ample = plan(units, easy.ample)
    reads_of = [sum(each.read_bytes.values()) for each in (easy, wider, ample)]
    assert reads_of == sorted(reads_of, reverse=True)
    assert reads_of[0] - reads_of[1] == wider.saved_bytes
    assert reads_of[0] - reads_of[2] == ample.saved_bytes


@settings(max_examples=30, deadline=None)
@given(unit_lists())
def test_arena_and_chunk_ring_reserve_the_planned_bytes(units):
    found = plan(units)
    with memory.Region(memory.layout(found.classes).reserved, False) as region:
        stats = memory.Arena(region, found.classes).stats()
        assert stats["reserved"] + stats["tables"] == found.host["units"]
        assert region.mapped_bytes == region.nbytes == stats["reserved"]
    with memory.ChunkRing(16 * PAGE, found.chunks, False) as ring:
        stats = ring.stats()
        assert stats["reserved"] + stats["tables"] == found.host["update staging"]


def test_smallest_and_comfortable_plans_have_windows_of_1_and_2():
    units = model()
    easy = plan(units)
    small = plan(units, easy.smallest)
    assert (small.window, small.chunks, small.queue_bytes) == (1, 2, 100 * PAGE)
    # The pinned unit has its own slot. All other units share one slot.
    assert small.classes == {100 * PAGE: 1, PAGE: 1}
    assert (easy.window, easy.chunks, easy.queue_bytes) == (2, 12, 130 * PAGE)
    assert easy.classes == {100 * PAGE: 1, 30 * PAGE: 2, PAGE: 1}
    # The comfortable budget is the same for a model with 48 layers, so it does not depend on the depth of the model.
    assert easy.budget == easy.host_peak == easy.comfortable == plan(model(48)).host_peak


def test_budget_below_comfortable_gives_fewer_chunks_and_less_queue():
    units = model()
    easy = plan(units)
    between = plan(units, easy.comfortable - 7 * PAGE)
    assert (between.window, between.chunks, between.queue_bytes) == (2, 11, 130 * PAGE)
    staging = easy.host["update staging"]
    less = plan(units, easy.comfortable - staging * 8 // 12 - 7 * PAGE)
    assert (less.window, less.chunks) == (2, 4)
    assert 119 * PAGE < less.queue_bytes < 124 * PAGE


def test_larger_budget_keeps_the_last_units_resident():
    units = model()
    easy = plan(units)
    block = 30 * PAGE + 5
    wider = plan(units, easy.comfortable + 2 * block)
    assert wider.classes[30 * PAGE] == 4
    # The last units of the forward stay in memory, because the backward uses these units first.
    assert {"layers.2", "layers.3", "layers.4", "layers.5"} <= wider.resident
    assert "layers.1" not in wider.resident
    assert wider.saved_bytes == 2 * 30 * PAGE
    assert sum(easy.read_bytes.values()) - sum(wider.read_bytes.values()) == wider.saved_bytes
    assert plan(units, easy.comfortable + 2 * block - 1).classes[30 * PAGE] == 3
    ample = plan(units, easy.ample)
    assert ample.saved_bytes > wider.saved_bytes
    assert ample.resident == {each.name for each in units}
    assert "values, backward" not in ample.read_bytes
    assert ample.host_peak == easy.ample == plan(units, 10 * easy.ample).host_peak


def test_plan_counts_the_bytes_that_a_step_reads_and_writes():
    units = model()
    values = sum(each.nbytes for each in units)
    easy = plan(units)
    # Two blocks, the head and the pinned unit stay in their slots from the forward to the backward. The backward reads
    # the embedding and the other four blocks again.
    assert easy.read_bytes == {
        "values, forward": values,
        "values, backward": values - (100 + 2 * 30 + 1) * PAGE,
        "state": 5 * values,
    }
    assert easy.written_bytes == {"values": values, "state": 5 * values}
    small = plan(units, easy.smallest)
    assert small.read_bytes["values, update"] == values
    kept = plan(units, gradients="ssd")
    assert kept.read_bytes["gradients"] == kept.written_bytes["gradients"] == values
    assert (kept.host["gradients"], plan(units, gradients="ram").host["gradients"]) == (130 * PAGE, values)
    assert kept.read_bytes["values, update"] == values
    assert "values, update" not in plan(units, gradients="ssd", update_values="never").read_bytes
    assert plan(units, update_values="read").read_bytes["values, update"] == values


def test_frozen_units_are_not_written_and_stay_from_step_to_step():
    units = model(frozen=True)
    trained = sum(each.nbytes - each.frozen_bytes for each in units)
    easy = plan(units)
    assert easy.written_bytes["values"] == trained
    ample = plan(units, easy.ample)
    assert ample.read_bytes["values, forward"] == trained


@pytest.mark.parametrize("device", [False, True])
def test_next_whole_parameter_gets_memory_only_from_comfortable_budget_up(device):
    how = {"whole_bytes": 90 * PAGE}
    if device:
        how["staging"] = {"unit staging": {PAGE: 4}}
    without = plan(model(), **how)
    easy = plan(model(), whole_next_bytes=70 * PAGE, **how)
    assert easy.smallest == without.smallest
    assert easy.comfortable == without.comfortable + 70 * PAGE
    assert (easy.whole_bytes, easy.whole_next_bytes) == (160 * PAGE, 70 * PAGE)
    assert easy.host["whole parameters"] == easy.whole_bytes
    assert "one is updated while the next is read" in str(easy)
    for budget in range(easy.smallest, easy.comfortable + 100 * PAGE, 9 * PAGE):
        given = plan(model(), budget, whole_next_bytes=70 * PAGE, **how)
        assert given.host_peak == sum(given.host.values()) <= budget
        has_next = budget >= easy.comfortable
        assert given.whole_next_bytes == (70 * PAGE if has_next else 0)
        assert given.whole_bytes == (160 if has_next else 90) * PAGE
        assert given.chunks >= plan(model(), budget - given.whole_next_bytes, **how).chunks


def test_tied_embedding_shares_a_window_with_the_last_block():
    units = model(tied=True)
    assert [each.name for each in forward_order(units)][-2:] == ["layers.5", "embedding"]
    assert {"layers.5", "embedding", "rest"} in [set(held) for held in list_windows(units, 2)]


def test_windows_contain_the_enclosing_units_of_a_unit():
    units = [
        unit("encoder", 40),
        unit("encoder.layers.0", 10, around=("encoder",)),
        unit("encoder.layers.1", 10, around=("encoder",)),
        unit("head", 10),
    ]
    assert {"encoder", "encoder.layers.1"} in [set(held) for held in list_windows(units, 1)]
    assert plan(units, plan(units).smallest).classes == {40 * PAGE: 1, 10 * PAGE: 1}
    # A tied unit may be used again inside the call of another unit's module. Then the window has both units.
    units = [unit("embedding", 40, again=("head",), around_again=("head",)), unit("layers.0", 30), unit("head", 20)]
    assert [set(held) for held in list_windows(units, 1)] == [
        {"embedding"},
        {"layers.0"},
        {"head"},
        {"embedding", "head"},
    ]
    assert plan(units, plan(units).smallest).classes == {20 * PAGE: 1, 40 * PAGE: 1}


def test_count_reads_equals_counts_by_hand():
    a, b, c = (unit(name, 1) for name in "abc")
    assert count_reads([a, b, c], 1) == ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 0})
    assert count_reads([a, b, c], 2) == ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 0, "c": 0})
    assert count_reads([a, b, c], 3) == ({"a": 1, "b": 1, "c": 1}, {"a": 0, "b": 0, "c": 0})
    # "a" is tied, so the forward uses "a" first and last. When the backward begins, "a" therefore occupies one of the
    # two slots.
    assert count_reads([a, b, c, a], 2) == ({"a": 1, "b": 1, "c": 1}, {"a": 0, "b": 1, "c": 0})
    still = [unit(name, 1, frozen_bytes=PAGE) for name in "abc"]
    assert count_reads(still, 3) == ({"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 0})


def test_plan_of_thousands_of_experts_saves_bytes_with_more_budget():
    units = [unit(f"layers.{layer}.experts.{expert}", 2) for layer in range(24) for expert in range(128)]
    easy = plan(units)
    assert plan(units, easy.comfortable + (1 << 20)).saved_bytes > 0


def test_plan_table_joins_repeated_units_into_one_row():
    halves = [unit(f"layers.{index}.{part}", size) for index in range(4) for part, size in (("up", 30), ("down", 20))]
    units = [unit("embedding", 100), *halves, unit("q", 7), unit("k", 7), unit("head", 99)]
    rows = str(plan(units)).split("\n\n")[0].splitlines()[1:]
    assert [row.split("  ")[1] for row in rows] == [
        "embedding",
        "layers.0.up .. layers.3.up (4)",
        "layers.0.down .. layers.3.down (4)",
        "q .. k (2)",
        "head",
    ]
