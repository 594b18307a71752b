"""Tests what a step waits for: counted, not measured; and that copies go on beside what computes."""

import pytest
from device.simulated.test_order import LONG, fine

pytestmark = pytest.mark.simulated
WORKERS = "memascend-"
CASES = [
    pytest.param("fused", {}),
    pytest.param("ssd", {}, marks=LONG),
    pytest.param("ram", {}, marks=LONG),
    pytest.param("fused", {"device_memory": "64MiB"}, marks=LONG),
    pytest.param("fused", {"activations": "host"}),
]


def waits(counted):
    """What the threads that compute waited for: the device, and single events."""
    found = [(what, number) for thread, what, number in counted if not thread.startswith(WORKERS)]
    return (
        sum(number for what, number in found if what == "synchronisation"),
        sum(number for what, number in found if what == "wait for an event"),
    )


@pytest.mark.parametrize(("gradients", "options"), CASES)
def test_a_step_waits_once(simulated, gradients, options):
    """A checkpointed model's forward and backward do not wait for the device; `step()` reads what was found, once."""
    passes, step = simulated("waits.counted", gradients=gradients, kind="recomputed", **options)
    synchronised, events = waits(passes)
    assert synchronised <= 1, passes
    # Memory of what a checkpoint saves lives until it was copied, and two of them may: the third waits for the first.
    assert events == 0 or "activations" in options, passes
    assert waits(step)[0] <= 1, step
    assert waits(step)[1] == 0, step
    for part in (passes, step):
        assert not [line for line in part if line[1] in ("registration", "free")], part
        assert not [line for line in part if line[1] == "wait that spins"], part
        assert not [line for line in part if line[0].startswith(WORKERS) and line[1] == "query in the global mode"]
        # From pageable memory nothing goes up, and what comes down is what `step()` reads.
        assert not [line for line in part if line[1] == "copy host to device, pageable"], part


@pytest.mark.parametrize(
    ("gradients", "launches"), [("fused", (8, 0)), ("ram", (0, 1)), pytest.param("ssd", (0, 0), marks=LONG)]
)
def test_gradients_are_checked_by_few_launches(simulated, gradients, launches):
    """One for each that is handed on, or for all that wait on the device, and none for those that storage has."""
    found = simulated("waits.counted", gradients=gradients, kind="plain")
    kernels = [{what: number for _, what, number in part if what.startswith("launch of ")} for part in found]
    assert tuple(part.pop("launch of check_kernel", 0) for part in kernels) == launches
    assert kernels == [{}, {}]


@pytest.mark.parametrize("way", ["uploads", "downloads"])
def test_copies_go_on_beside_what_computes(simulated, way):
    found = simulated(f"waits.{way}_go_on")
    fine(found, 16)
    assert found["arrived"] >= found["needed"]
