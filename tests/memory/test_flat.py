"""Tests that host memory in training is flat in depth and never the model's size."""

import pytest
from memory.measured import SQUARES, VOCABULARY

MIB = 1 << 20
# Of a small language model: a block has 19 MB, beside which what torch and Python keep of its modules is little.
WIDTH = 768
# Where only the model's size counts.
NARROW = 512
GROWS_MAX = 0.05
# What a block may cost whose values are on storage: one in fifty of them, with the ends of holes in the heap.
BESIDE_BYTES = 432 << 10
BLOCK_BYTES = SQUARES * NARROW * NARROW * 4
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
    few, many = require_flat(measure, 4, 12, options={"gradients": "fused"}, steps=2)
    for run in (few, many):
        # All but gradients is held from the beginning, and the process grew by that and by Python's objects.
        planned = run["plan"]["host_peak"] - run["plan"]["host"]["gradients"]
        assert run["after"]["RssAnon"] - run["before"]["RssAnon"] == pytest.approx(planned, rel=0.06)
    # What modules, parameters and their state are beside their values: objects, and holes in the heap.
    for when in ("after", "trained"):
        grown = [run[when]["RssAnon"] - run["before"]["RssAnon"] for run in (few, many)]
        assert grown[1] - grown[0] <= (12 - 4) * BESIDE_BYTES, (when, grown)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gradients", ["fused", "ssd", "auto"])
def test_memory_is_flat_up_to_48_blocks(measure, gradients):
    require_flat(measure, 4, 48, options={"gradients": gradients})


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
    few, many = require_flat(measure, 4, 16, **work)
    rest = [run["trained"]["RssAnon"] - run["before"]["RssAnon"] for run in (few, many)]
    assert rest[1] - rest[0] <= (16 - 4) * BESIDE_BYTES, rest


# A quarter of the model: what torch holds of gradients and activations, not a copy of anything large.
def room(model_bytes):
    # Gradients that wait while both processors are busy are the most of it.
    return model_bytes // 2


DEPTH = 28
EVERYTHING = {"blocks": DEPTH, "width": NARROW, "vocabulary": 64, "phases": True, "steps": 1}


@pytest.mark.timeout(300)
def test_nothing_holds_the_model(measure):
    run = measure(**EVERYTHING)
    assert run["model_bytes"] > 120 * MIB
    at_return = run["after"]["RssAnon"]
    assert at_return - run["before"]["RssAnon"] < room(run["model_bytes"])
    for phase, peak in run["peaks"].items():
        assert peak - at_return < room(run["model_bytes"]), (phase, peak - at_return, run["model_bytes"])


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_limit_that_the_kernel_enforces(measure, cgroup):
    # The process would be killed, and the status says so.
    measure(**EVERYTHING, cgroup=str(cgroup), grow_bytes=room(DEPTH * BLOCK_BYTES))
