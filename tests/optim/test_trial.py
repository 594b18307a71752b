"""Tests which optimizers stream and which are rejected, that a trial changes nothing, and single updates."""

import copy
import functools
import random
import re

import pytest
import torch
from optim.conftest import Streamed, layout_of, update_of
from support.bits import same_bits
from support.by_parameter import ByParameter

from memascend.errors import ConfigError, UsageError
from memascend.optim import generic
from memascend.optim.rules import Arithmetic, EngineRule
from memascend.optim.state import StateFormats
from memascend.optim.trial import elementwise, require_streamable


class Plain(ByParameter):
    """Gradient descent, as a base class. The argument `rate` sets the option `lr`."""

    def __init__(self, rate, groups, **options):
        super().__init__(groups, {"lr": rate, **options})

    def one(self, group, parameter, state):
        parameter.sub_(parameter.grad, alpha=group["lr"])


class Momentum(Plain):
    def one(self, group, parameter, state):
        if not state:
            state["count"] = 0
            state["buffer"] = torch.zeros_like(parameter)
        state["count"] += 1
        state["buffer"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(state["buffer"], alpha=group["lr"] / state["count"])


class Remembering(Plain):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = []

    def step(self, closure=None):
        super().step()
        self.seen.append(object())


class CountingUpdates(Plain):
    """Adds one to `count` for each parameter that has a gradient. No update reads `count`.

    A step of one parameter alone adds one. A step of all parameters adds more.
    """

    count = 0

    def one(self, group, parameter, state):
        self.count += 1


class Passing(Plain):
    """Writes the tensor `passed` in each update, and also reads it.

    With `reads_first`, an update reads the number that an earlier update wrote. Otherwise it reads the number that it
    has just written.
    """

    def __init__(self, rate, groups, *, reads_first=False):
        super().__init__(rate, groups)
        self.passed, self.reads_first = torch.tensor(0.0), reads_first

    def one(self, group, parameter, state):
        before = self.passed.clone()
        self.passed.fill_(group["lr"] * parameter.grad.norm())
        parameter.sub_(parameter.grad * (before if self.reads_first else self.passed))


class OwnDraw(Plain):
    """Draws random numbers only for the parameter that has 20 rows."""

    def one(self, group, parameter, state):
        state["mask"] = torch.zeros_like(parameter)
        if parameter.shape[0] == 20:
            state["mask"] = torch.rand_like(parameter)


class Clipping(Plain):
    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad / norm, alpha=group["lr"])


class Closing(Plain):
    def step(self, closure):
        closure()


class Late(Plain):
    def one(self, group, parameter, state):
        state["count"] = state.get("count", 0) + 1
        if state["count"] > 1:
            state["late"] = torch.zeros_like(parameter)


class ByValue(Plain):
    def one(self, group, parameter, state):
        state["scale"] = parameter.norm()
        if state["scale"] == 0:
            state["scale"] = 0.01


class ByPath(Plain):
    """Stores a Python number in its state if the option `foreach` is None, and a tensor otherwise."""

    def __init__(self, rate, groups):
        super().__init__(rate, groups, foreach=None)

    def one(self, group, parameter, state):
        state["norm"] = 0.5 if group["foreach"] is None else parameter.norm()


class Opaque(torch.Tensor):
    """A tensor subclass without `__tensor_flatten__`, so memascend cannot divide it into parts."""


def own(one):
    """Returns a subclass of `Plain` whose step calls `one` for each parameter."""
    return type("Own", (Plain,), {"one": one})


def made(kind):
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in [(9, 4), (3,), (20, 2)]]
    return kind(0.1, [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}])


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Remembering, "its attribute 'seen'"),
        (
            own(lambda self, *_: vars(self).update(seen={1})),
            "attribute 'seen' to a value that is neither a number nor text",
        ),
        (CountingUpdates, "its attribute 'count' depending on how many parameters have a gradient"),
        (functools.partial(Passing, reads_first=True), "depends on other parameters"),
        (
            own(lambda _, group, parameter, __: group.update(seen=parameter.grad.norm().item())),
            "the option 'seen' of a group to values that differ between parameters",
        ),
        (own(lambda *_: random.random()), "random numbers"),
        (own(lambda self, *_: self.state["all"].update(count=1)), "state that belongs to no parameter"),
        (Clipping, "depends on other parameters"),
        (own(lambda _, __, parameter, ___: parameter.add_(torch.randn_like(parameter))), "random numbers"),
        (Closing, "missing 1 required positional argument: 'closure'"),
    ],
)
def test_optimizer_that_cannot_stream_is_rejected_and_unchanged(kind, says):
    optimizer = made(kind)
    attributes = copy.deepcopy({name: value for name, value in vars(optimizer).items() if name != "param_groups"})
    before = copy.deepcopy(optimizer.param_groups)
    drawn = torch.random.get_rng_state()
    python_drawn = random.getstate()
    with pytest.raises(
        ConfigError, match=f"{type(optimizer).__name__} cannot run on streamed state.*{re.escape(says)}"
    ):
        require_streamable(optimizer)
    assert {name: value for name, value in vars(optimizer).items() if name != "param_groups"} == attributes
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert group.keys() == old.keys()
        assert all(map(torch.equal, group["params"], old["params"]))
        assert all(parameter.grad is None for parameter in group["params"])
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert random.getstate() == python_drawn


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (own(lambda _, __, parameter, state: state.update(last=[parameter.grad.clone()])), "keeps a list as 'last'"),
        (
            own(lambda _, __, parameter, state: state.update(last=parameter.grad.to_sparse())),
            "keeps a sparse tensor as 'last'",
        ),
        (
            own(lambda _, __, parameter, state: state.update(seen=torch.zeros_like(parameter).as_subclass(Opaque))),
            "Own keeps a Opaque as 'seen'",
        ),
        (Late, "other state after step 2 than after step 1"),
        (OwnDraw, "draws random numbers"),
        (ByValue, "keeps 'scale' as another kind of value where the parameter is zero"),
        (own(lambda _, __, parameter, state: state.update(master=parameter.clone())), "under 'master'"),
        (Closing, "could not find out"),
    ],
)
def test_state_that_cannot_be_stored_is_refused(kind, says):
    optimizer = made(kind)
    with pytest.raises(ConfigError, match=says):
        layout_of(optimizer, optimizer.param_groups[1]["params"][0])
    assert not optimizer.state


def test_tensor_written_before_each_read_is_scratch_and_not_state():
    changes, manner = require_streamable(made(Passing))
    assert (changes, manner.scratch) == ({}, {"passed"})


def test_lbfgs_non_optimizers_and_complex_parameters_are_rejected():
    parameter = torch.nn.Parameter(torch.zeros(3))

    class Mine(torch.optim.LBFGS):
        pass

    for kind in (torch.optim.LBFGS, Mine):
        with pytest.raises(ConfigError, match="evaluates the model several times"):
            require_streamable(kind([parameter]))
    with pytest.raises(ConfigError, match="not a dict"):
        require_streamable({})
    whole = torch.optim.SGD([torch.zeros(3, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(ConfigError, match="complex64"):
        require_streamable(whole)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_capturable_and_differentiable_are_rejected_by_name(option):
    for kind in (torch.optim.AdamW, torch.optim.NAdam):
        optimizer = kind([torch.nn.Parameter(torch.zeros(3))], **{option: True})
        with pytest.raises(ConfigError, match=f"{option}=True is rejected"):
            require_streamable(optimizer)


@pytest.mark.parametrize("kind", [Plain, Momentum])
def test_user_optimizers_under_a_scheduler_get_whole_parameters(kind):
    optimizer = made(kind)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    require_streamable(optimizer)
    kept = layout_of(optimizer, optimizer.param_groups[0]["params"][0])
    assert kept.whole
    assert not elementwise(optimizer)
    assert not optimizer.state


def test_layout_follows_the_group_options_in_force():
    optimizer = made(ByPath)
    layout = layout_of(optimizer, optimizer.param_groups[0]["params"][0])
    assert layout.numbers == {"norm": float}


def test_layout_of_meta_parameters_has_shapes_and_byte_counts():
    parameter = torch.nn.Parameter(torch.empty(7, 300, 5, dtype=torch.bfloat16, device="meta"))
    kept = layout_of(torch.optim.Adafactor([parameter]), parameter)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in kept.tensors.items()}
    assert shapes == {
        "master": ((7, 300, 5), torch.float32),
        "step": ((), torch.float32),
        "row_var": ((7, 300, 1), torch.float32),
        "col_var": ((7, 1, 5), torch.float32),
    }
    assert all(tensor.is_meta for tensor in kept.tensors.values())
    # `whole_bytes` is the sum of: values and gradient; master weights, and the gradient in the dtype of the master
    # weights; the factors of rows and columns; the step.
    assert kept.whole_bytes == 10_500 * (2 + 2 + 4 + 4) + 4 * (2100 + 35) + 4
    assert kept.stored_bytes == kept.whole_bytes - 42_000
    without = layout_of(torch.optim.Adafactor([parameter]), parameter, None)
    assert without.whole_bytes == 10_500 * (2 + 2) + 2 * (2100 + 35) + 4
    adagrad = torch.optim.Adagrad([parameter])
    assert generic.import_state(adagrad, parameter, layout_of(adagrad, parameter)) == ({}, 0)


# --- single updates: their state, options and factors, and errors ---------------------------------


def test_layout_keeps_extra_state_and_import_rejects_missing_state():
    parameter = torch.nn.Parameter(torch.randn(30))
    optimizer = torch.optim.Adam([parameter], amsgrad=True)
    parameter.grad = torch.randn(30)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False
    assert "max_exp_avg_sq" in layout_of(optimizer, parameter).tensors
    optimizer.state[parameter].pop("max_exp_avg_sq")
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigError, match="no 'max_exp_avg_sq'"):
        generic.import_state(optimizer, parameter, layout_of(optimizer, parameter))


def test_step_rejects_a_momentum_change_that_changes_its_state():
    parameter = torch.nn.Parameter(torch.randn(30))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]
    streamed = Streamed(optimizer, parameter, None)
    group["momentum"] = 0
    with pytest.raises(UsageError, match="momentum"):
        streamed.step(optimizer, group, torch.ones(30))
    group["momentum"] = 0.9
    streamed.step(optimizer, group, torch.ones(30))
    group["momentum"] = 0
    streamed.step(optimizer, group, torch.ones(30))
    assert torch.equal(streamed.state["momentum_buffer"], torch.ones(30))
    plain = torch.optim.SGD([parameter], lr=0.1)
    streamed = Streamed(plain, parameter, None)
    streamed.step(plain, plain.param_groups[0], torch.ones(30))
    plain.param_groups[0]["momentum"] = 0.9
    with pytest.raises(UsageError, match="momentum_buffer"):
        streamed.step(plain, plain.param_groups[0], torch.ones(30))


def test_update_uses_the_options_from_when_it_was_created():
    lr = torch.tensor(0.5)
    parameter = torch.nn.Parameter(torch.zeros(5000))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    streamed = Streamed(optimizer, parameter, None)
    function = update_of(optimizer, optimizer.param_groups[0], streamed.layout, first=True)
    lr.fill_(100)
    optimizer.param_groups[0]["weight_decay"] = 9
    streamed.apply(function, torch.ones(5000), whole=False)
    assert torch.equal(streamed.values, torch.full((5000,), -0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_round_to_the_gradient_dtype_and_grad_scale_does_not(dtype):
    parameter = torch.nn.Parameter(torch.randn(5000).to(dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    streamed = Streamed(optimizer, parameter, torch.float32)
    gradient = torch.randn(5000).to(dtype)
    factors = (0.3, 1.7)
    scaled = gradient.clone()
    for factor in factors:
        scaled.mul_(factor)
    wanted = (parameter.detach().float() - scaled.float() * 0.77).to(dtype)
    streamed.step(optimizer, optimizer.param_groups[0], gradient, factors=factors, grad_scale=0.77)
    assert same_bits(streamed.values, wanted)


def test_engine_rules_are_used_only_for_adam_and_adamw():
    def options(kind, dtype=torch.bfloat16, master_dtype=torch.float32, **given):
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = kind([parameter], **given)
        rule = Arithmetic(optimizer, master_dtype, frozenset(), StateFormats(), {}).of(parameter)
        return rule.options() if isinstance(rule, EngineRule) else None

    class Mine(torch.optim.AdamW):
        pass

    adamw, adam = torch.optim.AdamW, torch.optim.Adam
    given = {"lr": 0.5, "betas": (0.5, 0.75), "decoupled": True, "maximize": False}
    assert options(adamw, lr=torch.tensor(0.5), betas=(0.5, 0.75)).items() >= given.items()
    assert options(adam, dtype=torch.float32, master_dtype=None, maximize=True)["maximize"] is True
    assert options(adam)["decoupled"] is False
    assert options(adam, decoupled_weight_decay=True)["decoupled"] is True
    assert options(adamw, dtype=torch.float16, master_dtype=None) is None
    assert options(adamw, dtype=torch.float64) is None
    assert options(adamw, amsgrad=True) is None
    assert options(Mine) is None
    assert options(torch.optim.NAdam) is None
