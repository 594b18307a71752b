"""Runs one training case in RAM and offloaded in every way; compares bits."""

from __future__ import annotations

import contextlib
import itertools
import sys
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from parity.reference import Reference, threads_of_torch
from support.bits import same_bits
from support.chains import smallest

import memascend
from memascend.plan.options import Options
from memascend.session.decide import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

GRADIENTS = ("fused", "ssd", "ram", "auto")
KEPT = ("ssd", "ram")
# What "large" means: every model here fits many times, so that all of its state is in RAM.
LARGE = "1GiB"
# Times that a run may find out in its first step that it needs more: segments, then views.
BUDGETS_MAX = 4


@dataclass(frozen=True)
class Mode:
    """A combination in which a case is run."""

    gradients: str
    budget: str  # "smallest", "large", or "some": of the state is in RAM
    threads: int
    durability: str = "step"

    def __str__(self):
        return "-".join(str(part) for part in (self.gradients, self.budget, self.threads, self.durability))


@dataclass
class Run:
    """What a loop is given; it trains, and records what must be the same."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    original: torch.optim.Optimizer
    batches: list
    loss_of: Callable
    records: list = field(default_factory=list)

    def loss(self, index):
        """The loss of a batch, recorded."""
        loss = self.loss_of(self.model, self.batches[index % len(self.batches)])
        self.record(loss)
        return loss

    def record(self, *values):
        for value in values:
            self.records.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)


def usual_loop(run, steps=4):
    for index in range(steps):
        run.loss(index).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def adamw(model, **options):
    """Rates that move a small model visibly, so that a lost update shows."""
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], **{"lr": 1e-2, "weight_decay": 0.1, **options}
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data and a loop."""

    name: str
    model: Callable[[], torch.nn.Module]
    batches: Callable[[torch.Generator], list]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    loop: Callable[[Run], None] = usual_loop
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = adamw
    options: Mapping[str, Any] = field(default_factory=dict)  # of offload() and of the reference
    gradients: tuple[str, ...] = GRADIENTS
    everywhere: bool = False  # each way of gradients runs in `make test`, with budgets and threads by turns
    learns_budget: bool = False  # the first step may show that more memory is needed, as no plan could know
    marks: tuple = ()

    def modes(self):
        """Threads and durability go round over them, from where the case's name says."""
        turn = zlib.crc32(self.name.encode())
        for index, parts in enumerate(itertools.product(self.gradients, ("smallest", "some", "large"))):
            yield Mode(*parts, 1 + (turn + index) % 2, ("step", "none")[(turn + index) // 2 % 2])


def combined(cases: Iterable[Case]):
    """Each case in every combination; all but one or a few of them slow, spread evenly."""
    params = []
    for case in cases:
        modes = list(case.modes())
        chosen = [modes[zlib.crc32(case.name.encode()) % len(modes)]]
        if case.everywhere:
            # Of three budgets that each way has, another one for each.
            chosen = [modes[3 * index + index % 3] for index in range(len(case.gradients))]
        for mode in modes:
            marks = [*case.marks, *([] if mode in chosen else [pytest.mark.slow])]
            params.append(pytest.param(case, mode, id=f"{case.name}-{mode}", marks=marks))
    return pytest.mark.parametrize(("case", "mode"), params)


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    records: list
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    random: torch.Tensor
    start: dict[str, torch.Tensor]


def copies(named):
    return {name: tensor.detach().clone() for name, tensor in named}


def play(case, threads, take, *, read):
    """Runs the case with the optimizer that `take` makes of its own, and reads what is left within `read`."""
    with threads_of_torch(threads):
        if "torch._dynamo" in sys.modules:  # what one run compiled must not serve the next
            torch._dynamo.reset()
        torch.manual_seed(1)
        model = case.model().to(case.dtype)
        start = copies(model.named_parameters())
        batches = case.batches(torch.Generator().manual_seed(2))
        original = case.optimizer(model)
        model, optimizer = take(model, original)
        torch.manual_seed(3)
        run = Run(model, optimizer, original, batches, case.loss)
        case.loop(run)
        random = torch.get_rng_state()
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        state = {name: optimizer.state_of(p) for name, p in model.named_parameters() if p in owned}
        with read(model, optimizer):
            weights, buffers = copies(model.named_parameters()), copies(model.named_buffers())
        return Outcome(run.records, weights, buffers, state, random, start)


def nothing(*_):
    """Reads a model in memory."""
    return contextlib.nullcontext()


_references: dict[tuple[str, int], Outcome] = {}


def reference(case, threads):
    def take(model, original):
        return model, Reference(original, model=model, **case.options)

    key = case.name, threads
    if key not in _references:
        outcome = _references[key] = play(case, threads, take, read=nothing)
        assert not all(torch.equal(outcome.start[name], outcome.weights[name]) for name in outcome.weights), (
            "nothing was trained: this case could not fail"
        )
    return _references[key]


@contextlib.contextmanager
def committed(model, optimizer):
    """The committed weights, for as long as they are read; the budget was kept; then the store is closed."""
    host = optimizer.report().to_dict()["host"]
    assert host["peak"] <= host["budget"], host
    with memascend.materialized(model):
        yield
    optimizer.close()


def budget_of(case, mode, options):
    """As `offload` names it for this case, or plans it."""
    if mode.budget == "large":
        return LARGE
    with torch.random.fork_rng():
        model = case.model().to(case.dtype)
        optimizer = case.optimizer(model)
        if mode.budget == "smallest":
            return smallest(memascend.offload, model, optimizer, **case.options, **options)
        plan = planned(model, optimizer, Options(host_memory=LARGE, **options, **case.options)).plan
    return (plan.comfortable + plan.all_in_ram) // 2


def offloaded(case, mode, folder):
    options = {"storage": folder / "run.store", "gradients": mode.gradients, "durability": mode.durability}
    with threads_of_torch(mode.threads):
        budget = budget_of(case, mode, options)
    taken = []

    def take(model, original):
        made = memascend.offload(
            model, original, **options, host_memory=budget, existing="replace" if taken else "refuse", **case.options
        )
        taken.append(made[1])
        return made

    for _ in range(BUDGETS_MAX):
        try:
            return play(case, mode.threads, take, read=committed)
        except memascend.BudgetError as error:
            if not case.learns_budget or not taken:
                raise
            assert taken[-1].steps == 0, "a budget was refused after a step was committed"
            budget = error.smallest
        finally:
            for optimizer in taken:
                optimizer.close()
    raise AssertionError(f"the budget was still too small after {BUDGETS_MAX} that were said to work")


def same(left, right):
    """The same bits, but for the payload of a NaN."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return bool(left == right)
    return same_bits(left, right, any_nan=True)


def _named(outcome):
    yield from ((f"record {index}", value) for index, value in enumerate(outcome.records))
    yield from ((f"parameter {name}", value) for name, value in outcome.weights.items())
    yield from ((f"buffer {name}", value) for name, value in outcome.buffers.items())
    for name, state in outcome.state.items():
        yield from ((f"state of {name}: {key}", torch.as_tensor(value)) for key, value in state.items())
    yield "random numbers drawn", outcome.random


def differences(expected, got):
    """What differs, one line each; the first record that differs comes first."""
    expected, got = dict(_named(expected)), dict(_named(got))
    # An optimizer may count steps as an integer, and may show a master where the parameter is one.
    for name in list(got):
        if name.endswith(": step"):
            got[name] = got[name].float()
            if name in expected:
                expected[name] = expected[name].float()
        if name.endswith(": master") and name not in expected:
            del got[name]
    lines = [f"missing: {name}" for name in expected.keys() - got.keys()]
    lines += [f"not in the reference: {name}" for name in got.keys() - expected.keys()]
    lines += [
        f"{name}: {describe(expected[name], got[name])}"
        for name in expected
        if name in got and not same(expected[name], got[name])
    ]
    return lines


def describe(expected, got):
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor) and expected.shape == got.shape:
        wrong = (expected != got).sum().item()
        distance = (expected.double() - got.double()).abs().max().item()
        return f"{wrong} of {expected.numel()} elements, by at most {distance:.3g}"
    return f"{expected!r} in RAM, {got!r}"


def check(case, mode, folder):
    lines = differences(reference(case, mode.threads), offloaded(case, mode, folder))
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:20])
