"""Runs the state machine of training on a few fixed examples, and with `slow` on hundreds of random ones.

Also runs training in processes that SIGKILL ends: between any two calls of the engine, or at any time, even while the
engine's thread writes.
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
    # A process may start with options that the stored ones replace, and with formats that some parameters do not take.
    pytest.mark.filterwarnings("ignore:the stored options stand:UserWarning", "ignore:rounding:UserWarning"),
    pytest.mark.filterwarnings("ignore:buffers of the model changed after the last step:UserWarning"),
    # Shrinking a failed example takes long.
    pytest.mark.timeout(1800),
]
SETTINGS = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    "print_blob": True,
}


def run(waits, examples, *, derandomize):
    """Runs the state machine; returns how often each event of `Machine.seen` happened in all examples."""
    machine = type("Training", (Machine,), {"waits": waits, "seen": Counter()})
    given = settings(max_examples=examples, stateful_step_count=15, derandomize=derandomize, **SETTINGS)
    with FUSE.installed(), threads_of_torch(1):
        run_state_machine_as_test(machine, settings=given)
    return machine.seen


WAITS = (None, "fused", "auto")
HAPPENS = {
    "in RAM True", "in RAM False", "killed before", "killed after", "killed between", "refused as unclosed",
    "ended by close", "ended by checkpoint", "a commit failed", "a view was kept", "a view was kept before a door",
    "overflows", "steps ssd", "steps ram", "steps fused", "early", "anew", "deferred, None", "deferred, forward",
    "deferred, backward", "refused: accumulation_steps|already used", "refused: max_grad_norm", "refused: gradients=",
    "refused: was not committed",
}  # fmt: skip


@pytest.mark.parametrize("waits", WAITS)
def test_a_run_is_the_one_in_memory(waits):
    seen = run(waits, 15, derandomize=True)
    assert sum(count for what, count in seen.items() if what.startswith("steps")) > 10
    # Only "auto" must defer updates in these few examples: with None, they defer none on some machines.
    assert waits != "auto" or sum(count for what, count in seen.items() if what.startswith("deferred")) > 0


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_hundreds_of_runs_are_those_in_memory():
    seen = Counter()
    for waits in WAITS:
        seen += run(waits, 300, derandomize=False)
    # In one mode of gradients alone, some of these events are too rare.
    assert HAPPENS - seen.keys() == set()


# --- real kills -----------------------------------------------------------------------------

STEPS = 6


def train(setup, model, optimizer):
    """Trains from the first uncommitted step on; each step has two micro-batches, in every other step by layer."""
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
    """Trains in a fork that is killed at call `when` of the engine (int) or after `when` seconds; True if killed."""

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
    # Calls of the engine, or seconds since training began.
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

    # A fork lacks the pool threads that torch started in its parent: compute with one thread.
    with FUSE.installed(), threads_of_torch(1):
        is_exact()
    assert kills >= examples // 2
