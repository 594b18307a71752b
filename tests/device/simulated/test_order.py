"""Tests that what a stream reads is there: every weight, saved activation, gradient and norm, in stream order."""

import pytest
from device.conftest import POSES

LONG = [pytest.mark.slow, pytest.mark.skipif(not POSES, reason="make test-posing runs it")]


def long(test):
    for mark in LONG:
        test = mark(test)
    return test


pytestmark = pytest.mark.posing
MODES = ["fused", "ssd", "ram"]
KINDS = ["plain", "recomputed", "tied", "streams", "aside"]
# Those of `make test`: each kind and each mode.
SHORT = {("plain", "fused"), ("recomputed", "ssd"), ("tied", "ram"), ("streams", "ssd")}
CASES = [
    pytest.param(kind, mode, marks=[] if (kind, mode) in SHORT else LONG, id=f"{kind}-{mode}")
    for kind in KINDS
    for mode in MODES
]
SLOW_US = 3000


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
@long
def test_order_of_arrival(simulated, mode, activations, slow):
    """Each step on a stream of its own, and one kind of work late."""
    found = simulated(
        "order.train", kind="recomputed", gradients=mode, activations=activations, side=True, delays={slow: SLOW_US}
    )
    fine(found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["a forward", "a backward", "a forward by Ctrl-C", "a backward by Ctrl-C"])
@long
def test_a_step_that_fails(simulated, where, mode):
    fine(simulated("lives.fails", where=where, gradients=mode))


@pytest.mark.parametrize("life", ["several", "forked"])
@long
def test_lives(simulated, life):
    fine(simulated(f"lives.{life}"))


ALL = [None, None, None]


@pytest.mark.parametrize(
    ("gradients", "options"),
    [
        ("fused", {"kind": "recomputed"}),
        *(
            pytest.param(mode, {"kind": kind, **options}, marks=LONG)
            for mode in (*MODES, "auto")
            for kind, options in (
                ("recomputed", {"activations": "host"}),
                ("streams", {"delays": {"side": SLOW_US}}),
                # A micro-batch that leaves a block out, whose gradients are complete on another stream.
                ("aside", {"delays": {"side": SLOW_US}, "batches": [None, None, 1]}),
                ("aside", {"delays": {"own": SLOW_US}, "batches": [None, 2, None]}),
                ("tied", {"delays": {"out": SLOW_US}, "optimizer": "several"}),
            )
        ),
    ],
)
def test_micro_batches_by_layer(simulated, gradients, options):
    found = simulated("lives.accumulated", gradients=gradients, **options)
    fine(found, 200)
    assert found["by_layer"] is True


@long
def test_random_numbers_of_micro_batches(simulated):
    found = simulated("lives.random_numbers")
    fine(found)
    assert (found["by_layer"], found["same"]) == (True, True)


@pytest.mark.parametrize(
    ("gradients", "slow"),
    [("fused", "in"), *(pytest.param(mode, late, marks=LONG) for mode in (*MODES, "auto") for late in ("own", "out"))],
)
def test_several_optimizers(simulated, gradients, slow):
    """One runs itself on the engine's thread, on whole matrices; the arithmetic of the other one is the engine's."""
    fine(
        simulated(
            "order.train", kind="aside", gradients=gradients, optimizer="several", steps=3, delays={slow: SLOW_US}
        )
    )


@pytest.mark.parametrize(
    ("optimizer", "slow"),
    [("sgd", "out"), *(pytest.param(of, late, marks=LONG) for of in ("sgd", "several") for late in ("own", "in"))],
)
def test_updates_that_begin_before_the_norm(simulated, optimizer, slow):
    """Some stand, others are discarded, and made anew from the gradient that was written."""
    found = simulated("lives.clipped", optimizer=optimizer, kind="aside", delays={slow: 1000})
    fine(found, 150)
    assert found["early"] == {"steps": 3, "anew": 2}


@pytest.mark.parametrize("mode", MODES)
@long
def test_another_device_than_the_current_one(simulated, mode):
    fine(simulated("order.train", kind="recomputed", gradients=mode, activations="host", device="cuda:1"))


@pytest.mark.parametrize("backward", [pytest.param(False, marks=LONG), True])
def test_exit_without_close(simulated, backward):
    """Copies are under way when the interpreter ends."""
    assert simulated("lives.left", backward=backward) == "fine"


@pytest.mark.parametrize("options", [{"slow": "in"}, {"slow": "out", "backward": True}])
@long
def test_a_model_that_is_dropped(simulated, options):
    fine(simulated("lives.closed", dropped=True, gradients="fused", **options))
