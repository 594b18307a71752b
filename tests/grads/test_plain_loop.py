"""Tests `accumulate()` against the plain loop: programs that keep values, writes to weights, other threads."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parity.machine_calls import WRITES
from support import chains
from support.bits import same_bits
from support.checkpointed import Block
from torch import nn

import memascend

WIDTH, BLOCKS, MICRO_BATCHES, STEPS = 32, 4, 3, 3


class Stack(nn.Module):
    """A model that calls `between(number, x)` after each block."""

    def __init__(self, between=lambda _, x: x):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = self.between(number, block(x))
        return self.head(x)


def square(model):
    return lambda batch: model(batch).square().mean()


# --- programs that keep values between micro-batches or blocks; each program returns a new model and its `loss_of` ---


def features_of_hooks():
    model, features = Stack(), {}
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _m, _a, out, number=number: features.__setitem__(number, out))
    return model, lambda batch: model(batch).square().mean() + sum(one.abs().mean() for one in features.values())


def default_generators():
    random.seed(3)
    model = Stack(lambda _, x: x * torch.rand(()) * random.random())
    return model, square(model)


def truncated_bptt():
    model, state = Stack(), [torch.zeros(4, WIDTH)]

    def loss_of(batch):
        out = model(batch + state[0])
        state[0] = out.detach()
        return out.square().mean()

    return model, loss_of


def toggled_requires_grad():
    model = Stack()

    def between(number, x):
        if number < 2:
            model.blocks[1].requires_grad_(number == 1)
        return x

    model.between = between
    return model, square(model)


def drawn_batches():
    """Yields micro-batches, and draws each on demand from torch's default generator.

    The model of `default_generators` also draws from this generator.
    """
    for _ in range(MICRO_BATCHES):
        yield torch.randn(4, WIDTH)


def listed_batches():
    """Returns the micro-batches in a list, all drawn in advance."""
    return list(drawn_batches())


def kept(program, batches, storage=None, **options):
    """Trains with `accumulate()`, or in memory with a plain loop if `storage` is None.

    Returns the losses, a last random draw, and the final values.
    """
    torch.manual_seed(0)
    model, loss_of = program()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if storage is not None:
        model, optimizer = memascend.offload(model, optimizer, storage=storage, **options)
    found = []
    for _ in range(STEPS):
        if storage is None:
            for batch in batches():
                found.append(loss_of(batch))
                (found[-1] * (1 / MICRO_BATCHES)).backward()
        else:
            found += optimizer.accumulate(loss_of, batches(), scale=1 / MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    found += [torch.rand(2), *(value.clone() for value in model.state_dict().values())]
    if storage is not None:
        optimizer.close()
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("gradients", ["auto", "fused"])
@pytest.mark.parametrize("batches", [listed_batches, drawn_batches])
@pytest.mark.parametrize("program", [features_of_hooks, default_generators, truncated_bptt, toggled_requires_grad])
def test_programs_that_keep_values_equal_the_plain_loop(tmp_path, program, batches, gradients):
    wanted = kept(program, batches)
    found = kept(program, batches, tmp_path / "run.store", gradients=gradients)
    assert all(same_bits(one.detach(), other) for one, other in zip(wanted, found, strict=True))


def offloaded(tmp_path, gradients="auto", *, small=False):
    torch.manual_seed(0)
    options = {"storage": tmp_path / "run.store", "model": Stack(), "kind": torch.optim.SGD, "gradients": gradients}
    if small:
        options["host_memory"] = chains.smallest(chains.offloaded, **options)
    return chains.offloaded(**options)


@pytest.mark.parametrize(
    ("write", "gradients", "small"),
    [("in place", "auto", True), ("data", "ssd", False), ("numpy", "fused", True)],
)
def test_by_layer_rejects_a_loss_of_that_writes_to_weights(tmp_path, write, gradients, small):
    model, optimizer = offloaded(tmp_path, gradients, small=small)
    with optimizer:
        optimizer.accumulate(square(model), listed_batches(), by_layer=True)
        optimizer.step()
        optimizer.zero_grad()

        def loss_of(batch):
            for parameter in model.blocks.parameters():
                WRITES[write](parameter)
            return model(batch).square().mean()

        with pytest.raises(memascend.UsageError, match=r"blocks\.\d\.[a-z.]+.*materialized\(model, modify=True\)"):
            optimizer.accumulate(loss_of, listed_batches(), by_layer=True)
        optimizer.zero_grad()
        assert optimizer.steps == 1
        optimizer.accumulate(square(model), listed_batches(), by_layer=True)
        optimizer.step()
        assert optimizer.steps == 2


def test_steps_with_two_accumulate_calls_are_committed(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        for _ in range(3):
            for _ in range(2):
                optimizer.accumulate(square(model), listed_batches())
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.steps == 3


@pytest.mark.parametrize("by_layer", [False, True])
def test_another_thread_evaluates_during_accumulate_at_smallest_budget(tmp_path, by_layer):
    model, optimizer = offloaded(tmp_path, "ssd", small=True)
    batches = listed_batches()
    stop = threading.Event()

    @torch.no_grad()
    def evaluate():
        found = []
        while not stop.is_set():
            found.append(model(batches[0]))
        return found

    with optimizer, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            with torch.no_grad():
                expected = model(batches[0])
            stop.clear()
            meanwhile = pool.submit(evaluate)
            try:
                optimizer.accumulate(square(model), batches, by_layer=by_layer)
            finally:
                stop.set()
            found = meanwhile.result(20)
            assert found
            assert all(same_bits(one, expected) for one in found)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.steps == 3


class Drawn(torch.utils.data.IterableDataset):
    """A data set of 12 examples. With `says`, the data set reports the wrong length 4. Otherwise it has no length."""

    def __init__(self, *, says):
        super().__init__()
        self.says = says

    def __iter__(self):
        yield from torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        if not self.says:
            raise TypeError("it has no length")
        return 4


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("says", [False, True])
def test_accumulate_accepts_a_loader_of_unknown_or_wrong_length(tmp_path, says):
    model, optimizer = offloaded(tmp_path, "fused")
    with optimizer:
        losses = optimizer.accumulate(square(model), torch.utils.data.DataLoader(Drawn(says=says), 4))
        optimizer.step()
        assert (len(losses), optimizer.steps) == (3, 1)


class Nested(torch.nn.Module):
    """A model in which a forward hook of each block but the last calls the next block.

    The call of a block ends after the call of the next block, so all blocks must be in memory at the same time.
    """

    def __init__(self, meet):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        for block, inner in itertools.pairwise(self.blocks):

            def compute(_module, _arguments, out, inner=inner):
                meet()
                return inner(out)

            block.register_forward_hook(compute)

    def forward(self, x):
        return self.blocks[0](x)


@pytest.mark.filterwarnings("default")
def test_two_evaluating_threads_grow_the_arena_instead_of_deadlocking(tmp_path):
    """Without a budget, the arena may grow beyond the plan.

    The arena grows if two threads together need more units than the arena has room for.
    """
    torch.manual_seed(0)
    both = threading.Barrier(2)
    model = Nested(lambda: both.wait(30))
    model, optimizer = chains.offloaded(tmp_path / "run.store", model, torch.optim.SGD)
    x = torch.randn(4, WIDTH)

    @torch.no_grad()
    def evaluate(_):
        return model(x)

    with optimizer, ThreadPoolExecutor(2) as pool:
        assert same_bits(*pool.map(evaluate, range(2), timeout=40))
