"""Runs the state machine of training on a few fixed examples. Tests marked `slow` run hundreds of random examples.

Also kills training processes by SIGKILL: between two calls of the engine, or at any time, even while the engine's
thread writes.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from parity.harness import same
from parity.machine import Machine
from parity.machine_calls import FUSE
from parity.machine_twins import Plain, lives, opened, setups
from parity.reference import threads_of_torch
from support.lives import forked_life

pytestmark = [
    # offload() warns if the stored options replace options of the process, or if stochastic rounding has no effect on
    # some parameters.
    pytest.mark.filterwarnings("ignore:the stored options are used:UserWarning", "ignore:rounding:UserWarning"),
    pytest.mark.filterwarnings("ignore:close.. does not keep changes of the model's buffers:UserWarning"),
    # If an example fails, hypothesis needs a long time to find a smaller example that fails.
    pytest.mark.timeout(1800),
]
SETTINGS = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    "print_blob": True,
}


def run(waits, examples, *, derandomize):
    """Runs the state machine on `examples` examples.

    Returns `Machine.seen`, the number of times that each event happened.
    """
    machine = type("Training", (Machine,), {"waits": waits, "seen": Counter()})
    given = settings(max_examples=examples, stateful_step_count=15, derandomize=derandomize, **SETTINGS)
    with FUSE.installed(), threads_of_torch(1):
        run_state_machine_as_test(machine, settings=given)
    return machine.seen


WAITS = (None, "fused", "auto")
HAPPENS = {
    "in RAM True", "in RAM False", "killed before", "killed after", "killed between", "refused as unclosed",
    "ended by close", "ended by checkpoint", "a commit failed", "a view was kept", "a view was kept before an edit",
    "overflows", "steps ssd", "steps ram", "steps fused", "early", "anew", "deferred, None", "deferred, forward",
    "deferred, backward", "refused: accumulation_steps|already used", "refused: max_grad_norm", "refused: gradients=",
    "refused: was not committed",
}  # fmt: skip


@pytest.mark.parametrize("waits", WAITS)
def test_fixed_state_machine_examples_equal_torch_in_memory(waits):
    seen = run(waits, 15, derandomize=True)
    assert sum(count for what, count in seen.items() if what.startswith("steps")) > 10
    # With "auto", these few examples must defer updates. With None, they may defer no update on some computers.
    assert waits != "auto" or sum(count for what, count in seen.items() if what.startswith("deferred")) > 0


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_hundreds_of_random_runs_equal_torch_in_memory():
    seen = Counter()
    for waits in WAITS:
        seen += run(waits, 300, derandomize=False)
    # Checks the events of all modes of gradients together, because in a single mode some events are too rare.
    assert HAPPENS - seen.keys() == set()


# --- real kills -----------------------------------------------------------------------------

STEPS = 6


def train(setup, model, optimizer):
    """Trains the steps that are not committed yet, with two micro-batches each.

    The offloaded run computes every other step by layer.
    """
    for index in range((optimizer.user_state or {"next": 0})["next"], STEPS):
        seeds = (index, index + 1)
        if isinstance(optimizer, Plain):
            for seed in seeds:
                optimizer.backward(setup.loss(model, seed))
        else:
            optimizer.accumulate(lambda seed: setup.loss(model, seed), seeds, by_layer=index % 2 == 0)
        optimizer.user_state = {"next": index + 1}
        optimizer.step()
        optimizer.zero_grad()


def live(setup, life, file, when):
    """Trains in a forked process. Returns True if the process was killed.

    If `when` is an int, the process is killed at event number `when` of `FUSE`. If `when` is a float, the process is
    killed `when` seconds after training began.
    """

    def do(begun):
        model, optimizer = opened(setup, life, file, existing="resume")
        if isinstance(when, int):
            FUSE.left, FUSE.at_commits, FUSE.kill = when, False, lambda _: os.kill(os.getpid(), signal.SIGKILL)
        begun()
        train(setup, model, optimizer)

    return forked_life(do, when if isinstance(when, float) else None)


@st.composite
def killed_runs(draw):
    waits = draw(st.sampled_from((None, "fused")))
    durable = lives(waits, durabilities=("step",))
    # An int is a number of events of `FUSE`. A float is a number of seconds since training began.
    when = st.integers(1, 60) | st.floats(0, 0.05)
    deaths = draw(st.lists(st.tuples(durable, when), min_size=1, max_size=3))
    return draw(setups(waits)), deaths, draw(durable)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("examples", [5, pytest.param(150, marks=pytest.mark.slow)])
def test_a_killed_run_has_torchs_weights_state_and_statistics(examples):
    kills = 0

    @settings(max_examples=examples, derandomize=examples < 100, **SETTINGS)
    @given(killed_runs())
    def is_exact(drawn):
        nonlocal kills
        setup, deaths, last = drawn
        plain = Plain(setup)
        train(setup, plain.model, plain)
        with TemporaryDirectory(prefix="killed-") as folder:
            file = Path(folder, "run.store")
            kills += sum(live(setup, life, file, when) for life, when in deaths)
            model, optimizer = opened(setup, last, file, existing="resume")
            with optimizer:
                train(setup, model, optimizer)
                for (name, theirs), ours in zip(plain.model.named_parameters(), model.parameters(), strict=True):
                    assert same(theirs.detach(), ours.detach().clone()), name
                    Machine.require_state(name, optimizer.state_of(ours), plain.state_of(theirs))
                for (name, theirs), ours in zip(plain.model.named_buffers(), model.buffers(), strict=True):
                    assert same(theirs, ours), name

    # A forked process does not have the pool threads that torch started in the parent process, so it computes with one
    # thread.
    with FUSE.installed(), threads_of_torch(1):
        is_exact()
    assert kills >= examples // 2
