"""Tests aliases of weights at random, beside the same in memory: torch's bits, or an error that names the door.

Aliases are taken between forwards and inside of them; they are read, written to, kept and released. What is taken
before offload() is refused there: `tests/session/test_aliases.py`.
"""

import contextlib
import random
import re
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
        return [of(self.handles[number]).clone()]

    def write(self, number, value):
        with torch.no_grad():
            of(self.handles[number])[:1] = value

    def release(self):
        self.handles.clear()

    def edit(self, number, value):
        parameter = list(self.model.parameters())[number]
        if isinstance(self.optimizer, memascend.OffloadedOptimizer):
            with self.optimizer.edit(parameter) as values:
                values[:1] = value
        else:
            with torch.no_grad():
                parameter[:1] = value

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
        try:
            loss = self.model(batch()).square().mean()
            loss.backward()
            self.optimizer.step()
        finally:
            if handle is not None:
                handle.remove()
        self.optimizer.zero_grad()
        return [loss.detach(), *seen, *self.values()]

    def values(self):
        return [p.detach().clone() for p in self.model.parameters()]


def smallest(side, folder, options):
    try:
        memascend.offload(side.model, side.optimizer, storage=folder, host_memory=1, **options)
    except memascend.BudgetError as error:
        return error.smallest
    raise AssertionError


NAMED = re.compile(
    r"optimizer\.edit\(parameter\)|is about to change, and your code holds .*p\.detach\(\)\.clone\(\)", re.DOTALL
)


def doings_of(drawn, taken):
    """What a loop does before a step, of which it has `taken` so many aliases."""
    for _ in range(drawn.randrange(5)):
        does = drawn.choice(("take", "take", "read", "read", "write", "release", "release", "edit"))
        if does == "take" or (does in ("read", "write") and not taken):
            taken += 1
            yield ("take", drawn.randrange(2 * UNITS), drawn.choice(list(KINDS)))
        elif does == "read":
            yield ("read", drawn.randrange(taken))
        elif does == "write":
            yield ("write", drawn.randrange(taken), drawn.random())
        elif does == "release":
            taken = 0
            yield ("release",)
        else:
            yield ("edit", drawn.randrange(2 * UNITS), drawn.random())


@dataclass
class Twins:
    """Both sides, and the values that the last commit left."""

    plain: Side
    ours: Side
    truth: list

    def both(self, name, *arguments):
        """Whether both did it, and saw the same; what ours refuses leaves it as it was at the last commit."""
        try:
            got = getattr(self.ours, name)(*arguments)
        except memascend.UsageError as error:
            if not NAMED.search(str(error)):
                raise
            self.go_back()
            return False
        wanted = getattr(self.plain, name)(*arguments)
        assert wanted is None or all(map(same_bits, got, wanted))
        if name in ("edit", "step"):
            self.truth = self.plain.values()
        return True

    def go_back(self):
        """Release all aliases, and drop the gradients; torch in memory also has what was written."""
        for side in (self.ours, self.plain):
            side.release()
            side.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, values in zip(self.plain.model.parameters(), self.truth, strict=True):
                parameter.copy_(values)
        # What was written before another error is told by the next look at it.
        with contextlib.suppress(memascend.UsageError):
            self.ours.optimizer.step()
        assert all(map(same_bits, self.ours.values(), self.truth))


def twins(drawn, folder):
    options = {"gradients": drawn.choice(("auto", "fused", "ssd", "ram")), "durability": drawn.choice(("step", "none"))}
    kind = OPTIMIZERS[drawn.choice(list(OPTIMIZERS))]
    made = [stack(UNITS) for _ in range(2)]
    plain, ours = (Side(model, kind(model.parameters())) for model in made)
    if drawn.random() < 0.7:
        options["host_memory"] = drawn.choice((smallest(ours, folder, options), "64MiB"))
    elif drawn.random() < 0.5:
        options["units"] = [str(number) for number in range(UNITS)]
    ours.model, ours.optimizer = memascend.offload(ours.model, ours.optimizer, storage=folder, **options)
    return Twins(plain, ours, plain.values())


def one_run(seed, folder):
    """How many steps were made; all that was seen is the same as in memory, or the loop was refused and goes on."""
    drawn = random.Random(seed)
    both = twins(drawn, folder)
    made = 0
    with both.ours.optimizer:
        for _ in range(STEPS):
            is_written = False
            for name, *arguments in list(doings_of(drawn, len(both.plain.handles))):
                if name in ("read", "write") and arguments[0] >= len(both.plain.handles):
                    # After a refusal there are fewer.
                    continue
                is_written = both.both(name, *arguments) and (is_written or name == "write")
            # Inside, nothing can see what is written through memory that torch has handed out.
            inside = (drawn.randrange(UNITS), drawn.choice(("data", "detach", "turned")), drawn.random() < 0.2)
            inside = inside if drawn.random() < 0.5 else None
            is_done = both.both("step", inside)
            assert not (is_done and (is_written or (inside and inside[2]))), "what was written was lost"
            made += is_done
        both.ours.release()
    return made


@pytest.mark.parametrize("first", [0, *(pytest.param(n * RUNS, marks=pytest.mark.slow) for n in range(1, 30))])
def test_what_reaches_a_weight_has_its_values_or_is_refused(tmp_path, first):
    made = [one_run(seed, tmp_path / f"{seed}.store") for seed in range(first, first + (RUNS if first else 5))]
    assert sum(made) > len(made)
