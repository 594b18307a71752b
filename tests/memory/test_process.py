"""Tests the memory of a process that trains: flat in depth, never the model's size, what plan and report say."""

import pytest
from memory.measured import SQUARES, VOCABULARY
from support.grids import usual

MIB = 1 << 20
# A block has 8 MiB, beside which what torch and Python keep of its modules is little.
WIDTH = 512
GROWS_MAX = 0.05
# What a block may cost whose values are on storage: one in fifty of them, with the ends of holes in the heap.
BESIDE_BYTES = 432 << 10
BLOCK_BYTES = SQUARES * WIDTH * WIDTH * 4
# What the C library's heap keeps of a block in a step, around the small activation that is saved.
KEPT_BYTES = 2 << 20


def added(run):
    """What training added beyond the imports, at its peak; activations are the user's."""
    return run["peaks"]["train"] - run["before"]["RssAnon"] - run["activation_bytes"]


def require_flat(measure, shallow, deep, **work):
    """At any depth the process holds at its peak what the shallow one's plan says, and little more."""
    few, many = (measure(blocks=blocks, width=WIDTH, **work) for blocks in (shallow, deep))
    # While the queue is full, torch holds the gradient that waits to be handed on: the embedding's is the largest. When
    # it comes, and how full the queue is then, is a matter of timing, so that peaks of two runs cannot be compared.
    bound = few["plan"]["host_peak"] + VOCABULARY * WIDTH * 4
    for run, blocks in ((few, shallow), (many, deep)):
        assert added(run) <= bound * (1 + GROWS_MAX) + blocks * KEPT_BYTES, (added(run), bound)
    assert many["plan"]["host_peak"] <= few["plan"]["host_peak"] * 1.01
    return few, many


@pytest.mark.timeout(300)
def test_memory_is_flat_in_depth(measure):
    few, many = require_flat(measure, 4, 20, options={"gradients": "fused"}, steps=2)
    for run in (few, many):
        # All but gradients is held from the beginning, and the process grew by that and by Python's objects.
        planned = run["plan"]["host_peak"] - run["plan"]["host"]["gradients"]
        assert run["after"]["RssAnon"] - run["before"]["RssAnon"] == pytest.approx(planned, rel=0.06)
    # What modules, parameters and their state are beside their values: objects, and holes in the heap.
    for when in ("after", "trained"):
        grown = [run[when]["RssAnon"] - run["before"]["RssAnon"] for run in (few, many)]
        assert grown[1] - grown[0] <= (20 - 4) * BESIDE_BYTES, (when, grown)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("start", "dtype"),
    [
        pytest.param({"in_heap": True}, "float32", id="ram-float32"),
        pytest.param({"meta": True}, "float32", id="meta-float32", marks=pytest.mark.slow),
        pytest.param({"in_heap": True}, "bfloat16", id="ram-bfloat16", marks=pytest.mark.slow),
        pytest.param({"meta": True}, "bfloat16", id="meta-bfloat16", marks=pytest.mark.slow),
    ],
)
def test_where_a_model_was_made_does_not_matter(measure, dtype, start):
    """What it leaves in the heap is not filled by the tensors of the steps that follow."""
    work = {**start, "dtype": dtype, "options": {"gradients": "fused"}, "steps": 3}
    few, many = require_flat(measure, 4, 20, **work)
    rest = [run["trained"]["RssAnon"] - run["before"]["RssAnon"] for run in (few, many)]
    assert rest[1] - rest[0] <= (20 - 4) * BESIDE_BYTES, rest


@pytest.mark.timeout(300)
def test_nothing_holds_the_model(measure):
    run = measure(blocks=18, width=WIDTH, vocabulary=64, phases=True, steps=1)
    assert run["model_bytes"] > 120 * MIB
    at_return = run["after"]["RssAnon"]
    # Gradients that wait while both processors are busy, and activations; not a copy of anything large.
    room = run["model_bytes"] // 2
    assert at_return - run["before"]["RssAnon"] < room
    for phase, peak in run["peaks"].items():
        # No step trims the heap after the last backward: where others keep the processors busy, it has most gradients.
        most = run["model_bytes"] if phase in ("backward", "close()") else room
        assert peak - at_return < most, (phase, peak - at_return, run["model_bytes"])


# A model that is kept in RAM as a whole.
BLOCKS = 4
RAM_TIER = {"blocks": BLOCKS, "width": WIDTH, "vocabulary": 64, "steps": 2}
RAM_OPTIONS = {"gradients": "fused", "host_memory": "1GiB"}


@pytest.mark.timeout(300)
def test_what_is_in_ram_takes_what_the_plan_says(measure):
    run = measure(**RAM_TIER, options={**RAM_OPTIONS, "durability": "none"})
    plan = run["plan"]["host"]
    assert plan["records in RAM"] == pytest.approx(3 * run["model_bytes"], rel=0.03)
    assert plan["gradients in RAM"] == run["model_bytes"]
    # No gradient waits yet, nor is one on its way.
    planned = run["plan"]["host_peak"] - plan["gradients in RAM"] - plan["gradients"]
    assert run["after"]["RssAnon"] - run["before"]["RssAnon"] == pytest.approx(planned, rel=0.03)
    # What torch holds is a gradient that is being made.
    assert added(run) <= run["plan"]["host_peak"] * 1.03 + WIDTH * WIDTH * 4


@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_cgroup_of_the_plan_is_enough(measure, cgroup):
    # After offload() all is there but gradients: the process would be killed, and the status says so. Beside them the
    # heap keeps what torch frees, if that takes no more than a tenth.
    waiting = BLOCKS * BLOCK_BYTES
    grow_bytes = waiting + (waiting * 3 // 100 + waiting // 10) * 4
    measure(**RAM_TIER, options=RAM_OPTIONS, cgroup=str(cgroup), grow_bytes=grow_bytes)


# What has no owner: what torch keeps of the first step of a size.
OWNERLESS_BYTES = 2 * MIB
# What is freed after a step gave back what was free: the heap keeps so much at its end (M_TRIM_THRESHOLD).
HEAP_BYTES = 2 * MIB
# Where a weight lay in the C library's heap, a page stays at the end of its hole.
PAGE_BYTES = 4096

CASES = {
    "deep and narrow": {"blocks": 48, "width": 128, "vocabulary": 64},
    "large buffers": {"buffer_bytes": 24 * MIB},
    "resumed": {"resume": True},
    "ram": {"options": {"gradients": "ram"}},
    "activations": {"tokens": 512, "options": {"gradients": "fused", "activations": "ssd"}},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", usual(CASES, "deep and narrow", "activations"))
def test_the_report_is_what_the_process_grew_by(measure, case):
    run = measure(**{"vocabulary": 1024, **CASES[case]})
    owners, total = run["report"]["host"]["owners"], run["report"]["host"]["total"]
    objects = run["report"]["beside"]["Python objects"]
    # The model's own values left the process.
    grown = run["trained"]["RssAnon"] - run["made"]["RssAnon"] + run["model_bytes"]
    beside = OWNERLESS_BYTES + HEAP_BYTES + run["parameters"] * PAGE_BYTES
    # A run that is opened again has its objects where those of the first one were.
    assert total - OWNERLESS_BYTES <= grown <= total + objects + beside, (grown, total, objects, owners)
    if case == "deep and narrow":
        assert grown >= total + objects / 2, (grown, total, objects, owners)
