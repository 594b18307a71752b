"""Tests options and attributes that steps change for all parameters alike: streamed, committed, resumed, dropped."""

import copy
import json

import pytest
import torch
from support.bits import same_states
from support.chains import chain, loss_of, step, values

import memascend
from memascend.checkpoint.reader import FOLDER, MANIFEST
from memascend.optim.rules import Arithmetic


class Counted(torch.optim.Optimizer):
    """Adam-like, with a count in each group, an attribute that its first step sets, and a tensor that decays."""

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
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 / group["k"])
                size = group["lr"] * (1 + group["heat"]) * (1 + group["weight"].item())
                parameter.sub_(state["mean"].sign(), alpha=size)


class ScheduleFree(torch.optim.Optimizer):
    """What schedule-free optimizers do to their parameters between training and evaluation."""

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
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
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
        # A whole group has no gradient.
        for parameter in optimizer.param_groups[1]["params"]:
            parameter.requires_grad_(index not in without)
        step(trained, optimizer, index)


def begun(storage, kind=Counted, dtype=torch.float32, **options):
    """A run, and the original of its optimizer."""
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
def test_counters_of_groups_and_attributes_stream_and_are_resumed(tmp_path, gradients):
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


def test_a_resume_that_fails_leaves_the_options(tmp_path, monkeypatch):
    trained, optimizer, _ = begun(tmp_path / "store")
    train(trained, optimizer, range(2))
    optimizer.close()
    again = chain(4, bias=True)
    original = Counted(groups(again))
    monkeypatch.setattr(Arithmetic, "restore", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memascend.offload(again, original, storage=tmp_path / "store", existing="resume")
    assert all(map(same_options, Counted(groups(again)).param_groups, original.param_groups))


def test_a_checkpoint_has_them_too(tmp_path):
    expected, _ = in_memory(range(5))
    trained, optimizer, _ = begun(tmp_path / "one")
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    assert json.loads((tmp_path / "saved" / FOLDER / MANIFEST).read_text())["attributes"]["begun"] is True
    other, optimizer, original = begun(tmp_path / "two", checkpoint=tmp_path / "saved")
    assert original.begun is True
    optimizer.close()
    # What the checkpoint gave stands in the first commit, too.
    other, optimizer, original = begun(tmp_path / "two", existing="resume")
    assert original.begun is True
    train(other, optimizer, range(3, 5))
    assert same_states(values(other), expected)
    optimizer.close()


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_what_is_discarded_leaves_them_as_they_were(tmp_path, gradients):
    trained, optimizer, _ = begun(tmp_path / "store", gradients=gradients)
    train(trained, optimizer, range(2))
    before = [copy.deepcopy({**group, "params": None}) for group in optimizer.param_groups]
    loss_of(trained).backward()
    optimizer.zero_grad()
    assert all(map(same_options, before, optimizer.param_groups))
    # A step that cannot be committed.
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


def test_an_overflow_leaves_them_as_they_were(tmp_path):
    trained, optimizer, _ = begun(tmp_path / "store", dtype=torch.float16, loss_scale="dynamic")
    optimizer.backward(trained(torch.full((2, 32), 1e4, dtype=torch.float16)).square().mean())
    optimizer.step()
    assert optimizer.overflowed
    assert all("k" not in group for group in optimizer.param_groups)
    optimizer.close()


class EverSlower(Counted):
    """Its later steps look at gradients."""

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


# The class, its gradients, and the error of its ninth step.
LATE = [
    (EverSlower, "auto", memascend.UsageError, "EverSlower changed the option 'lr' of a group in another way"),
    (Listing, "ssd", memascend.MemascendError, "Listing changed its attribute 'seen' to a set"),
]


@pytest.mark.parametrize(("kind", "gradients", "error", "says"), LATE)
def test_an_end_that_cannot_be_committed_late_ends_the_step_by_name(tmp_path, kind, gradients, error, says):
    trained, optimizer, _ = begun(tmp_path / "store", kind, gradients=gradients)
    train(trained, optimizer, range(8))
    with pytest.raises(error, match=says):
        train(trained, optimizer, range(8, 9))
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.steps == 8
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_train_and_eval_work_on_streamed_values(tmp_path, dtype):
    plain = chain(4, bias=True, dtype=dtype)
    reference = ScheduleFree(groups(plain))
    for epoch in range(2):
        # The evaluation's values are the committed ones.
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
