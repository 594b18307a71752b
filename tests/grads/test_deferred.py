"""Tests updates that a step leaves to the next one: bits, reads, doors, kills and faults are those of updates at once.

With gradients="ram" every update is made in its step, so such a run is what all others are compared with.
"""

from __future__ import annotations

import os
import signal
from itertools import cycle

import pytest
import torch
from grads.clipped_runs import LIMIT, WIDTH, offloaded, require_same, run, stack, walk
from parity.zoo_loops import other
from support.bits import files, same_states
from support.chains import everything, loss_of
from support.lives import forked_life
from support.stores import damage
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.cli import main
from memascend.engine import Store
from memascend.errors import CorruptionError
from memascend.params.settling import Settling

STEPS = 6
ADAM = other(torch.optim.Adam, lr=1e-2, weight_decay=0.1)
MOMENTUM = other(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)


def own_code_beside(model):
    return [torch.optim.AdamW(model[:2].parameters(), lr=1e-2), torch.optim.RMSprop(model[2:].parameters(), lr=1e-3)]


@pytest.fixture(params=["forward", "backward"])
def way(request, monkeypatch):
    """Both ways in which the next step writes what was left."""
    monkeypatch.setattr(Settling, "_choose", lambda self: setattr(self, "way", request.param))
    monkeypatch.setattr(Settling, "settles", lambda _, fetched: fetched >= (request.param == "backward"))
    return request.param


def both(tmp_path, **options):
    """The report of a run that leaves updates, whose bits are those of one that does not."""
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
    "beside own code": {"optimizer": own_code_beside},
    "not durable": {"durability": "none"},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.usefixtures("way")
def test_bits_are_those_of_updates_at_once(tmp_path, options):
    report = both(tmp_path, **options)
    assert report.deferred == STEPS
    assert report.to_dict()["deferred"]["steps"] == STEPS
    assert f"{STEPS} steps deferred updates" in str(report)


class Blocks(nn.Module):
    """Tied weights, a block that is called twice, one that is seldom used, and checkpoints."""

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
def test_blocks_of_every_kind(tmp_path, reentrant):
    def thaws(model, _, index):
        model.blocks[1].requires_grad_(index < 2 or index > 3)

    def loop(model, optimizer, index):
        optimizer.backward(model(index))

    options = {"optimizer": ADAM, "loop": loop, "before": thaws, "steps": 8}
    both(tmp_path, make=lambda: Blocks(reentrant), **options)


def habits(model, optimizer, index):
    """Before each step another thing that reads or changes what the last one left."""
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
    """One backward, two, or micro-batches by layer."""
    if index % 3 == 1:
        optimizer.accumulate(lambda seed: loss_of(model, seed), (index, index + 100), by_layer=True)
    else:
        walk(model, optimizer, index)
    if index % 3 == 2:
        walk(model, optimizer, index + 100)


# More of what a loop may do, and in other orders: the state machine of training.
@pytest.mark.usefixtures("way")
def test_what_a_loop_does_between_steps(tmp_path):
    both(tmp_path, loop=gathered, before=habits)


@pytest.mark.usefixtures("way")
def test_a_checkpoint_has_what_was_left(tmp_path):
    def saves(_, optimizer, index):
        if index == 3:
            optimizer.save(tmp_path / f"saved-{len(list(tmp_path.glob('saved-*')))}")

    both(tmp_path, before=saves)
    assert files(tmp_path / "saved-0") == files(tmp_path / "saved-1")


@pytest.mark.usefixtures("way")
def test_torchs_own_clipping(tmp_path):
    options = {"between": lambda model, *_: clip_grad_norm_(model.parameters(), LIMIT), "max_grad_norm": None}
    at_once, left = run(tmp_path / "ram", "ram", **options), run(tmp_path / "ssd", **options)
    assert left[2].deferred == STEPS
    # What step() says of the norm is of clipped gradients, rounded or not.
    assert same_states(at_once[0], left[0])


# --- ends -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.usefixtures("one_thread")
def test_a_flipped_bit_of_a_gradient_is_named(tmp_path):
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
    # The commit before is whole.
    before = run(tmp_path / "s", steps=2, existing="previous")
    require_same((before[0], []), (run(tmp_path / "ram", "ram", steps=2)[0], []))


def test_a_store_that_was_closed_has_no_log(tmp_path):
    for steps, durability in ((3, "step"), (4, "step"), (5, "none")):
        run(tmp_path / "s", steps=steps, durability=durability)
        assert main(["store", "verify", str(tmp_path / "s")]) == 0
        with Store.open(tmp_path / "s") as store:
            assert store.info()["log_steps"] == 0
    assert same_states(run(tmp_path / "s", steps=5)[0], run(tmp_path / "ram", "ram", steps=5)[0])


def divides(model, optimizer, index):
    """Arithmetic that the engine's kernels do not have, and a step that has to be made again."""
    model[0].weight.grad.div_(3)
    if index == 2:
        right, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], float("nan")
        with pytest.raises(memascend.errors.MemascendError):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = right


@pytest.mark.usefixtures("way")
def test_arithmetic_on_gradients_is_done_once(tmp_path):
    both(tmp_path, between=divides)


def test_an_update_that_cannot_be_left_comes_after_that_which_was(tmp_path):
    """Options that the engine's arithmetic does not have, for a step: torch's own code runs then, at once."""

    def fuses(_, optimizer, index):
        optimizer.param_groups[0]["nesterov"] = index == 3
        optimizer.param_groups[0]["momentum"] = 0.0 if index == 3 else 0.9

    both(tmp_path, optimizer=MOMENTUM, make=lambda: stack(torch.float32), before=fuses)


# --- where it is written -----------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("memascend.params.settling.time.perf_counter", lambda: self.now)


def test_the_faster_way_stays_until_steps_change(monkeypatch):
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
    # One that takes long, as for an evaluation, changes nothing.
    for seconds in [0.1, 5.0, 0.1] * 10:
        assert steps(1, forward=seconds, backward=seconds) == "forward"
    assert settling.settles(0)


def test_what_saves_little_does_not_read_more(monkeypatch):
    clock, settling = Clock(monkeypatch), Settling()
    for seconds in cycle([1.0, 0.99]):
        clock.now += seconds
        settling.step_ended(leaves=True)
        if clock.now > 20:
            break
    assert settling.way == "forward"
