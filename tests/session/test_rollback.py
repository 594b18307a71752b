"""Tests going back: an older state dict whose checkpoint is at hand takes the run back to its step."""

import pytest
import torch
from support.bits import same_bits
from support.grids import covered
from torch import nn

import memascend
from memascend import CorruptionError, UsageError

# That options are stored which differ is not of here.
pytestmark = pytest.mark.filterwarnings("ignore:the stored options stand")

WIDTH = 16
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
}


class Stack(nn.Module):
    def __init__(self, units, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(units)]).to(dtype)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x.float())


def offloaded(folder, units=2, optimizer="adamw", dtype=torch.float32, **options):
    model = Stack(units, dtype)
    return memascend.offload(
        model, OPTIMIZERS[optimizer](model.parameters()), storage=folder / "run.store", host_memory="64MiB", **options
    )


def trained(model, optimizer, seeds):
    for seed in seeds:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(model.blocks[0].weight.dtype)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + seed)
        optimizer.backward((model(x) * torch.arange(WIDTH)).square().mean() * 1e-4)
        optimizer.user_state = seed
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """All that a later step depends on."""
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name} {of}": tensor for of, tensor in optimizer.state_of(parameter).items()}
    numbers = (optimizer.steps, optimizer.user_state, optimizer.param_groups[0]["lr"], optimizer.loss_scale)
    return found, numbers


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    assert not [name for name in one[0] if not same_bits(one[0][name], other[0][name])]


@pytest.mark.parametrize(
    ("units", "debug", "optimizer", "dtype", "first"),
    covered([2, 16], ["1", ""], OPTIMIZERS, [torch.float32, torch.bfloat16, torch.float16], ["model", "optimizer"]),
)
def test_what_comes_after_is_what_came_before(tmp_path, monkeypatch, units, debug, optimizer, dtype, first):
    monkeypatch.setenv("MEMASCEND_DEBUG", debug)
    model, made = offloaded(tmp_path, units, optimizer, dtype)
    with made:
        trained(model, made, range(2))
        made.save(tmp_path / "saved")
        halves = {name: tensor.clone() for name, tensor in model.state_dict().items()}, made.state_dict()
        there = everything(model, made)
        trained(model, made, range(2, 5))
        later = everything(model, made)
        for half in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
            if half == "model":
                model.load_state_dict(halves[0])
            else:
                made.load_state_dict(halves[1])
        assert_same(everything(model, made), there)
        assert made.report().steps == 5
        trained(model, made, range(2, 5))
        assert_same(everything(model, made), later)
    model, made = offloaded(tmp_path, units, optimizer, dtype, existing="resume")
    with made:
        assert_same(everything(model, made), later)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_all_of_one_step(tmp_path, monkeypatch, when):
    """Of the checkpoint where its commit stands by then, else of the step that was committed before."""
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        trained(model, optimizer, range(2))
        optimizer.save(tmp_path / "saved")
        then, there = optimizer.state_dict(), everything(model, optimizer)
        trained(model, optimizer, range(2, 4))
        here = everything(model, optimizer)
        commit = memascend.engine.Engine.commit

        def interrupted(*args, **options):
            if when == "after":
                commit(*args, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(memascend.engine.Engine, "commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(then)
        # The groups' options are taken last, and were not.
        expected = there if when == "after" else here
        optimizer.param_groups[0]["lr"] = expected[1][2]
        assert_same(everything(model, optimizer), expected)
        trained(model, optimizer, [5])
        assert optimizer.steps == expected[1][0] + 1


def test_a_step_of_the_line_that_was_left_is_another(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        trained(model, optimizer, [1])
        optimizer.save(tmp_path / "first")
        first = optimizer.state_dict()
        trained(model, optimizer, [2])
        left = optimizer.state_dict()
        optimizer.load_state_dict(first)
        # Once more, where it stands already.
        optimizer.load_state_dict(first)
        optimizer.load_state_dict(optimizer.state_dict())
        trained(model, optimizer, [3])
        optimizer.save(tmp_path / "other")
        other = optimizer.state_dict()
        with pytest.raises(UsageError, match="step 2 of store"):
            optimizer.load_state_dict(left)
        trained(model, optimizer, [4])
        optimizer.load_state_dict(other)
        assert optimizer.steps == 2
    model, optimizer = offloaded(tmp_path, existing="resume")
    with optimizer:
        with pytest.raises(UsageError, match="step 2 of store"):
            optimizer.load_state_dict(left)
        optimizer.load_state_dict(other)
        optimizer.load_state_dict(first)
        assert optimizer.steps == 1


@pytest.mark.parametrize("how", ["gone", "another", "damaged", "never"])
def test_without_the_checkpoint_it_is_refused_and_nothing_changes(tmp_path, how):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        trained(model, optimizer, [1])
        folder = tmp_path / "saved"
        if how != "never":
            optimizer.save(folder)
        halves = {name: tensor.clone() for name, tensor in model.state_dict().items()}, optimizer.state_dict()
        trained(model, optimizer, [2])
        if how == "gone":
            folder.rename(tmp_path / "elsewhere")
        elif how == "another":
            optimizer.save(folder)
        elif how == "damaged":
            (file,) = (folder / "memascend").glob("*.safetensors")
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        before = everything(model, optimizer)
        model.load_state_dict(halves[0])
        refusal = pytest.raises(CorruptionError) if how == "damaged" else pytest.raises(UsageError, match=r"save\(\)")
        with refusal as error:
            optimizer.load_state_dict(halves[1])
        assert how == "damaged" or "checkpoint=" in str(error.value)
        assert_same(everything(model, optimizer), before)
        trained(model, optimizer, [3])


def test_a_failure_within_leaves_everything_as_it_was(tmp_path, monkeypatch):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        trained(model, optimizer, [1])
        optimizer.save(tmp_path / "saved")
        older = optimizer.state_dict()
        trained(model, optimizer, [2])
        before = everything(model, optimizer)

        def fails(*_, **__):
            raise memascend.StorageError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(type(optimizer._session.run.resources.engine), "commit", fails)
            with pytest.raises(memascend.StorageError):
                optimizer.load_state_dict(older)
        assert_same(everything(model, optimizer), before)
        trained(model, optimizer, [3])
        optimizer.load_state_dict(older)
        assert optimizer.steps == 1


@pytest.mark.parametrize("first", ["high", "low"])
def test_the_loss_scale_goes_back_too(tmp_path, first):
    """With its count of good steps, which decides when it grows."""

    def stepped(model, optimizer, *, overflows):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).half()
        optimizer.backward((model(x) * torch.arange(WIDTH)).square().mean() * (1e30 if overflows else 1e-4))
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = offloaded(tmp_path, dtype=torch.float16)
    scale = optimizer._session.run.record.scale
    with optimizer:
        stepped(model, optimizer, overflows=False)
        if first == "low":
            stepped(model, optimizer, overflows=True)
            stepped(model, optimizer, overflows=False)
        there = scale.state()
        optimizer.save(tmp_path / "saved")
        halves = {name: tensor.clone() for name, tensor in model.state_dict().items()}, optimizer.state_dict()
        stepped(model, optimizer, overflows=True)
        stepped(model, optimizer, overflows=False)
        stepped(model, optimizer, overflows=False)
        assert optimizer.loss_scale == there["scale"] / 2
        assert scale.state()["good_steps"] != there["good_steps"]
        model.load_state_dict(halves[0])
        optimizer.load_state_dict(halves[1])
        assert scale.state() == there
    model, optimizer = offloaded(tmp_path, dtype=torch.float16, existing="resume")
    with optimizer:
        assert optimizer._session.run.record.scale.state() == there
