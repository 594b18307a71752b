"""Tests updates that the next step writes (deferred), and updates that begin before step() knows the norm (early).

A run with deferred updates must have the same bits as a run with gradients="ram", which defers no update. A run with
early updates must have the same bits as a run with gradients="ssd", which has no early updates. step() keeps early
updates, or discards them.
"""

from __future__ import annotations

import logging
import os
import signal
from itertools import cycle

import pytest
import torch
from parity.zoo_loops import other
from support.bits import files, same_bits, same_states
from support.chains import chain, everything, loss_of
from support.lives import forked_life
from support.stores import damage
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.cli import main
from memascend.engine import Store
from memascend.errors import CorruptionError, UsageError
from memascend.params.settling import Settling

WIDTH, STEPS = 24, 6
LIMIT = 1e-3  # far below the norm of every step
ADAM = other(torch.optim.Adam, lr=1e-2, weight_decay=0.1)
MOMENTUM = other(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)


def stack(dtype=torch.bfloat16, layers=4):
    return chain(layers, True, width=WIDTH, dtype=dtype)


def adamw(model):
    groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def offloaded(folder, gradients="ssd", make=stack, optimizer=adamw, **options):
    model = make()
    options = {"max_grad_norm": LIMIT, "existing": "resume", **options}
    return memascend.offload(model, optimizer(model), storage=folder, gradients=gradients, **options)


def nothing(*_):
    """Does nothing. This is the default of `before` and `between` of `run`."""


def walk(model, optimizer, index, scale=1.0):
    optimizer.backward(loss_of(model, index) * scale)


def run(folder, gradients="ssd", *, steps=STEPS, loop=walk, before=nothing, between=nothing, **options):
    """Trains up to step `steps`; returns the final state, the norm and overflow of each step, and the report."""
    model, optimizer = offloaded(folder, gradients, **options)
    norms = []
    with optimizer:
        for index in range(optimizer.steps, steps):
            before(model, optimizer, index)
            loop(model, optimizer, index)
            between(model, optimizer, index)
            optimizer.step()
            norms.append((optimizer.grad_norm, optimizer.overflowed))
            optimizer.zero_grad()
        return everything(model, optimizer), norms, optimizer.report()


def require_same(one, other):
    assert repr(one[1]) == repr(other[1]), "the norms differ"
    assert same_states(one[0], other[0])


def sibling_code(model):
    return [torch.optim.AdamW(model[:2].parameters(), lr=1e-2), torch.optim.RMSprop(model[2:].parameters(), lr=1e-3)]


@pytest.fixture(params=["forward", "backward"])
def way(request, monkeypatch):
    """Selects whether the first fetch of a unit after a step writes the unit's deferred updates.

    "forward": the first fetch writes them. "backward": it does not.
    """
    monkeypatch.setattr(Settling, "_choose", lambda self: setattr(self, "way", request.param))
    monkeypatch.setattr(Settling, "settles", lambda _, fetched: fetched >= (request.param == "backward"))
    return request.param


def both(tmp_path, **options):
    """Requires that a run with deferred updates has the same bits as a run without deferred updates.

    Returns the report of the run with deferred updates.
    """
    at_once = run(tmp_path / "ram", "ram", **options)
    left = run(tmp_path / "ssd", "ssd", **options)
    assert at_once[2].deferred == 0
    require_same(at_once, left)
    return left[2]


KINDS = {
    "compact": {},
    "fp32": {"make": lambda: stack(torch.float32)},
    "fp16": {"make": lambda: stack(torch.float16), "loss_scale": "dynamic"},
    "Adam": {"optimizer": ADAM},
    "momentum": {"optimizer": MOMENTUM, "make": lambda: stack(torch.float32)},
    "plain SGD": {"optimizer": other(torch.optim.SGD, lr=1e-2), "make": lambda: stack(torch.float32)},
    "8 bits": {"state": "8bit"},
    "bf16 moments": {"state": "bf16"},
    "by chance": {"state": "bf16", "master_dtype": None, "rounding": "stochastic", "seed": 3},
    "beside own code": {"optimizer": sibling_code},
    "not durable": {"durability": "none"},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.usefixtures("way")
def test_deferred_updates_have_same_bits_as_immediate_updates(tmp_path, options):
    report = both(tmp_path, **options)
    assert report.deferred == STEPS
    assert report.to_dict()["deferred"]["steps"] == STEPS
    assert f"{STEPS} steps deferred updates" in str(report)


class Blocks(nn.Module):
    """A model with tied weights, checkpoints, a block that is called twice, and a block that is seldom used."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        state = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            state = checkpoint(lambda value, block=block: torch.tanh(block(value)), state, use_reentrant=self.reentrant)
        if index % 3 == 2:
            state = self.seldom(state)
        return nn.functional.cross_entropy(self.head(state), tokens.roll(1))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("way")
def test_deferred_updates_of_tied_checkpointed_and_frozen_blocks_are_exact(tmp_path, reentrant):
    def thaws(model, _, index):
        model.blocks[1].requires_grad_(index < 2 or index > 3)

    def loop(model, optimizer, index):
        optimizer.backward(model(index))

    options = {"optimizer": ADAM, "loop": loop, "before": thaws, "steps": 8}
    both(tmp_path, make=lambda: Blocks(reentrant), **options)


def habits(model, optimizer, index):
    """Sets the learning rate. From the second step on, also reads or changes state whose update is deferred.

    The way in which `habits` reads or changes state is different before each step.
    """
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index)
    if index == 1:
        with torch.no_grad():
            loss_of(model, 7)
    elif index == 2:
        with optimizer.edit(model[1].weight) as values:
            values[:, 0] += 1
    elif index == 3:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    elif index == 4:
        walk(model, optimizer, 50)
        optimizer.zero_grad()
    elif index == 5:
        assert everything(model, optimizer)


def gathered(model, optimizer, index):
    """Computes gradients by one backward, by micro-batches by layer, or by two backwards, depending on `index`."""
    if index % 3 == 1:
        optimizer.accumulate(lambda seed: loss_of(model, seed), (index, index + 100), by_layer=True)
    else:
        walk(model, optimizer, index)
    if index % 3 == 2:
        walk(model, optimizer, index + 100)


def divides(model, optimizer, index):
    """Divides a gradient by 3, which the engine's kernels cannot do.

    The third step first fails, and is then repeated.
    """
    model[0].weight.grad.div_(3)
    if index == 2:
        right, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], float("nan")
        with pytest.raises(memascend.errors.MemascendError):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = right


def fuses(_, optimizer, index):
    """Gives the fourth step options that the engine does not support.

    So torch's code makes the update of the fourth step, and this update cannot be deferred.
    """
    optimizer.param_groups[0]["nesterov"] = index == 3
    optimizer.param_groups[0]["momentum"] = 0.0 if index == 3 else 0.9


HABITS = {
    "reads and changes": {"loop": gathered, "before": habits},
    "arithmetic on gradients": {"between": divides},
    "an update that cannot be left": {"optimizer": MOMENTUM, "make": lambda: stack(torch.float32), "before": fuses},
}


@pytest.mark.parametrize("options", HABITS.values(), ids=HABITS)
@pytest.mark.usefixtures("way")
def test_deferred_updates_are_exact_with_reads_and_changes_between_steps(tmp_path, options):
    both(tmp_path, **options)


@pytest.mark.usefixtures("way")
def test_checkpoint_contains_deferred_updates(tmp_path):
    def saves(_, optimizer, index):
        if index == 3:
            optimizer.save(tmp_path / f"saved-{len(list(tmp_path.glob('saved-*')))}")

    both(tmp_path, before=saves)
    assert files(tmp_path / "saved-0") == files(tmp_path / "saved-1")


@pytest.mark.usefixtures("way")
def test_deferred_updates_are_exact_with_torch_clip_grad_norm(tmp_path):
    options = {"between": lambda model, *_: clip_grad_norm_(model.parameters(), LIMIT), "max_grad_norm": None}
    at_once, left = run(tmp_path / "ram", "ram", **options), run(tmp_path / "ssd", **options)
    assert left[2].deferred == STEPS
    # The norms are not compared. step() computes the norms from the clipped gradients, and only one of the two runs has
    # rounded these gradients.
    assert same_states(at_once[0], left[0])


# --- runs that are killed or closed ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.usefixtures("one_thread")
def test_resume_names_a_damaged_deferred_gradient_and_previous_opens(tmp_path):
    def killed(begun):
        model, optimizer = offloaded(tmp_path / "s")
        begun()
        for index in range(3):
            walk(model, optimizer, index)
            torch.save(model[0].weight.grad.clone(), tmp_path / "gradient")
            optimizer.step()
            optimizer.zero_grad()
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked_life(killed)
    damage(tmp_path / "s", torch.load(tmp_path / "gradient").view(torch.uint8).numpy().tobytes(), 5)
    with pytest.raises(CorruptionError, match=r'gradient of "0\.weight" in step 3'):
        offloaded(tmp_path / "s")
    # The commit before the damaged commit is intact.
    before = run(tmp_path / "s", steps=2, existing="previous")
    require_same((before[0], []), (run(tmp_path / "ram", "ram", steps=2)[0], []))


def test_closed_store_has_no_log_steps_and_verifies(tmp_path):
    for steps, durability in ((3, "step"), (4, "step"), (5, "none")):
        run(tmp_path / "s", steps=steps, durability=durability)
        assert main(["store", "verify", str(tmp_path / "s")]) == 0
        with Store.open(tmp_path / "s") as store:
            assert store.info()["log_steps"] == 0
    assert same_states(run(tmp_path / "s", steps=5)[0], run(tmp_path / "ram", "ram", steps=5)[0])


# --- the choice between forward and backward ---------------------------------------------------


class Clock:
    """Replaces the clock that `Settling` reads. The test sets the time `now`."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("memascend.params.settling.time.perf_counter", lambda: self.now)


def test_settling_keeps_the_faster_way_until_step_times_change(monkeypatch):
    clock, settling, ways = Clock(monkeypatch), Settling(), []

    def steps(count, **seconds):
        for _ in range(count):
            ways.append(settling.way)
            clock.now += seconds[settling.way]
            settling.step_ended(leaves=True)
        return settling.way

    assert steps(8, forward=2.0, backward=1.0) == "backward"
    assert {"forward", "backward"} == set(ways)
    assert steps(600, forward=2.0, backward=1.0) == "backward"
    assert steps(14, forward=0.1, backward=0.2) == "forward"
    # A single long step, such as a step with an evaluation, does not change the way.
    for seconds in [0.1, 5.0, 0.1] * 10:
        assert steps(1, forward=seconds, backward=seconds) == "forward"
    assert settling.settles(0)


def test_settling_stays_with_forward_when_backward_saves_little(monkeypatch):
    clock, settling = Clock(monkeypatch), Settling()
    for seconds in cycle([1.0, 0.99]):
        clock.now += seconds
        settling.step_ended(leaves=True)
        if clock.now > 20:
            break
    assert settling.way == "forward"


# --- updates that begin before step() knows the norm ----------------------------------------------

# Factors of the loss. With SMALL, the norm of the gradients is far below the limit 1.0 of `scaled`. With LARGE, the
# norm is far above this limit, or float16 overflows.
SMALL, LARGE = 1e-3, 1e3
NEVER, ALWAYS = [SMALL] * 6, [LARGE] * 6
MIXED = [SMALL, SMALL, LARGE, SMALL, SMALL, SMALL, LARGE, LARGE]


def scaled(folder, gradients, scales, between=nothing, **options):
    """Runs one step for each factor in `scales`, and multiplies the loss of the step by the factor."""

    def loop(model, optimizer, index):
        walk(model, optimizer, index, scales[index])

    options = {"max_grad_norm": 1.0, **options}
    return run(folder, gradients, steps=len(scales), loop=loop, between=between, **options)


def both_early(tmp_path, scales, between=nothing, **options):
    """Requires that gradients="auto" gives the same bits as gradients="ssd", which has no early updates.

    Returns the report of the run with gradients="auto".
    """
    waits = scaled(tmp_path / "ssd", "ssd", scales, between, **options)
    early = scaled(tmp_path / "auto", "auto", scales, between, **options)
    require_same(waits, early)
    assert waits[2].early == 0
    return early[2]


def test_a_step_that_clips_nothing_reads_no_gradient(tmp_path):
    report = both_early(tmp_path, NEVER)
    written = sum(p.numel() * 2 for p in stack().parameters())
    waited = scaled(tmp_path / "again", "ssd", NEVER)[2]
    # The store writes gradients in whole pages, so it may write more bytes than the gradients have.
    assert report.written["gradients"] == waited.written["gradients"] >= 6 * written
    assert report.read["gradients"] == report.written["gradients"] // 6, "only the first step reads its gradients"


def test_overflowed_step_keeps_its_gradients(tmp_path):
    model, optimizer = offloaded(tmp_path / "s", "auto", max_grad_norm=1.0, loss_scale=64.0)
    with optimizer:
        for index in range(3):
            optimizer.zero_grad()
            walk(model, optimizer, index, SMALL)
            if index < 2:
                optimizer.step()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        model[0].weight.grad.mul_(torch.inf)
        optimizer.step()
        assert optimizer.overflowed
        assert optimizer.steps == 2
        assert optimizer.report().anew == 1
        after = [parameter.grad.clone() for parameter in model.parameters()]
        assert all(map(same_bits, before[1:], after[1:]))


def hooks(model, optimizer, index):
    def doubles(*_):
        model[0].weight.grad.mul_(2)
        handle.remove()

    if index == 2:
        handle = optimizer.register_step_pre_hook(doubles)


def clips(limit):
    return lambda model, *_: clip_grad_norm_(model.parameters(), limit)


def more(model, optimizer, index):
    for micro in range(2):
        walk(model, optimizer, 100 * micro + index, SMALL)


OVERFLOWS = [SMALL, SMALL, 1e6, SMALL, SMALL, SMALL, LARGE, SMALL]
FALLS = [1.0, 1.0, 1e-3, 1.0, 1.0, 1.0]
# Each case has the factors of the loss, a function that is called between backward() and step(), options, the number of
# steps whose updates begin early, and how many of these steps discard early updates.
RUNS = {
    # The updates of the first step wait for the norm, because no earlier step shows whether the loop clips.
    "never": (NEVER, nothing, {}, 5, 0),
    "always": (ALWAYS, nothing, {}, 0, 0),
    # After the first step that discards its early updates, updates begin early again only once two steps in a row do
    # not clip.
    "alternating": ([SMALL, LARGE] * 3, nothing, {}, 1, 1),
    "mixed": (MIXED, nothing, {"optimizer": other(torch.optim.SGD, lr=1e-2, momentum=0.9)}, 4, 2),
    # Updates by torch's own code always wait for the norm.
    "own code": (NEVER, nothing, {"optimizer": other(torch.optim.RMSprop, lr=1e-3)}, 0, 0),
    "overflow": (OVERFLOWS, nothing, {"make": lambda: stack(torch.float16)}, 4, 2),
    "nan": ([SMALL, SMALL, float("nan")], nothing, {"nonfinite": "commit"}, 2, 1),
    "hook": (NEVER, hooks, {}, 3, 1),
    # Only the third step is not clipped. So the updates of the fourth step begin early, and step() discards and repeats
    # them.
    "clipped": (FALLS, clips(1e-3), {"max_grad_norm": None}, 1, 1),
    "hardly clipped": (FALLS, clips(1.0), {"max_grad_norm": None}, 5, 0),
    "not clipped": (FALLS, clips(1e3), {"max_grad_norm": None}, 5, 0),
    "several, declared": (NEVER, more, {"accumulation_steps": 3}, 5, 0),
    "several": (NEVER, more, {"accumulation_steps": 1}, 0, 0),
}


@pytest.mark.parametrize(("scales", "between", "options", "early", "anew"), RUNS.values(), ids=RUNS)
def test_early_updates_have_same_bits_as_updates_after_the_norm(tmp_path, scales, between, options, early, anew):
    report = both_early(tmp_path, scales, between, **options)
    assert (report.early, report.anew) == (early, anew)
    assert report.to_dict().get("early") == ({"steps": early, "anew": anew} if early else None)


def test_step_rejects_unsupported_options_after_early_updates(tmp_path):
    """step() rejects an option that no update supports, even if updates have begun early.

    If the caller corrects an option before step(), step() accepts it.
    """
    model, optimizer = offloaded(tmp_path / "s", "auto", max_grad_norm=1.0)
    with optimizer:
        for index in range(3):
            optimizer.zero_grad()
            right, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], -1.0
            walk(model, optimizer, index, SMALL)
            optimizer.param_groups[0]["lr"] = right
            optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = True
        walk(model, optimizer, 3, SMALL)
        with pytest.raises(UsageError, match="amsgrad"):
            optimizer.step()


def test_log_and_report_count_discarded_early_updates(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "memascend"):
        report = scaled(tmp_path / "s", "auto", MIXED)[2]
    output = [record.getMessage() for record in caplog.records if "discarded" in record.getMessage()]
    assert len(output) == report.anew == 2
    assert "(in 2 of the 4 steps with such updates so far)" in output[1]
    assert "Updates of 4 steps began before step(); 2 of them were made anew." in str(report)
