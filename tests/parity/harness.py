"""Runs a training case in RAM and offloaded, in many combinations of options, and compares the bits of the results."""

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
# The host memory of the budget "large". For every model of these tests, this memory is enough to keep the whole state
# in RAM.
LARGE = "1GiB"
# The largest number of budgets that a case may try. The plan cannot predict the memory for segments of a checkpoint or
# for views. If the first step needs more memory for them, it raises a BudgetError that names a larger budget.
BUDGETS_MAX = 4


@dataclass(frozen=True)
class Mode:
    """A combination of options with which a case runs."""

    gradients: str
    budget: str  # "smallest", "large" (all state in RAM) or "some" (part of the state in RAM)
    threads: int
    durability: str = "step"

    def __str__(self):
        return "-".join(str(part) for part in (self.gradients, self.budget, self.threads, self.durability))


@dataclass
class Run:
    """The model, optimizer and batches of a loop, and the values that the loop records for the comparison."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    original: torch.optim.Optimizer
    batches: list
    loss_of: Callable
    records: list = field(default_factory=list)

    def loss(self, index):
        """Computes, records and returns the loss of a batch."""
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
    """Returns AdamW with a learning rate so large that each update visibly changes the weights of a small model."""
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], **{"lr": 1e-2, "weight_decay": 0.1, **options}
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data, loss, loop, optimizer and options."""

    name: str
    model: Callable[[], torch.nn.Module]
    batches: Callable[[torch.Generator], list]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    loop: Callable[[Run], None] = usual_loop
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = adamw
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of offload() and of `Reference`
    gradients: tuple[str, ...] = GRADIENTS
    everywhere: bool = False  # `make test` runs the case in every mode of gradients, not only in one
    learns_budget: bool = False  # the first step may need more memory than the plan predicts
    marks: tuple = ()

    def modes(self):
        """Yields a mode for each combination of gradients and budget.

        The number of threads changes at each mode, and the durability changes at every second mode. A hash of `name`
        selects the threads and the durability of the first mode.
        """
        turn = zlib.crc32(self.name.encode())
        for index, parts in enumerate(itertools.product(self.gradients, ("smallest", "some", "large"))):
            yield Mode(*parts, 1 + (turn + index) % 2, ("step", "none")[(turn + index) // 2 % 2])


def combined(cases: Iterable[Case]):
    """Parametrizes a test by all modes of all cases.

    Most modes are marked slow: `make test` runs few modes of a case.
    """
    params = []
    for case in cases:
        modes = list(case.modes())
        chosen = [modes[zlib.crc32(case.name.encode()) % len(modes)]]
        if case.everywhere:
            # `modes` has three budgets for each mode of gradients. Chooses the first budget for the first mode of
            # gradients, the second budget for the second mode, and so on.
            chosen = [modes[3 * index + index % 3] for index in range(len(case.gradients))]
        for mode in modes:
            marks = [*case.marks, *([] if mode in chosen else [pytest.mark.slow])]
            params.append(pytest.param(case, mode, id=f"{case.name}-{mode}", marks=marks))
    return pytest.mark.parametrize(("case", "mode"), params)


@dataclass(frozen=True)
class Outcome:
    """The records, final values, optimizer state and random state of a run, and the weights before the run."""

    records: list
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    random: torch.Tensor
    start: dict[str, torch.Tensor]


def copies(named):
    return {name: tensor.detach().clone() for name, tensor in named}


def play(case, threads, take, *, read):
    """Runs the case with the model and optimizer that `take` returns, and returns the outcome.

    Copies the final values inside the context manager that `read` returns.
    """
    with threads_of_torch(threads):
        if "torch._dynamo" in sys.modules:  # removes the code that an earlier run compiled
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
    """Returns a context manager that does nothing: reading the weights of a model in RAM needs no preparation."""
    return contextlib.nullcontext()


_references: dict[tuple[str, int], Outcome] = {}


def reference(case, threads):
    """Returns the outcome of the case in RAM. Caches one outcome for each case and number of threads."""

    def take(model, original):
        return model, Reference(original, model=model, **case.options)

    key = case.name, threads
    if key not in _references:
        outcome = _references[key] = play(case, threads, take, read=nothing)
        assert not all(torch.equal(outcome.start[name], outcome.weights[name]) for name in outcome.weights), (
            "training changed no weight, so this case cannot detect an error"
        )
    return _references[key]


@contextlib.contextmanager
def committed(model, optimizer):
    """Requires that the run stayed within its budget.

    Materializes the weights for the `with` block; then closes the run.
    """
    host = optimizer.report().to_dict()["host"]
    assert host["peak"] <= host["budget"], host
    with memascend.materialized(model):
        yield
    optimizer.close()


def budget_of(case, mode, options):
    """Returns the host budget of a mode.

    "large" is a constant. "smallest" is the smallest budget that works. "some" is the mean of two budgets of the plan:
    `comfortable` and `all_in_ram`.
    """
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
    """Runs the case offloaded, and returns the outcome.

    If a run with `case.learns_budget` raises a BudgetError, runs the case again with the budget that the error names.
    """
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
            assert taken[-1].steps == 0, "BudgetError was raised after the first step"
            budget = error.smallest
        finally:
            for optimizer in taken:
                optimizer.close()
    raise AssertionError(f"{BUDGETS_MAX} budgets were too small, although each error named the next budget as enough")


def same(left, right):
    """True if two tensors have the same bits, or two other values are equal. All NaNs of tensors count as equal."""
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
    """Returns a line of text for each value that is missing, additional or different in the outcome `got`."""
    expected, got = dict(_named(expected)), dict(_named(got))
    # Compares each "step" as a float, because some optimizers store "step" as an integer. If the reference has no
    # master weight for a parameter, the parameter itself is the master weight, so a master weight in `got` is ignored.
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
    return f"{expected!r} in RAM, {got!r} offloaded"


def check(case, mode, folder):
    """Requires that the case gives the same bits in RAM and offloaded."""
    lines = differences(reference(case, mode.threads), offloaded(case, mode, folder))
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:20])
