"""Tests optimizers that hold parameters, models or optimizers: offload() accepts only known wrappers."""

import copy
import functools
import operator
import weakref

import pytest
import torch
from support.bits import same_bits
from support.by_parameter import ByParameter
from support.chains import require_same, require_same_training, twins

import memascend


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, like the `Lookahead` classes of timm and pytorch_optimizer."""

    def __init__(self, inner):
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = {}

    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(100.0)


class Delegating(torch.optim.Optimizer):
    """Wraps an optimizer, and shows the groups and the state of the wrapped optimizer."""

    def __init__(self, inner):
        self.inner = [inner]
        self.defaults = inner.defaults

    param_groups = property(lambda self: self.inner[0].param_groups, lambda self, groups: None)
    state = property(lambda self: self.inner[0].state, lambda self, state: None)

    def step(self, closure=None):
        self.inner[0].step()


class Holding(torch.optim.SGD):
    """Holds an object of the user. A step could change this object, so a trial must not run a step."""

    def __init__(self, parameters, held):
        super().__init__(parameters, lr=0.1)
        self.held = held

    @torch.no_grad()
    def step(self, closure=None):
        raise AssertionError("a trial ran a step on the user's object")


class Helper:
    def __init__(self, held):
        self.held = held


HOLDERS = {
    "directly": lambda held: held,
    "list": lambda held: [{"deep": (held,)}],
    "object": Helper,
    "closure": lambda held: lambda: held,
    "partial": lambda held: functools.partial(print, held),
    "method": lambda held: Helper(held).__init__,
    "weakly": weakref.ref,
    "key": lambda held: {held: 1},
}


@pytest.mark.parametrize("how", HOLDERS)
@pytest.mark.parametrize("what", ["parameter", "view", "model", "optimizer"])
def test_attribute_holding_a_parameter_model_or_optimizer_is_rejected(tmp_path, how, what):
    model = torch.nn.Linear(4, 4)
    held = {
        "parameter": model.weight,
        "view": model.weight.detach()[1:],
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }[what]
    optimizer = Holding(model.parameters(), HOLDERS[how](held))
    words = {"parameter": "a parameter", "view": "a parameter", "model": "a model", "optimizer": "another optimizer"}
    with pytest.raises(memascend.ConfigError, match=f"Holding cannot run.*its attribute 'held' holds {words[what]}"):
        memascend.offload(model, optimizer, storage=tmp_path / "store")


@pytest.mark.parametrize("kind", [Lookahead, Delegating])
@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_unknown_wrapper_is_rejected_and_its_optimizer_unchanged(tmp_path, kind, inner):
    model = torch.nn.Linear(4, 4)
    base = inner(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    base.step()

    def tensors():
        states = [value for state in base.state.values() for value in state.values() if value is not None]
        return [*model.state_dict().values(), *(p.grad for p in model.parameters()), *states]

    before, groups = copy.deepcopy(tensors()), base.state_dict()["param_groups"]
    words = f"{kind.__name__} cannot run.*optimizer.*pass that optimizer to offload\\(\\)"
    with pytest.raises(memascend.ConfigError, match=words):
        memascend.offload(model, kind(base), storage=tmp_path / "store")
    assert all(map(same_bits, before, tensors()))
    assert all(map(operator.is_, base.param_groups[0]["params"], model.parameters()))
    assert base.state_dict()["param_groups"] == groups
    assert not (tmp_path / "store").exists()


class OwnMethod(ByParameter):
    """An optimizer whose attribute `one` is its bound method `_one`."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.one = self._one

    def _one(self, group, parameter, state):
        state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
        parameter.sub_(state["sum"], alpha=self.param_groups[0]["lr"])


def test_optimizer_with_its_own_bound_method_trains_as_in_torch(tmp_path):
    require_same_training(*twins(tmp_path, kind=lambda parameters, **_: OwnMethod(parameters)))


def accelerated(inner, *, scaler=None, steps=1):
    """Returns an object with the class name and the fields of accelerate's `AcceleratedOptimizer`."""

    def step(self, closure=None):
        self.optimizer.step(closure)

    names = {
        "__module__": "accelerate.optimizer",
        "__init__": lambda self: None,
        "param_groups": property(lambda self: self.optimizer.param_groups, lambda self, groups: None),
        "state": property(lambda self: self.optimizer.state, lambda self, state: None),
        "step": step,
    }
    made = type("AcceleratedOptimizer", (torch.optim.Optimizer,), names)()
    made.optimizer, made.scaler = inner, scaler
    made.gradient_state = type("GradientState", (), {"num_steps": steps})()
    return made


class SingleDeviceStrategy:
    """Calls the optimizer's step, like Fabric's strategy for a single device."""

    def __init__(self, **precision):
        self.precision = type("MixedPrecision", (), precision)()

    def optimizer_step(self, optimizer, closure=None):
        return optimizer.step(closure) if closure else optimizer.step()


class OfFabric:
    """Simulates Fabric's wrapper, with the wrapper's class name and module.

    The class of the wrapper also derives from the wrapped optimizer's class.
    """

    def __init__(self, optimizer, strategy):
        self._optimizer, self._strategy = optimizer, strategy
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._strategy.optimizer_step(self._optimizer, closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


OfFabric.__module__, OfFabric.__name__ = "lightning.fabric.wrappers", "_FabricOptimizer"


@pytest.mark.parametrize(
    ("attribute", "wrapped"),
    [("optimizer", accelerated), ("_optimizer", lambda inner: OfFabric(inner, SingleDeviceStrategy()))],
)
def test_offload_rewraps_accelerate_and_fabric_optimizers(tmp_path, attribute, wrapped):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    twin = copy.deepcopy(model)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    wrapper = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model, optimizer = memascend.offload(model, wrapper, storage=tmp_path / "store")
    assert isinstance(optimizer, memascend.OffloadedOptimizer)
    assert vars(wrapper)[attribute] is optimizer
    for step, by in ((reference, twin), (wrapper, model)):
        for _ in range(2):
            by(torch.ones(2, 4)).square().sum().backward()
            step.step()
            by.zero_grad()
    require_same(twin, model)
    assert optimizer.steps == 2
    optimizer.close()


@pytest.mark.parametrize(
    ("wrapped", "says"),
    [
        (
            lambda inner: accelerated(inner, scaler=object()),
            r"scales gradients.*pass its results to accelerator\.prepare",
        ),
        (
            lambda inner: accelerated(inner, steps=4),
            r"steps only once in 4 backwards.*pass its results to accelerator\.prepare",
        ),
        (
            lambda inner: OfFabric(inner, SingleDeviceStrategy(scaler=object())),
            r"scales gradients.*pass its results to fabric\.setup\(\)",
        ),
        (
            lambda inner: OfFabric(inner, type("ShardedStrategy", (SingleDeviceStrategy,), {})()),
            r"by its ShardedStrategy.*pass its results to fabric\.setup\(\)",
        ),
    ],
)
def test_wrapper_that_scales_accumulates_or_shards_is_rejected(tmp_path, wrapped, says):
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = wrapped(inner)
    # offload() also examines the wrappers in a list of optimizers.
    for given in (wrapper, [wrapper]):
        with pytest.raises(memascend.ConfigError, match=says):
            memascend.offload(model, given, storage=tmp_path / "store")
    assert vars(wrapper).get("optimizer", vars(wrapper).get("_optimizer")) is inner
