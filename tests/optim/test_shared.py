"""Tests optimizers that the engine has no kernel for: group options, attributes, state in RAM, tensor subclasses."""

import copy
import json
import logging

import pytest
import torch
from support import chains
from support.bits import same_bits, same_states
from support.by_parameter import ByParameter
from support.chains import chain, everything, loss_of, offloaded, require_same, step, twins, values
from torch.utils._python_dispatch import return_and_correct_aliasing

import memascend
from memascend.checkpoint.reader import FOLDER, MANIFEST
from memascend.optim.rules import Arithmetic


class Counted(torch.optim.Optimizer):
    """Steps by the sign of a mean gradient. Each group has a count and two options that decay; step 1 sets `begun`."""

    def __init__(self, groups, lr=0.01):
        super().__init__(groups, {"lr": lr, "heat": 1.0, "weight": torch.tensor(1.0)})
        self.begun = False

    @torch.no_grad()
    def step(self, closure=None):
        if not self.begun:
            self.begun = True
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["heat"] = group["heat"] * 0.9 + 1e-3
            group["weight"].mul_(0.7)
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 / group["k"])
                size = group["lr"] * (1 + group["heat"]) * (1 + group["weight"].item())
                parameter.sub_(state["mean"].sign(), alpha=size)


class ScheduleFree(torch.optim.Optimizer):
    """An optimizer with different values for training and for evaluation, like schedule-free optimizers."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr, "k": 0, "train_mode": False})

    def _move(self, towards, *, train):
        for group in self.param_groups:
            if group["train_mode"] != train:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], towards)
                group["train_mode"] = train

    @torch.no_grad()
    def eval(self):
        self._move(1 - 1 / 0.9, train=False)

    @torch.no_grad()
    def train(self):
        self._move(1 - 0.9, train=True)

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("call train() first")
        for group in self.param_groups:
            group["k"] += 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                parameter.lerp_(state["z"], 1 / group["k"])
                parameter.sub_(parameter.grad, alpha=group["lr"] * 0.9)
                state["z"].sub_(parameter.grad, alpha=group["lr"])


def groups(trained):
    parameters = list(trained.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 0.02},
    ]


def train(trained, optimizer, steps, *, without=()):
    for index in steps:
        # In the steps that `without` lists, no parameter of the second group has a gradient.
        for parameter in optimizer.param_groups[1]["params"]:
            parameter.requires_grad_(index not in without)
        step(trained, optimizer, index)


def begun(storage, kind=Counted, dtype=torch.float32, **options):
    """Returns the offloaded model, its optimizer, and the original optimizer that was passed to offload()."""
    trained = chain(4, bias=True, dtype=dtype)
    original = kind(groups(trained))
    return *memascend.offload(trained, original, storage=storage, **options), original


def in_memory(steps, **options):
    plain = chain(4, bias=True)
    reference = Counted(groups(plain))
    train(plain, reference, steps, **options)
    return values(plain), reference


def same_options(one, other):
    names = one.keys() | other.keys()
    return all(torch.equal(torch.as_tensor(one[n]), torch.as_tensor(other[n])) for n in names - {"params"})


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_resume_restores_group_options_and_optimizer_attributes(tmp_path, gradients):
    expected, reference = in_memory(range(7), without=(2, 5))
    trained, optimizer, _ = begun(tmp_path / "store", gradients=gradients)
    train(trained, optimizer, range(4), without=(2,))
    assert [group["k"] for group in optimizer.param_groups] == [4, 4]
    optimizer.close()

    again, optimizer, original = begun(tmp_path / "store", gradients=gradients, existing="resume")
    assert original.begun is True
    assert [group["k"] for group in optimizer.param_groups] == [4, 4]
    assert isinstance(original.param_groups[0]["weight"], torch.Tensor)
    train(again, optimizer, range(4, 7), without=(5,))
    for one, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert same_options(one, other)
    assert same_states(values(again), expected)
    optimizer.close()


def test_failed_resume_leaves_the_group_options_unchanged(tmp_path, monkeypatch):
    trained, optimizer, _ = begun(tmp_path / "store")
    train(trained, optimizer, range(2))
    optimizer.close()
    again = chain(4, bias=True)
    original = Counted(groups(again))
    monkeypatch.setattr(Arithmetic, "restore", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memascend.offload(again, original, storage=tmp_path / "store", existing="resume")
    assert all(map(same_options, Counted(groups(again)).param_groups, original.param_groups))


def test_checkpoint_restores_optimizer_attributes_and_training(tmp_path):
    expected, _ = in_memory(range(5))
    trained, optimizer, _ = begun(tmp_path / "one")
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    assert json.loads((tmp_path / "saved" / FOLDER / MANIFEST).read_text())["attributes"]["begun"] is True
    other, optimizer, original = begun(tmp_path / "two", checkpoint=tmp_path / "saved")
    assert original.begun is True
    optimizer.close()
    # The first commit stores the attributes of the checkpoint, so a resumed run has these attributes as well.
    other, optimizer, original = begun(tmp_path / "two", existing="resume")
    assert original.begun is True
    train(other, optimizer, range(3, 5))
    assert same_states(values(other), expected)
    optimizer.close()


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_discarded_step_leaves_group_options_unchanged(tmp_path, gradients):
    trained, optimizer, _ = begun(tmp_path / "store", gradients=gradients)
    train(trained, optimizer, range(2))
    before = [copy.deepcopy({**group, "params": None}) for group in optimizer.param_groups]
    loss_of(trained).backward()
    optimizer.zero_grad()
    assert all(map(same_options, before, optimizer.param_groups))
    # The commit fails, because JSON cannot represent this `user_state`.
    loss_of(trained).backward()
    optimizer.user_state = {"fine": 1}
    optimizer._session.run.metadata.user_state = object()
    with pytest.raises(memascend.ConfigError):
        optimizer.step()
    optimizer._session.run.metadata.user_state = None
    assert all(map(same_options, before, optimizer.param_groups))
    optimizer.zero_grad()
    train(trained, optimizer, range(2, 4))
    assert same_states(values(trained), in_memory(range(4))[0])
    optimizer.close()


def test_overflow_leaves_group_options_unchanged(tmp_path):
    trained, optimizer, _ = begun(tmp_path / "store", dtype=torch.float16, loss_scale="dynamic")
    optimizer.backward(trained(torch.full((2, 32), 1e4, dtype=torch.float16)).square().mean())
    optimizer.step()
    assert optimizer.overflowed
    assert all("k" not in group for group in optimizer.param_groups)
    optimizer.close()


class EverSlower(Counted):
    """An optimizer whose ninth step sets `lr` to the norm of a gradient."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            if group["k"] == 9:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        group["lr"] = parameter.grad.norm().item()


class Listing(Counted):
    def step(self, closure=None):
        super().step()
        if self.param_groups[0]["k"] == 9:
            self.seen = {1, 2}


# The ninth step of each class fails with the error that its case names.
@pytest.mark.parametrize(
    ("kind", "gradients", "error", "says"),
    [
        (EverSlower, "auto", memascend.UsageError, "EverSlower changed the option 'lr' of a group to values"),
        (
            Listing,
            "ssd",
            memascend.MemascendError,
            "Listing set its attribute 'seen' to a value of type set,",
        ),
    ],
)
def test_step_error_names_the_uncommittable_option_or_attribute(tmp_path, kind, gradients, error, says):
    trained, optimizer, _ = begun(tmp_path / "store", kind, gradients=gradients)
    train(trained, optimizer, range(8))
    with pytest.raises(error, match=says):
        train(trained, optimizer, range(8, 9))
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.steps == 8
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_train_and_eval_change_streamed_values_as_in_torch(tmp_path, dtype):
    plain = chain(4, bias=True, dtype=dtype)
    reference = ScheduleFree(groups(plain))
    for epoch in range(2):
        # A new optimizer begins in evaluation mode. eval() committed the values of the evaluation, so a resumed
        # optimizer begins in evaluation mode, too.
        trained, optimizer, original = begun(
            tmp_path / "store", ScheduleFree, dtype, master_dtype=None, existing="resume"
        )
        assert original.param_groups[1]["train_mode"] is False
        for one, own in ((plain, reference), (trained, optimizer)):
            own.train()
            own.train()
            train(one, own, range(3 * epoch, 3 * epoch + 3))
            own.eval()
        assert optimizer.steps == 3 * epoch + 3
        assert same_states(values(trained), values(plain))
        if epoch == 0:
            optimizer.close()
    with optimizer:
        optimizer.train()
        loss_of(trained).backward()
        with pytest.raises(memascend.UsageError, match="a step is staged"):
            optimizer.eval()
    with begun(tmp_path / "other", torch.optim.SGD)[1] as optimizer:
        assert not hasattr(optimizer, "train")
        assert not hasattr(optimizer, "eval")


# --- durability="none": the state of torch's classes is kept in RAM, and the state of users' classes streams ----------

LAYERS = 3


class Watched(Counted):
    """A user's class whose step fails on purpose when it updates one chosen parameter."""

    # If a gradient has this norm, `step` fails. The norm identifies the parameter, because no two gradients have equal
    # norms.
    fails_at = None

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.fails_at in [gradient.norm().item() for gradient in gradients]:
            raise ArithmeticError("failed on purpose")
        super().step()


def made(tmp_path, kind, gradients="fused", **options):
    options = {"durability": "none", **options}
    plain, theirs, model, ours = twins(tmp_path, gradients, lambda: chain(LAYERS, bias=True), 1e-2, kind, **options)
    streams = kind is Watched and options["durability"] == "none"
    assert len(ours.plan.ram_tier) == (0 if streams else len(list(plain.parameters())))
    return plain, theirs, model, ours


def stepped(plain, theirs, model, ours, steps):
    chains.train(plain, theirs, steps)
    chains.train(model, ours, steps)


def require_equal(plain, theirs, model, ours):
    assert same_states(dict(plain.named_parameters()), model.state_dict())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        found = ours.state_of(other)
        for name, value in theirs.state[one].items():
            if value is not None:
                assert same_bits(torch.as_tensor(value), found[name].reshape(torch.as_tensor(value).shape)), name
    for one, other in zip(theirs.param_groups, ours.param_groups, strict=True):
        assert {key: one[key] for key in one if key != "params"} == {key: other[key] for key in one if key != "params"}


@pytest.mark.parametrize("durability", ["step", "none"])
def test_user_optimizer_state_streams_and_is_logged_at_durability_none(tmp_path, caplog, durability):
    with caplog.at_level(logging.INFO, "memascend"):
        plain, theirs, model, ours = made(tmp_path, Watched, durability=durability)
    output = f"{2 * LAYERS} parameters of Watched are never kept in RAM" in caplog.text
    assert output == (durability == "none")
    with ours:
        stepped(plain, theirs, model, ours, range(3))
        require_equal(plain, theirs, model, ours)
    # A temporary store is never durable, whatever `durability` is, so the state of the class streams here, too.
    with offloaded(None, chain(LAYERS, bias=True), Watched, durability=durability, host_memory="64MiB")[1] as ours:
        assert not ours.plan.ram_tier


@pytest.mark.parametrize("place", [0, 2 * LAYERS - 1])
def test_user_optimizer_that_raises_within_a_step_loses_no_commit(tmp_path, monkeypatch, place):
    plain, theirs, model, ours = made(tmp_path, Watched)
    with ours:
        stepped(plain, theirs, model, ours, range(2))
        before, options = everything(model, ours), dict(ours.param_groups[0])
        loss_of(plain, 2).backward()
        monkeypatch.setattr(Watched, "fails_at", list(plain.parameters())[place].grad.norm().item())
        plain.zero_grad()
        with pytest.raises(memascend.UsageError) as error:  # noqa: PT012 - either call may raise
            loss_of(model, 2).backward()
            ours.step()
        assert isinstance(error.value.__cause__, ArithmeticError)
        assert ours.steps == 2
        ours.zero_grad()
        assert same_states(everything(model, ours), before)
        assert ours.param_groups[0]["k"] == options["k"]
        monkeypatch.setattr(Watched, "fails_at", None)
        stepped(plain, theirs, model, ours, range(2, 4))
        require_equal(plain, theirs, model, ours)


# The code of NAdam updates a parameter in parts. The code of Adafactor updates a parameter as a whole.
@pytest.mark.parametrize(("kind", "gradients"), [(torch.optim.NAdam, "fused"), (torch.optim.Adafactor, "ssd")])
def test_invalid_lr_fails_the_step_and_the_run_continues(tmp_path, kind, gradients):
    plain, theirs, model, ours = made(tmp_path, kind, gradients)
    with ours:
        # The first commit writes a root that marks the store as unclosed. Later commits write nothing.
        stepped(plain, theirs, model, ours, range(2))
        before = ours.report()
        ours.param_groups[0]["lr"] = "fast"
        loss_of(model, 2).backward()
        with pytest.raises(memascend.UsageError):
            ours.step()
        ours.zero_grad()
        ours.param_groups[0]["lr"] = 1e-2
        stepped(plain, theirs, model, ours, range(2, 5))
        report = ours.report()
        assert (report.read, report.written) == (before.read, before.written), "the steps must move no bytes"
        require_equal(plain, theirs, model, ours)


# --- state in a tensor subclass, like quantised state: memascend stores its parts and rebuilds it bit for bit -------


class Quantised(torch.Tensor):
    """A tensor that stores codes, and a scale for each block. Operations use the decoded values."""

    @staticmethod
    def __new__(cls, codes, scale, block, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, block, dtype):
        self.codes, self.scale, self.block = codes, scale, block

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.block, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def zeros(cls, like, block):
        codes = torch.zeros(like.shape, dtype=torch.int8, device=like.device)
        return cls(codes, torch.zeros(like.numel() // block, device=like.device), block, like.dtype)

    def plain(self):
        blocks = self.codes.view(-1, self.block).float() / 127 * self.scale[:, None]
        return blocks.view(self.codes.shape).to(self.dtype)

    def fill(self, values):
        blocks = values.contiguous().view(-1, self.block)
        self.scale.copy_(blocks.abs().amax(1))
        self.codes.copy_((blocks / self.scale[:, None].clamp_min(1e-12) * 127).round().view(self.codes.shape))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Quantised):
            source = args[1].plain() if isinstance(args[1], Quantised) else args[1]
            args[0].fill(source)
            return args[0]
        if func is torch.ops.aten.detach.default:
            made = Quantised(args[0].codes, args[0].scale, args[0].block, args[0].dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        plain = [arg.plain() if isinstance(arg, Quantised) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class QuantisedMomentum(ByParameter):
    """An optimizer that quantises the state of parameters with at least 1,024 elements.

    With `anew`, each step replaces the quantised tensor by a new one.
    """

    def __init__(self, parameters, *, anew=False):
        super().__init__(parameters, {"lr": 0.1})
        self.anew = anew

    def one(self, group, parameter, state):
        if not state:
            state["step"] = torch.tensor(0.0)
            large = parameter.numel() >= 1024
            state["mean"] = Quantised.zeros(parameter, 64) if large else torch.zeros_like(parameter)
        state["step"] += 1
        mean = state["mean"] * 0.9 + parameter.grad
        if self.anew and isinstance(state["mean"], Quantised):
            state["mean"] = Quantised.zeros(parameter, 64)
        state["mean"].copy_(mean)
        parameter.sub_(state["mean"] * group["lr"])


def convolutions(dtype):
    torch.manual_seed(2)
    made = torch.nn.Sequential(
        torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(16 * 9, 32), torch.nn.Linear(32, 5)
    )
    return made.to(dtype).to(memory_format=torch.channels_last)


def loss_of_images(trained, seed):
    inputs = torch.randn(4, 16, 3, 3, generator=torch.Generator().manual_seed(seed))
    return trained(inputs.to(trained[0].weight.dtype)).square().mean()


def same(one, other):
    if isinstance(one, Quantised):
        assert isinstance(other, Quantised)
        assert one.block == other.block
        return same_bits(one.codes, other.codes) and same_bits(one.scale, other.scale)
    return same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("anew", [False, True])
def test_quantised_state_has_the_same_bits_after_resume_and_checkpoint(tmp_path, dtype, anew):
    plain, trained = convolutions(dtype), convolutions(dtype)
    reference, optimizer = (QuantisedMomentum(of.parameters(), anew=anew) for of in (plain, trained))
    chains.train(plain, reference, range(8), loss_of_images)
    chains.train(trained, optimizer, range(2), loss_of_images)
    for begin, options in (
        (2, {"storage": tmp_path / "store"}),
        (4, {"storage": tmp_path / "store", "existing": "resume"}),
        (6, {"storage": tmp_path / "other", "checkpoint": tmp_path / "saved"}),
    ):
        if begin > 2:
            trained = convolutions(dtype)
            optimizer = QuantisedMomentum(trained.parameters(), anew=anew)
        trained, optimizer = memascend.offload(trained, optimizer, master_dtype=None, **options)
        chains.train(trained, optimizer, range(begin, begin + 2), loss_of_images)
        optimizer.save(tmp_path / "saved")
        if begin < 6:
            optimizer.close()
    with optimizer:
        for parameter, twin in zip(trained.parameters(), plain.parameters(), strict=True):
            state = optimizer.state_of(parameter)
            state.pop("master")
            assert state.keys() == reference.state[twin].keys()
            assert all(same(state[name], reference.state[twin][name]) for name in state)
        require_same(plain, trained)
