"""Tests that each wait of the device room is needed: taken away, it is missed where something is slow."""

import ast
from pathlib import Path

import pytest
from device.simulated.test_order import LONG, SLOW_US, fine

import memascend

pytestmark = pytest.mark.posing
RECOMPUTED = {"gradients": "fused", "kind": "recomputed", "activations": "host"}
# Of more pieces than there are chunks.
STORED = {"gradients": "fused", "kind": "recomputed", "activations": "ssd", "activation": 5 << 17}
DROPPED = {**RECOMPUTED, "device_memory": "64MiB", "delays": {"in": 20_000}}


def slow(what, **options):
    return "order.train", {"gradients": "fused", "delays": {what: SLOW_US}, **options}


# How each wait shows. The first ones are in `make test`, too.
MISSED = [
    ("compute after upload", *slow("in")),
    ("the end after downloads", "lives.closed", {"gradients": "fused", "slow": "out", "backward": True}),
    ("a step after its norm", *slow("own")),
    ("an update after its gradient's copy", *slow("out")),
    ("another stream after upload", *slow("in", kind="streams")),
    ("a chunk's next read after its copy", *slow("in")),
    ("a slot's next upload after its use", *slow("own", blocks=6)),
    ("a slot's uses by all streams", *slow("own", blocks=6)),
    ("the first upload after other uses of the memory", "order.train", {"gradients": "fused", "fresh": True}),
    ("a gradient's copy after the gradient", *slow("own")),
    ("an optimizer's own code after the gradient", *slow("side", kind="aside", optimizer="rmsprop")),
    ("the end after uploads", "lives.closed", {"gradients": "fused", "slow": "in"}),
    ("the end after checkpoints' copies", "lives.closed", {**RECOMPUTED, "slow": "out"}),
    ("the arena's memory after its uses", "order.let_go", {}),
    ("added memory after its uses", "order.added", {"by": "own"}),
    ("added memory after its uses", "order.added", {"by": "side"}),
    ("a checkpoint's copy after what it saves", *slow("own", **RECOMPUTED)),
    ("a checkpoint's memory after its copy", *slow("out", **RECOMPUTED)),
    ("memory for a checkpoint after its last use", *slow("own", **RECOMPUTED)),
    ("a checkpoint's way back after its way out", *slow("out", **RECOMPUTED)),
    ("compute after a checkpoint's copy", *slow("in", **RECOMPUTED)),
    ("storage after a checkpoint's copy", *slow("out", **STORED)),
    ("a chunk's next use after its copy", *slow("in", **STORED)),
    ("memory of a checkpoint that failed after its copy", "lives.fails", {"where": "a checkpoint", **DROPPED}),
    (
        "a sum after its parts of other streams",
        "lives.accumulated",
        {"gradients": "fused", "kind": "aside", "delays": {"side": SLOW_US}, "batches": [None, None, 1]},
    ),
]
IN_SHORT = 2
TRIES = 3
CASES = [
    pytest.param(*case, marks=[] if at < IN_SHORT else LONG, id=f"{at}-{case[0]}") for at, case in enumerate(MISSED)
]
LONG_CASES = [pytest.param(*case, marks=LONG, id=f"{at}-{case[0]}") for at, case in enumerate(MISSED)]

# Calls that wait for a copy or for a stream, or make what can be waited for.
WAITING = {"done", "keep_for", "mark", "order", "wait", "wait_for", "_copied", "_mark"}
# What is not taken away: where it stands, and why its lack would not show.
NOT_TAKEN = {
    "transfer:Staging.waited": "the thread's, by a lock",
    "transfer:Staging.dropped": "the thread's, by a lock",
    "transfer:Staging._work": "the thread's, by a lock",
    "transfer:Staging._copy_one": "storage's",
    "transfer:_Window.fill": "holds memory that is read while it is copied, to where nobody looks",
    "chunks:ActivationChunk.idle": "prefers what need not be waited for",
    "chunks:Chunks.write_ahead": "prefers what need not be waited for",
    "chunks:Chunks.wait_for": "bounds the memory of what is on its way",
    "activations:Activations._save": "bounds the memory of what is on its way",
    "chunks:Chunks._transferred": "storage's",
}


@pytest.mark.parametrize(("wait", "life", "options"), CASES)
def test_each_wait_is_needed(simulated, wait, life, options):
    # What the CPU sees of damaged weights is said on the way. On a busy machine what is slow may come in time.
    tries = (simulated(life, without=wait, **options) for _ in range(TRIES))
    assert any(found["wrong"] or found["faults"] for found in tries)


@pytest.mark.parametrize(("wait", "life", "options"), LONG_CASES)
def test_with_the_wait_all_is_well(simulated, wait, life, options):  # noqa: ARG001 - its name
    fine(simulated(life, **options), 2)


def waiting():
    """The functions of the device room that wait, as `file:Class.function`."""
    root = Path(memascend.__file__).parent
    found = {}
    for path in (*root.glob("device/*.py"), *root.glob("activations/*.py")):
        for outer in ast.parse(path.read_text()).body:
            for function in outer.body if isinstance(outer, ast.ClassDef) else ():
                calls = {
                    node.func.attr
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                }
                if calls & WAITING:
                    found[f"{path.stem}:{outer.name}.{function.name}"] = calls & WAITING
    return found


def test_every_wait_has_a_test(simulated):
    waits = simulated("mutations.names")
    assert set(waits) == {wait for wait, *_ in MISSED}
    taken = {function for functions in waits.values() for function in functions}
    there = set(waiting())
    assert there - taken == set(NOT_TAKEN) - taken, "a wait that is new here needs a mutation in mutations.py"
    assert taken | set(NOT_TAKEN) <= there
