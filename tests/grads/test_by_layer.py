"""Tests `accumulate(by_layer=True)`: bits, the bytes that a step moves, errors, and models that it cannot run by layer.

The results must have the same bits as micro-batches that run one after the other.
"""

import _thread
import contextlib
import itertools
import logging
import random
import threading
import time

import pytest
import torch
from parity.zoo_plain import Block
from support.bits import same_bits, same_states
from support.chains import everything, offloaded, smallest, values
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.grads.microbatches import PartialSums

COUNT, WIDTH = 3, 64


class Stack(nn.Module):
    def __init__(self, blocks=4, *, drop=0.0, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(WIDTH, drop) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Experts(Stack):
    """A model in which the values of a micro-batch decide which block is skipped, and which block comes first.

    So the micro-batches have no common order of blocks.
    """

    def forward(self, x):
        start = int(x.detach().sum().abs() * 1e4) % len(self.blocks)
        for number in range(1, len(self.blocks)):
            x = self.blocks[(start + number) % len(self.blocks)](x)
        return self.head(x)


class Summed(Stack):
    """A model for which autograd gives the parameters `one` and `other` gradients that share memory."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(WIDTH, 1)), nn.Parameter(torch.zeros(WIDTH, 1))

    def forward(self, x):
        return super().forward(x) + (self.one.view(-1) + self.other.view(-1))


def rows(count=COUNT, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, WIDTH, generator=generator).requires_grad_() for _ in range(count)]


def square(model, batch):
    return model(batch).square().mean()


def accumulate(model, optimizer, batches, **options):
    return optimizer.accumulate(lambda batch: square(model, batch), batches, by_layer=True, **options)


def finish(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def require_same_by_layer(folder, make, count, **options):
    """Requires that micro-batches by layer give the same bits as micro-batches that run one after the other."""
    layers, turns = (trained(folder, make, rows(count), by_layer=by_layer, **options) for by_layer in (True, False))
    assert all(map(same_bits, layers[0], turns[0]))
    assert same_states(layers[1], turns[1])


def trained(folder, make, batches, *, by_layer, **options):
    """Trains; returns losses, norms and a last random draw in one list, and the final values and optimizer state."""
    model, optimizer = offloaded(folder / f"{by_layer}.store", make(), **options)
    found = []
    with optimizer:
        for _ in range(3):
            scale = 1 / len(batches)
            if by_layer:
                losses = accumulate(model, optimizer, batches, scale=scale)
            else:
                losses = optimizer.accumulate(lambda one: seeded_loss(model, *one), seeded(batches), scale=scale)
            assert all(not one.requires_grad for one in losses)
            optimizer.step()
            found += [*losses, torch.tensor(optimizer.grad_norm)]
            optimizer.zero_grad()
        assert not by_layer or optimizer._session.accumulation.never is None
        return [*found, torch.rand(3)], everything(model, optimizer)


def seeded(batches):
    """Returns pairs of seed and batch; draws the seeds as `accumulate(by_layer=True)` does."""
    return [(int(torch.empty((), dtype=torch.int64).random_().item()), batch) for batch in batches]


def seeded_loss(model, seed, batch):
    torch.manual_seed(seed)
    return square(model, batch)


MAKES = {
    "dropout": lambda: Stack(drop=0.2),
    "checkpointed": lambda: Stack(drop=0.2, reentrant=False),
    "reentrant": lambda: Stack(drop=0.2, reentrant=True),
    "experts": lambda: Experts(6),
    "summed": Summed,
}


class Skipping(Stack):
    """A model in which the values of a micro-batch decide which blocks are skipped. The order of blocks is fixed."""

    def forward(self, x):
        chosen = int(x.detach().sum().abs() * 1e4)
        for number, block in enumerate(self.blocks):
            if chosen >> number & 1:
                x = block(x)
        return self.head(x)


def accumulate_until_done(model, optimizer, seed):
    """Computes the micro-batches of a seed by layer. Repeats a call that fails; returns the number of failures."""
    failures = 0
    while failures <= len(model.blocks):
        torch.manual_seed(seed)
        try:
            accumulate(model, optimizer, rows(seed=seed), scale=1 / COUNT)
            break
        except memascend.UsageError as error:
            assert "Compute the step again" in str(error)  # noqa: PT017
            failures += 1
            optimizer.zero_grad()
    return failures


def trained_by_routes(folder, make, *, by_layer, **options):
    """Trains 40 steps, each on batches that take other routes.

    Returns the final values and optimizer state, and the number of calls that failed.
    """
    folder.mkdir(exist_ok=True)
    model, optimizer = offloaded(folder / f"{by_layer}.store", make(), **options)
    failures = 0
    with optimizer:
        for seed in range(40):
            if by_layer:
                failures += accumulate_until_done(model, optimizer, seed)
            else:
                torch.manual_seed(seed)
                batches = seeded(rows(seed=seed))
                optimizer.accumulate(lambda one: seeded_loss(model, *one), batches, scale=1 / COUNT)
            finish(optimizer)
        assert not by_layer or optimizer._session.accumulation.never is None
        return everything(model, optimizer), failures


@pytest.mark.parametrize("budget", ["smallest", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("make", "may_fail"), [(lambda: Skipping(6), False), (lambda: Experts(6), True)])
def test_micro_batches_may_use_any_blocks_in_any_order(tmp_path, make, may_fail, budget):
    """A block that some micro-batches skip is no error. An order that was never shown fails at most once a block."""
    options = {"host_memory": budget and smallest(offloaded, tmp_path / "none.store", make())}
    found, failures = trained_by_routes(tmp_path, make, by_layer=True, **options)
    assert same_states(found, trained_by_routes(tmp_path, make, by_layer=False, **options)[0])
    assert (0 < failures <= 6) if may_fail else not failures


@pytest.mark.parametrize(
    ("kind", "gradients", "count"),
    [("checkpointed", "ssd", 2), ("experts", "fused", 5), ("reentrant", "auto", 3), ("summed", "fused", 3)],
)
def test_by_layer_has_same_bits_as_sequential_micro_batches(tmp_path, kind, gradients, count):
    require_same_by_layer(tmp_path, MAKES[kind], count, gradients=gradients)


def moved_bytes(tmp_path, make, batches, **options):
    """Returns the bytes that the last of four steps reads, and the bytes that it writes."""
    model, optimizer = offloaded(tmp_path / f"{len(batches)}.store", make(), gradients="fused", **options)
    with optimizer:
        for _ in range(4):
            before = optimizer.report()
            accumulate(model, optimizer, batches)
            finish(optimizer)
        after = optimizer.report()
    return [
        sum(kinds.values()) - sum(earlier.values())
        for kinds, earlier in ((after.read, before.read), (after.written, before.written))
    ]


def require_no_more(several, one):
    assert all(more <= 1.05 * less for more, less in zip(several, one, strict=True))


@pytest.mark.parametrize(("kind", "dtype"), [("dropout", torch.float32), ("checkpointed", torch.bfloat16)])
def test_by_layer_moves_no_more_bytes_for_four_micro_batches_than_one(tmp_path, kind, dtype):
    # The default budget of a model of four blocks has no room for the whole model. The budget's queue has room for the
    # gradients of one block.
    one, four = (
        moved_bytes(
            tmp_path,
            lambda: MAKES[kind]().to(dtype),
            [batch.to(dtype).detach().requires_grad_() for batch in rows(count)],
            scratch=tmp_path,
        )
        for count in (1, 4)
    )
    require_no_more(four, one)


class Words(nn.Module):
    """A model that begins with an embedding, whose backward reads no weight.

    No gradient is larger than the embedding's gradient.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4096, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(6)))
        self.head = nn.Linear(WIDTH, 4096, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.words(tokens)))


def test_by_layer_moves_no_extra_bytes_for_an_embedding_gradient(tmp_path):
    budget = smallest(offloaded, tmp_path / "none.store", Words(), gradients="fused")
    one, six = (
        moved_bytes(tmp_path, Words, [torch.randint(4096, (2, 8)) for _ in range(count)], host_memory=budget)
        for count in (1, 6)
    )
    require_no_more(six, one)


def begun(folder, make=Stack, steps=1, **options):
    """Returns a run after `steps` steps.

    The first step runs its micro-batches one after the other. Later steps run their micro-batches by layer, if the
    model permits this.
    """
    model, optimizer = offloaded(folder / "run.store", make(), **options)
    for _ in range(steps):
        accumulate(model, optimizer, rows())
        finish(optimizer)
    return model, optimizer


@pytest.fixture
def by_layer(tmp_path):
    model, optimizer = begun(tmp_path)
    with optimizer:
        yield model, optimizer


class Bomb(torch.autograd.Function):
    """Copies a tensor, and calls `arrive` in the forward and in the backward of the copy."""

    @staticmethod
    def forward(ctx, x, arrive):
        ctx.arrive = arrive
        arrive()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.arrive()
        return gradient, None


@contextlib.contextmanager
def arriving(model, arrive):
    """Calls `arrive` when a micro-batch leaves a block in the forward, and when it enters a block in the backward."""
    hooks = [block.register_forward_hook(lambda _m, _a, out: Bomb.apply(out, arrive)) for block in model.blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def interrupted_run(folder, kind, interrupt, attempts, **options):
    """Trains. Before each step but the first, `interrupt` (unless it is None) makes an attempt that should fail.

    Returns the final state and the number of attempts that failed.
    """
    folder.mkdir()
    model, optimizer = begun(folder, MAKES[kind], **options)
    failed = 0
    with optimizer:
        for seed in range(40 if kind == "experts" else 0):
            # Later calls then expect all blocks in any order.
            accumulate_until_done(model, optimizer, seed)
            optimizer.zero_grad()
        for attempt in range(attempts):
            batches = rows(seed=attempt)
            torch.manual_seed(attempt)
            if interrupt is not None:
                before = values(model)
                failed += interrupt(model, optimizer, batches, attempt)
                optimizer.zero_grad()
                assert same_states(before, values(model))
                torch.manual_seed(attempt)
            accumulate(model, optimizer, batches, scale=1 / COUNT)
            finish(optimizer)
            assert optimizer.steps == attempt + 2
        assert optimizer._session.accumulation.never is None
        return everything(model, optimizer), failed


def require_same_interrupted(tmp_path, kind, interrupt, attempts, **options):
    """Requires that a run with `interrupt` ends with the state of a run without interrupts.

    Returns how many attempts failed.
    """
    found, failed = interrupted_run(tmp_path / "failing", kind, interrupt, attempts, **options)
    assert same_states(found, interrupted_run(tmp_path / "calm", kind, None, attempts, **options)[0])
    return failed


@pytest.mark.parametrize(
    ("kind", "gradients"),
    [
        ("dropout", "fused"),
        pytest.param("checkpointed", "ssd", marks=pytest.mark.slow),
        pytest.param("reentrant", "auto", marks=pytest.mark.slow),
        pytest.param("experts", "fused", marks=pytest.mark.slow),
    ],
)
def test_error_in_one_micro_batch_ends_all_and_the_run_continues_exactly(tmp_path, kind, gradients):
    """Attempt N raises an error at place N. A place is the forward or the backward of one block in one micro-batch."""
    # At least four blocks run, each with a forward and a backward. A reentrant checkpoint also recomputes each block to
    # its end, and so calls the hook again. Any other checkpoint stops the recomputation before the block's end.
    places = 4 * COUNT * (3 if kind == "reentrant" else 2)

    def interrupt(model, optimizer, batches, at):
        arrived = itertools.count()

        def arrive():
            if next(arrived) == at:
                raise ZeroDivisionError

        with arriving(model, arrive):
            try:
                accumulate(model, optimizer, batches, scale=1 / COUNT)
            except ZeroDivisionError:
                return True
        return False

    assert require_same_interrupted(tmp_path, kind, interrupt, places, gradients=gradients) == places


@pytest.mark.parametrize("attempts", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_ctrl_c_at_random_ends_all_micro_batches_and_run_continues_exactly(tmp_path, attempts):
    generator = random.Random(attempts)

    def interrupt(model, optimizer, batches, _):
        def loss_of(batch):
            time.sleep(0.001)
            return square(model, batch)

        timer = threading.Timer(generator.uniform(0, 0.02), _thread.interrupt_main)
        with arriving(model, lambda: time.sleep(0.001)):
            try:
                timer.start()
                optimizer.accumulate(loss_of, batches, scale=1 / COUNT, by_layer=True)
                # The interrupt may arrive at any time before the following two lines have ended.
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                return True
        return False

    assert require_same_interrupted(tmp_path, "dropout", interrupt, attempts, gradients="fused") == attempts


def test_ctrl_c_while_grad_mode_is_disabled_restores_the_callers_grad_mode(by_layer, monkeypatch):
    model, optimizer = by_layer

    def interrupted():
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._session.run.gradients, "begin_backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accumulate(model, optimizer, rows())
    assert torch.is_grad_enabled()


class Keeps(Stack):
    def forward(self, x):
        x = super().forward(x)
        self.aux_loss = x.sum().detach()
        return x


class Normed(Stack):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


class Draws(Stack):
    def forward(self, x):
        return super().forward(x) * random.choice([1, 1])


@pytest.mark.parametrize(
    ("make", "words"), [(Keeps, "aux_loss"), (Normed, "'norm' changes"), (Draws, "random numbers")]
)
def test_log_names_the_module_state_or_random_draw_that_prevents_by_layer(tmp_path, caplog, make, words):
    with caplog.at_level(logging.INFO, "memascend"), begun(tmp_path, make, steps=2)[1]:
        pass
    assert words in caplog.text
    assert "one after the other" in caplog.text


def test_random_numbers_that_a_later_call_begins_to_draw_are_refused(by_layer):
    model, optimizer = by_layer
    with pytest.raises(memascend.UsageError, match="random numbers are drawn"):
        optimizer._session.accumulate(
            lambda batch: square(model, batch) * torch.rand(()), rows(), scale=1.0, by_layer=True, seeded=False
        )


def test_post_accumulate_hook_runs_per_micro_batch_in_the_callers_thread(by_layer):
    model, optimizer = by_layer
    seen = []
    name = "blocks.0.up.weight"
    model.get_parameter(name).register_post_accumulate_grad_hook(lambda _: seen.append(threading.get_ident()))
    accumulate(model, optimizer, rows())
    assert seen == [threading.get_ident()] * COUNT


def test_by_layer_calls_gradient_hooks_in_micro_batch_order(tmp_path):
    """Each hook multiplies gradients by the number of its calls, so the order of micro-batches shows in the bits."""

    def make():
        model = Stack()
        for parameter in model.parameters():
            counted = itertools.count(1)
            parameter.register_hook(lambda gradient, counted=counted: gradient * next(counted))
        return model

    require_same_by_layer(tmp_path, make, COUNT, gradients="fused")


def test_by_layer_returns_detached_tuples_and_rejects_a_non_tensor_loss(by_layer):
    model, optimizer = by_layer

    def loss_of(batch):
        out = model(batch)
        return out.square().mean(), {"out": out}, "text"

    for count in (1, COUNT):
        results = optimizer.accumulate(loss_of, iter(rows(count)), by_layer=True)
        assert len(results) == count
        assert all(text == "text" and not rest["out"].requires_grad for _, rest, text in results)
        finish(optimizer)
    assert optimizer.accumulate(loss_of, [], by_layer=True) == []
    with pytest.raises(memascend.ConfigError, match="loss_of returned"):
        optimizer.accumulate(lambda _: 3, rows(1), by_layer=True)


@pytest.mark.filterwarnings("ignore:autocast keeps 16-bit copies:UserWarning")
def test_micro_batch_threads_use_the_callers_modes_and_end_with_the_call(by_layer):
    model, optimizer = by_layer
    seen, threads = [], []

    def loss_of(batch):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_device(), torch.is_grad_enabled()))
        threads.append(threading.current_thread())
        return square(model, batch).float()

    with torch.autocast("cpu", torch.bfloat16), torch.device("cpu"):
        optimizer.accumulate(loss_of, rows(), by_layer=True)
    assert seen == [(True, torch.device("cpu"), True)] * COUNT
    assert len(set(threads)) == COUNT
    for one in threads:
        one.join(10)
        assert not one.is_alive()


def test_failed_thread_start_fails_accumulate_and_the_run_continues(by_layer, monkeypatch):
    model, optimizer = by_layer
    start, started = threading.Thread.start, []

    def starts(thread):
        started.append(thread)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", starts)
        with pytest.raises(RuntimeError, match="new thread"):
            accumulate(model, optimizer, rows())
    optimizer.zero_grad()
    accumulate(model, optimizer, rows())
    optimizer.step()


# --- micro-batches that reach modules in different orders: parts of gradients may wait for earlier micro-batches ---


class Measured:
    """Records peaks in bytes; measures after each part that a micro-batch adds.

    `all` is the peak size of all sums and parts together. `waiting` is the peak size of the parts that wait.
    `uncounted` is the largest difference between the measured size and `nbytes` of `PartialSums`.
    """

    def __init__(self, monkeypatch):
        self.all = self.waiting = self.uncounted = self.limit = 0
        add_part = PartialSums._add_part

        def measured(sums, *arguments):
            add_part(sums, *arguments)
            parts = [part for found in sums._open.values() for part in found.early.values()]
            values = [found.values for found in sums._open.values() if found.values is not None]
            self.waiting = max(self.waiting, sum(one.nbytes for one in parts))
            there = sum(one.nbytes for one in [*parts, *values])
            self.all, self.limit = max(self.all, there), sums.limit
            self.uncounted = max(self.uncounted, abs(there - sums.nbytes))

        monkeypatch.setattr(PartialSums, "_add_part", measured)


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
@pytest.mark.parametrize("budget", ["smallest", None])
def test_waiting_partial_sums_stay_within_the_limit_and_change_no_bit(tmp_path, monkeypatch, gradients, budget):
    make, options = MAKES["experts"], {"gradients": gradients}
    options["host_memory"] = budget and smallest(offloaded, tmp_path / "none.store", make(), **options)
    found = Measured(monkeypatch)
    require_same_by_layer(tmp_path, make, 5, **options)
    assert 0 < found.all <= found.limit
    assert found.uncounted == 0
    # Parts wait in memory only if the budget has room for them, and never with "ram".
    assert (found.waiting > 0) == (gradients != "ram" and budget is None)
