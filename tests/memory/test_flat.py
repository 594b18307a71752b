"""Host memory while training: flat in depth, and never the model's size, whatever is called."""

import pytest
from memory.measured import SQUARES

MIB = 1 << 20
# The width of a small model, so that blocks are 8 MB and what Python keeps of a block is little beside them.
WIDTH = 512
GROWS_MAX = 0.05
BLOCK_BYTES = SQUARES * WIDTH * WIDTH * 4


def added(run):
    """What training added beyond the imports, at its peak; activations are the user's."""
    return run["peaks"]["train"] - run["before"]["RssAnon"] - run["activation_bytes"]


def require_flat(measure, shallow, deep, **work):
    few, many = (added(measure(blocks=blocks, width=WIDTH, **work)) for blocks in (shallow, deep))
    # How many gradients wait at the peak is a matter of timing: those of a block more or less, at most.
    assert many <= few * (1 + GROWS_MAX) + BLOCK_BYTES, (few, many)


@pytest.mark.timeout(300)
def test_memory_is_flat_in_depth(measure):
    require_flat(measure, 4, 16, options={"gradients": "fused"})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gradients", ["fused", "ssd", "auto"])
def test_memory_is_flat_up_to_48_blocks(measure, gradients):
    require_flat(measure, 4, 48, options={"gradients": gradients})


# A quarter of the model: what torch holds of gradients and activations, not a copy of anything large.
def room(model_bytes):
    return model_bytes // 4


EVERYTHING = {"blocks": 16, "width": WIDTH, "vocabulary": 64, "phases": True, "steps": 1}


@pytest.mark.timeout(300)
def test_nothing_holds_the_model(measure):
    run = measure(**EVERYTHING)
    assert run["model_bytes"] > 120 * MIB
    at_return = run["after"]["RssAnon"]
    assert at_return - run["before"]["RssAnon"] < room(run["model_bytes"])
    for phase, peak in run["peaks"].items():
        assert peak - at_return < room(run["model_bytes"]), (phase, peak - at_return, run["model_bytes"])


@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_limit_that_the_kernel_enforces(measure, cgroup):
    # The process would be killed, and the status says so.
    measure(**EVERYTHING, cgroup=str(cgroup), grow_bytes=room(16 * BLOCK_BYTES))
