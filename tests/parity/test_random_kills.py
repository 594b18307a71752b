"""Tests random runs of a convolutional net that are killed by -9 and go on: weights, state and statistics are torch's.

A child kills itself at a chosen point of a step, and another one goes on with another budget and durability. One step
is skipped, whose forward changes the statistics all the same; where the loop goes on in its data is what it committed.
"""

from __future__ import annotations

import os
import random
import signal
import traceback

import pytest
import torch
from torch import nn

import memascend

STEPS = 9
BUDGETS = (None, "2MiB", "4MiB", "64MiB")
POINTS = ("committed", "computed", "walked", "skipped")


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.sub_(torch.sign(torch.lerp(p.grad, state["exp_avg"], first)), alpha=group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - second)


class Choices:
    """What one seed chooses."""

    def __init__(self, seed):
        chosen = random.Random(seed)
        self.seed = seed
        self.width = chosen.choice((4, 8, 12))
        self.depth = chosen.choice((1, 2, 3))
        self.budgets = chosen.sample(BUDGETS, 2)
        self.skipped = chosen.randrange(1, STEPS - 1)
        self.killed = chosen.randrange(1, STEPS - 1)
        self.point = chosen.choice(POINTS)
        self.last = chosen.choice(("step", "none"))
        self.gradients = [chosen.choice(("auto", "auto", "fused", "ssd")) for _ in range(2)]
        self.momentum = chosen.choice((0.1, 0.1, None))

    def model(self):
        """The same values each time."""
        torch.manual_seed(self.seed)
        layers, channels = [], 3
        for _ in range(self.depth):
            block = nn.Sequential(
                nn.Conv2d(channels, self.width, 3, padding=1, bias=False),
                nn.BatchNorm2d(self.width, momentum=self.momentum),
                nn.ReLU(),
            )
            layers, channels = [*layers, block], self.width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))

    def loss(self, model, index):
        """Of one batch."""
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        images = torch.randn(4, 3, 8, 8, generator=generator)
        return nn.functional.cross_entropy(model(images), torch.randint(5, (4,), generator=generator))


def train(choices, model, optimizer, first, losses, reached):
    """From a batch on to the last; `reached` hears of each point of each step."""
    for index in range(first, STEPS):
        if hasattr(optimizer, "user_state"):
            optimizer.user_state = {"next": index + 1}
        loss = choices.loss(model, index)
        losses[index] = loss.item()
        reached(index, "computed")
        loss.backward()
        reached(index, "walked")
        if index != choices.skipped:
            optimizer.step()
        optimizer.zero_grad()
        reached(index, "skipped" if index == choices.skipped else "committed")


def plain(choices):
    """The same in memory, without a kill."""
    model, losses = choices.model(), {}
    optimizer = Lion(model.parameters())
    train(choices, model, optimizer, 0, losses, lambda *_: None)
    return {**model.state_dict(), **states(model, lambda p: optimizer.state[p])}, losses


def states(model, state_of):
    return {f"{name}.exp_avg": state_of(p)["exp_avg"] for name, p in model.named_parameters()}


def life(choices, folder, number):
    """One process of the run: the first kills itself where it was chosen, the second writes what it has at the end."""
    model, losses = choices.model(), {}
    model, optimizer = memascend.offload(
        model,
        Lion(model.parameters()),
        storage=folder / "store",
        existing="resume",
        host_memory=choices.budgets[number],
        durability="step" if number == 0 else choices.last,
        gradients=choices.gradients[number],
        device="cpu",
    )

    def reached(index, point):
        if number == 0 and index >= choices.killed and point == choices.point:
            torch.save(losses, folder / "0.pt")
            os.kill(os.getpid(), signal.SIGKILL)

    first = (optimizer.user_state or {"next": 0})["next"]
    train(choices, model, optimizer, first, losses, reached)
    found = {name: values.clone() for name, values in model.state_dict().items()}
    found.update(states(model, optimizer.state_of))
    optimizer.close()
    torch.save((found, losses), folder / "1.pt")


def live(choices, folder, number):
    """A life in a process of its own; how it ended."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            life(choices, folder, number)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def require_equal(seed, folder):
    choices = Choices(seed)
    (expected, losses), (again, _) = plain(choices), plain(choices)
    for name, values in expected.items():
        assert torch.equal(values, again[name]), f"torch itself gives two values of {name}"
    if choices.point == "skipped":
        choices.killed = choices.skipped
    elif choices.killed == choices.skipped and choices.point == "committed":
        choices.killed += 1
    assert live(choices, folder, 0) == -signal.SIGKILL, f"seed {seed}"
    assert live(choices, folder, 1) == 0, f"seed {seed}"
    before = torch.load(folder / "0.pt")
    found, after = torch.load(folder / "1.pt")
    assert {**before, **after} == losses, f"seed {seed}"
    for name, values in expected.items():
        assert torch.equal(values, found[name]), f"seed {seed}: {name} is another, {vars(choices)}"


@pytest.fixture
def one_thread():
    """A fork has one thread, whatever pool of them its parent has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    "seeds",
    [range(3), pytest.param(range(3, 150), marks=[pytest.mark.slow, pytest.mark.timeout(1500)])],
    ids=["some", "many"],
)
def test_a_killed_run_has_torchs_weights_state_and_statistics(tmp_path, seeds):
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        require_equal(seed, folder)
