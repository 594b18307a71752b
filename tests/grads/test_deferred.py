"""Tests updates that a step leaves to the next one: bits, reads, doors, kills and faults are those of updates at once.

With gradients="ram" every update is made in its step, so such a run is what all others are compared with.
"""

from __future__ import annotations

import shutil
import signal
import sys
import textwrap
from itertools import cycle

import pytest
import torch
from support import chains
from support.bits import same_states
from support.chains import chain, everything, loss_of
from support.lives import life
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.cli import main
from memascend.engine import Store
from memascend.errors import CorruptionError, UsageError
from memascend.params.settling import Settling

STEPS = 6
WIDTH = 24
LIMIT = 1e-3  # far below the norm of every step


def stack(dtype=torch.bfloat16, layers=4):
    return chain(layers, True, width=WIDTH, dtype=dtype)


def adamw(model):
    groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def own_code_beside(model):
    return [torch.optim.AdamW(model[:2].parameters(), lr=1e-2), torch.optim.RMSprop(model[2:].parameters(), lr=1e-3)]


def offloaded(folder, gradients="ssd", make=stack, optimizer=adamw, **options):
    model = make()
    options = {"max_grad_norm": LIMIT, "existing": "resume", **options}
    return memascend.offload(model, optimizer(model), storage=folder, gradients=gradients, **options)


def nothing(*_):
    """What a loop does at a point where it does nothing."""


def walk(model, optimizer, index):
    optimizer.backward(loss_of(model, index))


def run(folder, gradients="ssd", *, steps=STEPS, loop=walk, before=nothing, between=nothing, **options):
    """What a run came to: its state, the norms of its steps, and its report."""
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
    assert repr(one[1]) == repr(other[1]), "the norms"
    assert same_states(one[0], other[0])


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
    "fp16, fixed": {"make": lambda: stack(torch.float16), "loss_scale": 64.0},
    "Adam": {"optimizer": adam},
    "momentum": {"optimizer": momentum, "make": lambda: stack(torch.float32)},
    "momentum, bf16": {"optimizer": momentum},
    "plain SGD": {"optimizer": plain_sgd, "make": lambda: stack(torch.float32)},
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


@pytest.mark.usefixtures("way")
def test_beside_the_ram_tier(tmp_path):
    """Gradients in the log's ring, and in place."""
    options = {"make": lambda: stack(layers=40), "steps": 20}
    some = chains.smallest(offloaded, tmp_path / "s", make=options["make"]) + (400 << 10)
    at_once, left = run(tmp_path / "ram", "ram", **options), run(tmp_path / "t", host_memory=some, **options)
    require_same(at_once, left)
    assert left[2].ram_tier
    assert left[2].deferred == 20


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


def of_blocks(model, optimizer, index):
    optimizer.backward(model(index))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("way")
def test_blocks_of_every_kind(tmp_path, reentrant):
    def thaws(model, _, index):
        model.blocks[1].requires_grad_(index < 2 or index > 3)

    both(tmp_path, make=lambda: Blocks(reentrant), optimizer=adam, loop=of_blocks, before=thaws, steps=8)


def two(model, optimizer, index):
    walk(model, optimizer, index)
    walk(model, optimizer, index + 100)


def gathered(by_layer):
    return lambda model, optimizer, index: optimizer.accumulate(
        lambda seed: loss_of(model, seed), (index, index + 100, index + 200), by_layer=by_layer
    )


LOOPS = {"two backwards": two, "accumulate": gathered(False), "by layer": gathered(True)}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.usefixtures("way")
def test_several_micro_batches(tmp_path, loop):
    both(tmp_path, loop=loop)


def evaluates(model, _, index):
    with torch.no_grad():
        for seed in range(index % 3):
            loss_of(model, seed)


def reads(model, optimizer, index):
    if index % 2:
        assert everything(model, optimizer)
    assert model[1].weight.norm() > 0


def schedules(_, optimizer, index):
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index)


def edits(model, optimizer, index):
    if index in (2, 3):
        with optimizer.edit(model[1].weight) as values:
            values[:, 0] += 1


def loads(model, optimizer, index):
    del optimizer
    if index == 3:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def discards(model, optimizer, index):
    for seed in range(index % 3):
        walk(model, optimizer, 50 + seed)
        if seed:
            model.zero_grad()
        else:
            optimizer.zero_grad()


def fails(model, optimizer, index):
    if index % 2:
        loss = loss_of(model, index) + model[0].weight.float().sum()
        handle = model[1].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.backward(loss)
        handle.remove()
        optimizer.zero_grad()


BEFORE = {one.__name__: one for one in (evaluates, reads, schedules, edits, loads, discards, fails)}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.usefixtures("way")
def test_what_a_loop_does_between_steps(tmp_path, before):
    both(tmp_path, before=before)


def saves(folder):
    def before(_, optimizer, index):
        if index % 2:
            optimizer.save(folder / str(optimizer.steps))

    return before


def looks(model, optimizer, index):
    """Between backward() and step() everything is as the last step left it, and may be read."""
    if index % 2:
        assert everything(model, optimizer)
        evaluates(model, optimizer, 2)


def by_torch(model, *_):
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def changes(model, _, index):
    if index % 2:
        model[0].weight.grad = model[0].weight.grad * 2
        model[1].weight.grad.mul_(0.5)


BETWEEN = {"looks": looks, "changes": changes}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.usefixtures("way")
def test_what_a_loop_does_before_step(tmp_path, between):
    both(tmp_path, between=between)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("way")
def test_torchs_own_clipping(tmp_path, dtype):
    options = {"between": by_torch, "max_grad_norm": None, "make": lambda: stack(dtype)}
    at_once, left = run(tmp_path / "ram", "ram", **options), run(tmp_path / "ssd", **options)
    assert left[2].deferred == STEPS
    # What step() says of the norm is of clipped gradients, rounded or not.
    assert same_states(at_once[0], left[0])


@pytest.mark.usefixtures("way")
def test_a_checkpoint_has_what_was_left(tmp_path):
    (tmp_path / "ram").mkdir()
    run(tmp_path / "s", before=saves(tmp_path))
    run(tmp_path / "t", "ram", before=saves(tmp_path / "ram"))
    for name in ("1", "3", "5"):
        mine, other = (sorted((folder / name).rglob("*.safetensors")) for folder in (tmp_path, tmp_path / "ram"))
        assert mine
        assert [one.read_bytes() for one in mine] == [one.read_bytes() for one in other]


def kept(folder, gradients, between=nothing):
    """A run without zero_grad(): its state, and the gradient of its first layer."""
    model, optimizer = offloaded(folder, gradients)
    with optimizer:
        for index in range(4):
            walk(model, optimizer, index)
            between(model, optimizer, index)
            optimizer.step()
            assert model[0].weight.grad.float().norm() > 0
        return {**everything(model, optimizer), "grad": model[0].weight.grad.clone()}


@pytest.mark.usefixtures("way")
def test_gradients_that_stay_are_added_to(tmp_path):
    """Without zero_grad() the next backward adds to gradients that the last commit names where they lie."""
    assert same_states(kept(tmp_path / "ram", "ram"), kept(tmp_path / "ssd", "ssd"))


def test_a_step_that_clips_nothing_ends_it(tmp_path):
    """Updates begin early again: what the last step left is made first, at a commit of its own."""
    scales = [1e3, 1e3, 1e-6, 1e-6, 1e-6, 1e3, 1e-6]

    def loop(model, optimizer, index):
        optimizer.backward(loss_of(model, index) * scales[index])

    options = {"loop": loop, "steps": len(scales), "max_grad_norm": 1.0}
    at_once, auto = run(tmp_path / "ram", "ram", **options), run(tmp_path / "auto", "auto", **options)
    require_same(at_once, auto)
    assert auto[2].early > 0
    assert 0 < auto[2].deferred < len(scales)


def test_a_budget_is_kept(tmp_path):
    smallest = chains.smallest(offloaded, tmp_path / "s")
    report = run(tmp_path / "t", host_memory=smallest)[2]
    assert report.deferred == STEPS
    assert report.peak <= smallest
    require_same(run(tmp_path / "ram", "ram"), run(tmp_path / "u", host_memory=smallest))


# --- ends -----------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, torch
    sys.path[:0] = {path!r}
    from grads.test_deferred import offloaded, walk
    model, optimizer = offloaded(sys.argv[1])
    for index in range(optimizer.steps, 40):
        walk(model, optimizer, index)
        optimizer.step()
        print(index, flush=True)
        optimizer.zero_grad()
"""


def killed_after(folder, steps):
    """A store whose process was killed after so many steps; and the gradient of the first layer in the last one."""
    program = textwrap.dedent(PROGRAM).format(path=sys.path[:]).replace("40", str(steps))
    last = "torch.save(model[0].weight.grad.clone(), sys.argv[1] + '.grad')"
    program = program.replace("    optimizer.step()", f"    {last}\n    optimizer.step()")
    program += "\nos.kill(os.getpid(), 9)\n"
    life([sys.executable, "-c", program, folder], ends=-signal.SIGKILL)
    return torch.load(f"{folder}.grad")


def store_file(folder):
    return next(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else folder


def test_a_flipped_bit_of_a_gradient_is_named(tmp_path):
    gradient = killed_after(tmp_path / "s", 3)
    file = store_file(tmp_path / "s")
    found = file.read_bytes().find(gradient.view(torch.uint8).numpy().tobytes())
    assert found > 0
    with file.open("r+b") as opened:
        opened.seek(found + 5)
        byte = opened.read(1)[0]
        opened.seek(found + 5)
        opened.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptionError, match=r'gradient of "0\.weight" in step 3'):
        offloaded(tmp_path / "s")
    # The commit before is whole.
    before = run(tmp_path / "s", steps=2, existing="previous")
    require_same((before[0], []), (run(tmp_path / "ram", "ram", steps=2)[0], []))


def test_another_budget_or_mode_goes_on(tmp_path):
    changes = {"gradients": "ssd", "host_memory": "64MiB"}, {"gradients": "ram"}, {"gradients": "auto"}
    want = run(tmp_path / "ram", "ram")[0]
    killed_after(tmp_path / "killed", 3)
    for number, options in enumerate(changes):
        copy = shutil.copytree if (tmp_path / "killed").is_dir() else shutil.copyfile
        copy(tmp_path / "killed", tmp_path / str(number))
        assert same_states(run(tmp_path / str(number), **options)[0], want)


def test_a_store_that_was_closed_has_no_log(tmp_path):
    run(tmp_path / "s", steps=3)
    for durability in ("step", "none"):
        model, optimizer = offloaded(tmp_path / "s", durability=durability)
        with optimizer:
            assert optimizer.steps >= 3
            walk(model, optimizer, optimizer.steps)
            optimizer.step()
            optimizer.zero_grad()
        assert main(["store", "verify", str(tmp_path / "s")]) == 0
        with Store.open(tmp_path / "s") as store:
            assert store.info()["log_steps"] == 0
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        found = everything(model, optimizer)
    assert same_states(found, run(tmp_path / "ram", "ram", steps=5)[0])


@pytest.mark.usefixtures("way")
def test_an_exception_loses_no_step_of_a_store_that_is_not_durable(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "s", durability="none", steps=4, before=lambda _, __, index: 1 / (3 - index))
    resumed = run(tmp_path / "s", steps=5)
    assert same_states(resumed[0], run(tmp_path / "ram", "ram", steps=5)[0])


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


def test_a_changed_gradient_that_stays_is_what_it_was_changed_to(tmp_path):
    def thirds(model, *_):
        model[0].weight.grad.div_(3)

    assert same_states(*(kept(tmp_path / gradients, gradients, thirds) for gradients in ("ram", "ssd")))


def test_an_update_that_cannot_be_left_comes_after_that_which_was(tmp_path):
    """Options that the engine's arithmetic does not have, for a step: torch's own code runs then, at once."""

    def fuses(_, optimizer, index):
        optimizer.param_groups[0]["nesterov"] = index == 3
        optimizer.param_groups[0]["momentum"] = 0.0 if index == 3 else 0.9

    both(tmp_path, optimizer=momentum, make=lambda: stack(torch.float32), before=fuses)


@pytest.mark.usefixtures("way")
def test_options_of_a_step_are_those_that_it_had(tmp_path):
    """A scheduler's later rate is not in an earlier update."""

    def later(_, optimizer, index):
        for group in optimizer.param_groups:
            group["lr"] = 10.0 ** -(index + 1)

    both(tmp_path, before=later, between=later)
    (tmp_path / "after").mkdir()
    both(tmp_path / "after", loop=lambda *given: (walk(*given), later(*given)))


@pytest.mark.usefixtures("way")
def test_a_step_in_the_midst_of_which_something_fails(tmp_path):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        walk(model, optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = everything(model, optimizer)
        walk(model, optimizer, 1)
        with pytest.raises(UsageError, match="staged"), optimizer.edit(model[0].weight):
            pass
        assert same_states(everything(model, optimizer), before)
        optimizer.zero_grad()
        assert same_states(everything(model, optimizer), before)


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


def test_both_ways_move_what_they_should(tmp_path, way):
    """Bytes of state, values and gradients that a step reads and writes, of layers that are fetched twice a step."""
    report = run(tmp_path / "s", make=lambda: stack(layers=30), steps=12)[2]
    parameters = sum(p.numel() for p in stack(layers=30).parameters())
    state_reads = report.read["state"] / report.written["state"]
    assert report.written["gradients"] >= 2 * 12 * parameters
    low, high = (0.9, 1.1) if way == "forward" else (1.6, 2.1)
    assert low < state_reads < high
