"""Tests aliases of weights at random: taken before, between and inside; read and written; beside the same in memory."""

import contextlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.reached import OPTIMIZERS, batch, stack

import memascend

UNITS, STEPS, RUNS = 3, 4, 10
KINDS = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(p.shape),
    "row": lambda p: p.detach()[:1],
    "turned": lambda p: p.data.t(),
    "numpy": lambda p: p.detach().numpy(),
    "memoryview": lambda p: memoryview(p.data.numpy()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "storage": lambda p: p.untyped_storage(),
}


def of(handle):
    """A handle as a tensor on its memory."""
    if isinstance(handle, torch.UntypedStorage):
        return torch.empty(0).set_(handle)
    return handle.detach() if isinstance(handle, torch.Tensor) else torch.from_numpy(np.asarray(handle))


@dataclass
class Side:
    """One of two runs that do the same."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    handles: list = field(default_factory=list)

    def take(self, number, kind):
        self.handles.append(KINDS[kind](list(self.model.parameters())[number]))

    def read(self, number):
        return of(self.handles[number]).clone()

    def write(self, number, value):
        with torch.no_grad():
            of(self.handles[number])[:1] = value
        return torch.empty(0)

    def step(self, inside):
        seen = []
        handle = None
        if inside is not None:
            number, kind, writes = inside

            def hook(module, given):
                del given
                part = of(KINDS[kind](module.weight))
                if writes:
                    part.mul_(0.5)
                seen.append(part.clone())

            handle = self.model[number].register_forward_pre_hook(hook)
        loss = self.model(batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        return [loss.detach(), *seen, *(p.detach().clone() for p in self.model.parameters())]


def smallest(side, folder, options):
    try:
        memascend.offload(side.model, side.optimizer, storage=folder, host_memory=1, **options)
    except memascend.BudgetError as error:
        return error.smallest
    raise AssertionError


def refused_first(ours, drawn, folder, options):
    """Aliases of before the call: it names one of their parameters, or there are none."""
    numbers = {drawn.randrange(2 * UNITS) for _ in range(drawn.choice((0, 1, 3)))}
    for number in numbers:
        ours.take(number, drawn.choice(list(KINDS)))
    before = [p.detach().clone() for p in ours.model.parameters()]
    if numbers:
        names = [name for name, _ in ours.model.named_parameters()]
        with pytest.raises(memascend.ConfigError, match="|".join(names[number] for number in numbers)):
            memascend.offload(ours.model, ours.optimizer, storage=folder, **options)
        if drawn.random() < 0.5:
            # What was refused is as it was: written through, the model has it.
            value = drawn.random()
            part = ours.write(0, value)
            del part
            assert not all(map(same_bits, before, ours.model.parameters()))
            with torch.no_grad():
                for parameter, values in zip(ours.model.parameters(), before, strict=True):
                    parameter.copy_(values)
        assert all(map(same_bits, before, ours.model.parameters()))
        ours.handles.clear()
    ours.model, ours.optimizer = memascend.offload(ours.model, ours.optimizer, storage=folder, **options)


def one_run(seed, folder):
    """How many steps were made until the loop was refused, if it was; all that was seen is the same as in memory."""
    drawn = random.Random(seed)
    options = {"gradients": drawn.choice(("auto", "fused", "ssd", "ram")), "durability": drawn.choice(("step", "none"))}
    kind = OPTIMIZERS[drawn.choice(list(OPTIMIZERS))]
    made = [stack(UNITS) for _ in range(2)]
    plain, ours = (Side(model, kind(model.parameters())) for model in made)
    if drawn.random() < 0.7:
        options["host_memory"] = drawn.choice((smallest(ours, folder, options), "64MiB"))
    elif drawn.random() < 0.5:
        options["units"] = [str(number) for number in range(UNITS)]
    refused_first(ours, drawn, folder, options)
    made = 0
    # What was written inside, and is nowhere else, is missed at the end, too.
    with contextlib.suppress(memascend.UsageError), ours.optimizer:
        for step in range(STEPS):
            doings = []
            for _ in range(drawn.randrange(4)):
                does = drawn.choice(("take", "read", "write"))
                if does == "take" or not plain.handles:
                    doings.append(("take", drawn.randrange(2 * UNITS), drawn.choice(list(KINDS))))
                elif does == "read":
                    doings.append(("read", drawn.randrange(len(plain.handles))))
                else:
                    doings.append(("write", drawn.randrange(len(plain.handles)), drawn.random()))
            # Inside, nothing can see what is written through memory that torch has handed out.
            inside = (drawn.randrange(UNITS), drawn.choice(("data", "detach", "turned")), drawn.random() < 0.2)
            for name, *arguments in doings:
                got = getattr(ours, name)(*arguments)
                wanted = getattr(plain, name)(*arguments)
                assert wanted is None or same_bits(got, wanted), (seed, step, name, arguments)
            inside = inside if drawn.random() < 0.5 else None
            got = ours.step(inside)
            assert all(map(same_bits, got, plain.step(inside))), (seed, step, inside)
            assert all(same_bits(ours.read(n), plain.read(n)) for n in range(len(plain.handles))), (seed, step)
            made += 1
        ours.handles.clear()
    return made


@pytest.mark.parametrize("first", [0, *(pytest.param(n * RUNS, marks=pytest.mark.slow) for n in range(1, 30))])
def test_what_reaches_a_weight_has_its_values_or_is_refused(tmp_path, first):
    made = [one_run(seed, tmp_path / f"{seed}.store") for seed in range(first, first + (RUNS if first else 3))]
    assert sum(made) > len(made)
