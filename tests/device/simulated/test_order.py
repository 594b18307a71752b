"""Tests that what a stream reads is there: every weight, saved activation and gradient, in stream order.

Each wait of the device room is taken away in turn, and has to be missed.
"""

import pytest
from device.conftest import POSES

LONG = [pytest.mark.slow, pytest.mark.skipif(not POSES, reason="make test-posing runs it")]
pytestmark = pytest.mark.posing
MODES = ["fused", "ssd", "ram"]
KINDS = ["plain", "recomputed", "tied", "recurrent", "streams"]
# Those of `make test`: each kind and each mode.
SHORT = {("plain", "fused"), ("recomputed", "ssd"), ("tied", "ram"), ("recurrent", "fused"), ("streams", "ssd")}
CASES = [
    pytest.param(kind, mode, marks=[] if (kind, mode) in SHORT else LONG, id=f"{kind}-{mode}")
    for kind in KINDS
    for mode in MODES
]
SLOW_US = 3000
RECOMPUTED = {"kind": "recomputed", "activations": "host"}
# How each wait shows: what is slow, and how the model is trained. The first ones are in `make test`, too.
MISSED = {
    "compute after upload": {"delays": {"in": SLOW_US}},
    "a slot's next upload after its use": {"delays": {"own": SLOW_US}, "blocks": 6},
    "an update after its gradient's copy": {"delays": {"out": SLOW_US}},
    "another stream after upload": {"kind": "streams", "delays": {"in": SLOW_US}},
    "a chunk's next read after its copy": {"delays": {"in": SLOW_US}},
    "the first upload after other uses of the memory": {"fresh": True},
    "a slot's uses by all streams": {"delays": {"own": SLOW_US}, "blocks": 6},
    "a gradient's copy after the gradient": {"delays": {"own": SLOW_US}},
    "a checkpoint's copy after what it saves": {**RECOMPUTED, "delays": {"own": SLOW_US}},
    "a checkpoint's memory after its copy": {**RECOMPUTED, "delays": {"out": SLOW_US}},
    "memory for a checkpoint after its last use": {**RECOMPUTED, "delays": {"own": SLOW_US}},
    "a checkpoint's way back after its way out": {**RECOMPUTED, "delays": {"out": SLOW_US}},
    "compute after a checkpoint's copy": {**RECOMPUTED, "delays": {"in": SLOW_US}},
}
IN_SHORT = 2


def fine(found, least=20):
    assert not found["wrong"], found
    assert not found["faults"], found
    assert found["checked"] >= least


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_order(simulated, kind, mode):
    fine(simulated("order.train", kind=kind, gradients=mode))


@pytest.mark.parametrize("slow", ["in", "out", "own"])
@pytest.mark.parametrize("activations", ["host", "ssd"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
@pytest.mark.skipif(not POSES, reason="make test-posing runs it")
def test_order_of_arrival(simulated, mode, activations, slow):
    """Each step on a stream of its own, and one kind of work late."""
    found = simulated(
        "order.train", kind="recomputed", gradients=mode, activations=activations, side=True, delays={slow: SLOW_US}
    )
    fine(found)


MUTATED = [pytest.param(*item, marks=[] if at < IN_SHORT else LONG) for at, item in enumerate(MISSED.items())]


@pytest.mark.parametrize(("wait", "options"), MUTATED)
def test_each_wait_is_needed(simulated, wait, options):
    # What the CPU sees of damaged weights is said on the way.
    assert simulated("order.train", without=wait, gradients="fused", **options)["wrong"]
    fine(simulated("order.train", gradients="fused", **options))


def test_every_wait_has_a_test(simulated):
    assert set(simulated("mutations.names")) == {*MISSED, "the arena's memory after its uses"}


@pytest.mark.slow
@pytest.mark.skipif(not POSES, reason="make test-posing runs it")
def test_the_arena_is_kept_for_streams_that_use_it(simulated):
    assert simulated("order.let_go", without="the arena's memory after its uses")["wrong"]
    fine(simulated("order.let_go"), 16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["a forward", "a backward", "a forward by Ctrl-C"])
@pytest.mark.slow
@pytest.mark.skipif(not POSES, reason="make test-posing runs it")
def test_a_step_that_fails(simulated, where, mode):
    fine(simulated("lives.fails", where=where, gradients=mode))


@pytest.mark.parametrize(
    "life",
    [
        "closed_in_flight",
        "accumulated",
        pytest.param("several", marks=LONG),
        pytest.param("forked", marks=LONG),
    ],
)
def test_lives(simulated, life):
    fine(simulated(f"lives.{life}"))


def test_exit_without_close(simulated):
    """Copies are under way when the interpreter ends."""
    assert simulated("lives.left") == "fine"
