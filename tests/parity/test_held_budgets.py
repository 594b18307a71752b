"""Tests that bits do not depend on the budget: drawn at random, and another one after each of ten kills."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path

import pytest
import torch
from parity.harness import LARGE, Case, Read, differences, play, reference, require_reference
from parity.test_resume import in_one_go
from parity.unclosed import CASES, LIVES, live
from parity.zoo_formats import mixed
from parity.zoo_loops import BF16, stack
from parity.zoo_plain import Rooted, Stack, squares, vectors

import memascend
from memascend.engine import Store
from memascend.plan.options import Options
from memascend.session.decide import planned

TESTS = Path(__file__).resolve().parent.parent
SECONDS_MAX = 280


def range_of(case, **options):
    """The smallest budget, and the one that holds all."""
    with torch.random.fork_rng():
        model = case.model().to(case.dtype)
        plan = planned(model, case.optimizer(model), Options(host_memory=LARGE, **options, **case.options)).plan
    return plan.smallest, plan.all_held


DRAWN = [
    stack("drawn-bf16", in_one_go, model=lambda: Stack(tied=True), dtype=BF16),
    mixed("drawn-8bit", "8bit", in_one_go, dtype=BF16),
    stack("drawn-fp32", in_one_go),
    Case(name="drawn-rooted", model=Rooted, batches=vectors(), loss=squares, loop=in_one_go),
]


@pytest.mark.parametrize(
    ("case", "gradients", "count"),
    [
        pytest.param(DRAWN[0], "fused", 6, id="drawn-bf16-few"),
        *(
            pytest.param(case, gradients, 30, id=f"{case.name}-{gradients}", marks=pytest.mark.slow)
            for case, gradients in zip(DRAWN, ("ssd", "fused", "ram", "auto"), strict=True)
        ),
    ],
)
def test_budgets_drawn_at_random_have_the_same_bits(case, gradients, count, tmp_path):
    drawn, held = random.Random(count), set()
    for number in range(count):
        log_steps = drawn.choice((1, 2, 5, None))
        file = tmp_path / f"{number}.store"
        options = {"storage": file, "gradients": gradients, "log_steps": log_steps}
        options["durability"] = drawn.choice(("step", "step", "step", "none"))
        if options["durability"] == "none":
            del options["log_steps"]
        budget = drawn.randint(*range_of(case, **options))

        def take(model, original, budget=budget, options=options):
            made = memascend.offload(model, original, host_memory=budget, **options, **case.options)
            assert made[1].plan.host_peak <= budget
            held.add(len(made[1].plan.held))
            return made

        outcome = play(case, 1, take, read=lambda model, optimizer, file=file: Read(model, optimizer, file))
        assert differences(reference(case, 1), outcome) == [], (budget, options)
        file.unlink()
    assert len(held) > 2, "other budgets hold other parts"


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        ("unclosed-bf16", "fused"),
        ("unclosed-bf16", "ssd"),
        ("unclosed-fp32", "ram"),
        ("unclosed-sgd", "fused"),
        ("unclosed-8bit", "ssd"),
        ("unclosed-stochastic", "fused"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_runs_that_were_killed_are_resumed_with_ten_budgets(name, gradients, tmp_path, monkeypatch):
    case, file = CASES[name], tmp_path / "run.store"
    # As in the tests of kills at random moments.
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["parity.unclosed"])
    smallest, most = range_of(case, storage=file, gradients=gradients)
    parts = [part / (LIVES - 1) for part in range(LIVES)]
    random.Random(name).shuffle(parts)
    records, logs, held = [], 0, set()
    for number, part in enumerate(parts):
        options = {"storage": file, "gradients": gradients, "host_memory": int(smallest + part * (most - smallest))}
        options["log_steps"] = (None, 1, 3)[number % 3]
        child = server.Process(target=live, args=(name, options, tmp_path / "said"))
        child.start()
        child.join(SECONDS_MAX)
        assert child.exitcode == -signal.SIGKILL
        said = torch.load(tmp_path / "said")
        assert said["step"] == number
        records += said["records"]
        held.add(said["held"])
        with Store.open(file) as left:
            logs += bool(left.info()["log_steps"])
    assert logs >= LIVES // 2, "most of those that hold something leave a log"
    assert len(held) > 3, "other budgets hold other parts"
    require_reference(case, records, said["last"])
