"""Tests that streams read weights, activations and gradients only after their arrival; counts the waits of a step."""

import pytest
from support.grids import covered

LONG = pytest.mark.slow
pytestmark = pytest.mark.simulated
MODES = ["fused", "ssd", "ram"]
KINDS = ["plain", "recomputed", "tied", "streams", "aside"]
# The cases of `test_each_stream_reads_tensors_only_after_their_arrival` that `make test` runs. In `make test`, other
# tests of this file train plain, recomputed and "aside" models.
SHORT = {("tied", "ram"), ("streams", "ssd")}
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
def test_each_stream_reads_tensors_only_after_their_arrival(simulated, kind, mode):
    fine(simulated("order.train", kind=kind, gradients=mode))


@pytest.mark.parametrize(("mode", "activations", "slow"), covered(MODES, ["host", "ssd"], ["in", "own", "out"]))
def test_reads_are_correct_on_new_streams_with_one_delayed_stream(simulated, mode, activations, slow):
    """Each step runs on a new stream, and one stream (`slow`) is delayed."""
    # An activation of this size has more pieces than there are chunks.
    larger = {"activation": 5 << 17} if activations == "ssd" else {}
    options = {"kind": "recomputed", "gradients": mode, "activations": activations, "side": True, **larger}
    fine(simulated("order.train", delays={slow: SLOW_US}, **options))


RECOMPUTED = {"gradients": "fused", "kind": "recomputed", "activations": "host"}


def late(what, microseconds=SLOW_US, **options):
    return "order.train", {"gradients": "fused", "delays": {what: microseconds}, **options}


SHORT_LATE = {"compute", "closed with gradients"}


# Each case fails if the library lacks a certain wait. device.toml and activations_waits.toml in tests/mutants/python
# have a mutant without this wait.
@pytest.mark.parametrize(
    ("life", "options"),
    [
        pytest.param(life, options, id=name, marks=[] if name in SHORT_LATE else LONG)
        for name, life, options in [
            ("weights of two streams", *late("in", kind="streams")),
            ("compute", *late("own", blocks=6)),
            ("what checkpoints save", *late("own", **RECOMPUTED)),
            ("copies of checkpoints", *late("out", **RECOMPUTED)),
            ("gradients of an optimizer that runs itself", *late("side", 30_000, kind="aside", optimizer="rmsprop")),
            ("memory", "order.train", {"gradients": "fused", "fresh": True}),
            ("memory of the arena", "order.close_with_pending_reads", {}),
            ("memory added by one stream", "order.added", {"by": "own"}),
            ("memory added by another stream", "order.added", {"by": "side"}),
            ("closed with weights", "lives.closed", {"gradients": "fused", "slow": "in"}),
            ("closed with gradients", "lives.closed", {"gradients": "fused", "slow": "out", "backward": True}),
            ("closed with checkpoints", "lives.closed", {**RECOMPUTED, "slow": "out"}),
            (
                "a checkpoint that fails",
                "lives.fails",
                {"where": "a checkpoint", **RECOMPUTED, "device_memory": "64MiB", "delays": {"in": 20_000}},
            ),
        ]
    ],
)
def test_each_late_copy_or_computation_is_awaited(simulated, life, options):
    fine(simulated(life, **options), 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["", " by Ctrl-C", " for lack of memory"])
@pytest.mark.parametrize("where", ["a forward", "a backward"])
@LONG
def test_step_is_repeated_correctly_after_a_failure(simulated, where, how, mode):
    fine(simulated("lives.fails", where=where + how, gradients=mode))


@pytest.mark.parametrize("life", ["several", "forked", "again"])
@LONG
def test_reads_are_correct_with_two_models_a_fork_or_two_backwards(simulated, life):
    fine(simulated(f"lives.{life}"))


@pytest.mark.parametrize(
    ("gradients", "options"),
    [
        ("fused", {"kind": "recomputed"}),
        *(
            pytest.param(mode, options, marks=LONG, id=f"{mode}-{options['kind']}-{next(iter(options['delays']))}")
            for mode in (*MODES, "auto")
            for options in (
                {"kind": "recomputed", "activations": "host", "delays": {"in": 1000}},
                {"kind": "streams", "delays": {"side": SLOW_US}},
                # One micro-batch skips a block. This changes the stream on which the block's gradients are complete.
                {"kind": "aside", "delays": {"side": SLOW_US}, "batches": [None, None, 1]},
                {"kind": "aside", "delays": {"own": SLOW_US}, "batches": [None, 2, None]},
                {"kind": "tied", "delays": {"out": SLOW_US}, "optimizer": "several"},
            )
        ),
    ],
)
def test_micro_batches_by_layer_read_only_arrived_tensors(simulated, gradients, options):
    found = simulated("lives.accumulated", gradients=gradients, **options)
    fine(found, 200)
    assert found["by_layer"] is True


@LONG
def test_micro_batches_by_layer_draw_the_random_numbers_of_a_loop(simulated):
    found = simulated("lives.random_numbers")
    fine(found)
    assert (found["by_layer"], found["same"]) == (True, True)


@pytest.mark.parametrize(
    ("gradients", "slow"),
    [("fused", "in"), *(pytest.param(mode, late, marks=LONG) for mode in (*MODES, "auto") for late in ("own", "out"))],
)
def test_muon_and_adamw_together_read_only_arrived_tensors(simulated, gradients, slow):
    """The engine's thread runs Muon's own code on whole matrices. The engine itself computes AdamW."""
    fine(
        simulated(
            "order.train", kind="aside", gradients=gradients, optimizer="several", steps=3, delays={slow: SLOW_US}
        )
    )


@pytest.mark.parametrize(
    ("optimizer", "slow"),
    [("sgd", "out"), *(pytest.param(of, late, marks=LONG) for of in ("sgd", "several") for late in ("own", "in"))],
)
def test_early_updates_are_kept_or_repeated_when_the_norm_is_known(simulated, optimizer, slow):
    """step() keeps the early updates of one step.

    In two other steps, step() discards the early updates, and repeats them from the written gradients.
    """
    found = simulated("lives.clipped", optimizer=optimizer, kind="aside", delays={slow: 1000})
    fine(found, 150)
    assert found["early"] == {"steps": 3, "anew": 2}


@pytest.mark.parametrize(
    ("mode", "kind"), [("ssd", "tied"), *(pytest.param(mode, "recomputed", marks=LONG) for mode in ("fused", "ram"))]
)
def test_state_in_ram_reaches_a_device_with_the_smallest_budget(simulated, mode, kind):
    found = simulated("lives.narrow", gradients=mode, kind=kind)
    fine(found)
    assert found["held"]


@pytest.mark.parametrize("mode", MODES)
@LONG
def test_reads_are_correct_on_a_device_other_than_the_current_device(simulated, mode):
    fine(simulated("order.train", kind="recomputed", gradients=mode, activations="host", device="cuda:1"))


@pytest.mark.parametrize("backward", [pytest.param(False, marks=LONG), True])
def test_interpreter_exits_without_close_while_copies_are_in_flight(simulated, backward):
    """The interpreter ends while copies are in flight."""
    assert simulated("lives.left", backward=backward, whole=True) == "fine"


@pytest.mark.parametrize("options", [{"slow": "in"}, {"slow": "out", "backward": True}])
@LONG
def test_dropping_a_model_frees_memory_only_after_its_copies(simulated, options):
    fine(simulated("lives.closed", dropped=True, gradients="fused", **options))


# --- numbers of waits; copies that run during computation -----------------------------------------

WORKERS = "memascend-"
WAITS = [
    pytest.param("fused", {}),
    pytest.param("ssd", {}, marks=LONG),
    pytest.param("ram", {}, marks=LONG),
    pytest.param("fused", {"device_memory": "64MiB"}, marks=LONG),
    pytest.param("fused", {"activations": "host"}),
]


def waits(counted):
    """Returns how often threads other than the library's workers waited for a device or stream, and for an event."""
    found = [(what, number) for thread, what, number in counted if not thread.startswith(WORKERS)]
    return (
        sum(number for what, number in found if what == "synchronisation"),
        sum(number for what, number in found if what == "wait for an event"),
    )


@pytest.mark.parametrize(("gradients", "options"), WAITS)
def test_passes_and_step_each_synchronise_at_most_once(simulated, gradients, options):
    """A checkpointed model's forward and backward synchronise at most once together, and `step()` at most once."""
    passes, step = simulated("order.counted", gradients=gradients, kind="recomputed", **options)
    synchronised, events = waits(passes)
    assert synchronised <= 1, passes
    # At most two checkpoints may have uncopied activations on the device. The third checkpoint waits for the copy of
    # the first checkpoint.
    assert events == 0 or "activations" in options, passes
    assert waits(step)[0] <= 1, step
    assert waits(step)[1] == 0, step
    for part in (passes, step):
        assert not [line for line in part if line[1] in ("registration", "free")], part
        assert not [line for line in part if line[1] == "wait that spins"], part
        assert not [line for line in part if line[0].startswith(WORKERS) and line[1] == "query in the global mode"]
        # No copy to the device reads pageable memory. Only results that `step()` reads are copied to pageable memory.
        assert not [line for line in part if line[1] == "copy host to device, pageable"], part


@pytest.mark.parametrize(
    ("gradients", "launches"), [("fused", (8, 0)), ("ram", (0, 1)), pytest.param("ssd", (0, 0), marks=LONG)]
)
def test_gradients_are_checked_by_few_launches(simulated, gradients, launches):
    """With "fused", each gradient has its own launch of the check. With "ram", one launch checks all gradients.

    With "ssd", the device checks no gradient.
    """
    found = simulated("order.counted", gradients=gradients, kind="plain")
    kernels = [{what: number for _, what, number in part if what.startswith("launch of ")} for part in found]
    assert tuple(part.pop("launch of check_kernel", 0) for part in kernels) == launches
    assert kernels == [{}, {}]


@pytest.mark.parametrize("way", ["uploads", "downloads"])
def test_copies_continue_during_computation(simulated, way):
    found = simulated(f"order.{way}_go_on")
    fine(found, 16)
    assert found["arrived"] >= found["needed"]
