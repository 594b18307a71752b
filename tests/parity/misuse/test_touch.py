"""Tests access to offloaded parameters: reads that work, and calls that raise instead of giving wrong values."""

import ctypes
import itertools
import pickle
import re

import pytest
import torch
from parity.machine_calls import WRITES
from parity.zoo_plain import VOCABULARY, Stack
from torch import nn

from memascend import UsageError


@pytest.fixture
def training(offloaded):
    return offloaded(steps=1)


@pytest.fixture
def weight(training):
    return training.model.blocks[1].up.weight


# Calls on a parameter that must raise. `tests/params/test_reads.py` tests reads, which return copies, and
# `tests/params/test_doors.py` tests writes.
TOUCHES = {
    "another shape": lambda p: setattr(p, "data", torch.zeros(3)),
    "another dtype": lambda p: setattr(p, "data", torch.zeros(p.shape, dtype=torch.float64)),
    "t_": torch.no_grad()(lambda p: p.t_()),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "set_": lambda p: p.set_(torch.zeros(1)),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "to device": lambda p: p.to("meta"),
    "share_memory": lambda p: p.share_memory_(),
    "resize": lambda p: p.resize_(1),
}
MODEL_TOUCHES = {
    "pickle": pickle.dumps,
    "half": lambda model: model.half(),
    "meta": lambda model: model.to("meta"),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unsupported_parameter_and_model_calls_raise_and_change_nothing(training, weight):
    for touch in TOUCHES.values():
        with training.keeps_weights(), pytest.raises(UsageError, match=r"blocks\.1\.up\.weight"):
            touch(weight)
    for touch in MODEL_TOUCHES.values():
        with training.keeps_weights(), pytest.raises(UsageError):
            touch(training.model)
    training.step(1)
    assert training.optimizer.steps == 2


@pytest.mark.parametrize("first", [True, False])
def test_swap_tensors_with_an_offloaded_parameter_is_rejected(training, weight, first):
    other = nn.Parameter(torch.zeros(weight.shape))
    with training.keeps_weights(), pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(*((weight, other) if first else (other, weight)))
    assert type(other) is nn.Parameter
    training.step(1)


def test_reads_that_bypass_torch_function_raise(training, weight):
    """A call that torch does not dispatch to the parameter's class raises an error, instead of returning NaN."""
    output = re.escape(f"a parameter of {list(weight.shape)} float32 are on storage")
    with pytest.raises(RuntimeError, match=output):
        torch.utils.dlpack.to_dlpack(weight)
    with torch._C.DisableTorchFunctionSubclass():
        for read in (weight.norm, weight.tolist, lambda: weight + 1):
            with pytest.raises(RuntimeError, match=output):
                read()
    training.step(1)


def test_shape_dtype_and_repr_do_not_materialize_the_values(training, weight, monkeypatch):
    def reads(*_):
        raise AssertionError("this call must not materialize the values")

    monkeypatch.setattr(training.optimizer._session.run.residency, "materialize", reads)
    assert weight.shape == (64, 32)
    assert weight.stride() == (32, 1)
    assert (weight.numel(), weight.dim(), weight.dtype) == (2048, 2, torch.float32)
    assert (weight.is_contiguous(), weight.requires_grad, weight.is_leaf) == (True, True, True)
    assert weight.device == torch.device("cpu")
    assert weight.element_size() == 4
    assert isinstance(weight, nn.Parameter)
    assert {weight: 1}[weight] == 1
    assert sum(p.numel() for p in training.model.parameters()) == sum(p.numel() for p in Stack().parameters())
    assert "up" in repr(training.model)


def test_moving_a_model_to_its_own_device_and_dtype_does_nothing(training, weight):
    assert training.model.to("cpu") is training.model
    assert training.model.cpu() is training.model
    assert training.model.float() is training.model
    weight.data = weight
    assert weight.to("cpu") is weight
    training.step(1)


MEMORY = {**WRITES, "memory": lambda weight: weight.untyped_storage().fill_(1)}


@pytest.mark.parametrize(
    ("way", "when", "budget"),
    [
        *itertools.product(
            ["in place", "data", "numpy", "dlpack", "memory"], ["register_forward_pre_hook"], ["64MiB", "smallest"]
        ),
        # These writes come after the forward or the backward of the module, when the model no longer computes with the
        # weight.
        *itertools.product(
            ["detach", "numpy", "dlpack", "view"], ["register_forward_hook", "register_full_backward_hook"], [None]
        ),
    ],
)
def test_step_rejects_a_weight_written_within_forward_or_backward(offloaded, way, when, budget):
    training = offloaded(steps=1, host_memory=budget, gradients="auto" if budget else "ssd")
    expected = training.loss(1).detach()
    write = MEMORY[way]
    with training.keeps_weights():
        with getattr(training.model.blocks[1].up, when)(lambda module, *_: (write(module.weight), None)[1]):
            training.loss(1).backward()
        with pytest.raises(UsageError, match=r"blocks\.1\.up\.weight.* (was|were) written to .*optimizer\.edit"):
            training.optimizer.step()
        training.optimizer.zero_grad()
        assert torch.equal(training.loss(1), expected)
    training.step(1)
    assert training.optimizer.steps == 2


def test_update_rejects_values_written_through_a_raw_address(offloaded):
    training = offloaded(steps=1, host_memory=None, gradients="fused")
    expected = training.loss(1).detach()
    training.optimizer.zero_grad()

    def written(module, _):
        ctypes.c_float.from_address(module.weight.data_ptr()).value = 9.0

    output = r"blocks\.1\.up\.weight.* code may have changed them .*zero_grad\(\).*modify=True"
    with training.model.blocks[1].up.register_forward_pre_hook(written), pytest.raises(UsageError, match=output):
        training.step(1)
    training.optimizer.zero_grad()
    assert torch.equal(training.loss(1), expected)
    training.step(1)
    assert training.optimizer.steps == 2


def test_step_succeeds_after_share_memory_within_a_forward(offloaded):
    training = offloaded(steps=1, host_memory="64MiB")
    expected = training.loss(1).detach()
    with training.model.blocks[1].up.register_forward_pre_hook(lambda up, _: (up.weight.share_memory_(), None)[1]):
        training.step(1)
    assert training.optimizer.steps == 2
    assert not torch.equal(training.loss(1), expected)


def test_data_assignment_within_a_forward_is_rejected(training):
    def replaces(module, *_):
        module.weight.data = module.weight.data * 2

    expected = training.loss(1).detach()
    output = r"blocks\.1\.up\.weight.*given other memory through \.data"
    with training.model.blocks[1].up.register_forward_pre_hook(replaces), pytest.raises(UsageError, match=output):
        training.loss(1)
    assert torch.equal(training.loss(1), expected)
    training.step(1)


# --- transforms of a model --------------------------------------------------------

IDS, EMBEDDING = torch.zeros(1, 5, dtype=torch.long), torch.zeros(VOCABULARY, 32)


TRANSFORMS = {
    "functional_call": lambda model: torch.func.functional_call(model, {"embed.weight": EMBEDDING}, (IDS,)),
    "vmap": lambda model: torch.vmap(model.blocks[0])(torch.ones(3, 4, 32)),
    "jvp": lambda model: torch.func.jvp(model.blocks[0], (torch.ones(4, 32),), (torch.ones(4, 32),)),
    "jit.trace": lambda model: torch.jit.trace(model, IDS),
    "jit.script": torch.jit.script,
    "export": lambda model: torch.export.export(model, (IDS,)),
    "no saved-tensor hooks": torch.autograd.graph.disable_saved_tensors_hooks("not here")(lambda model: model(IDS)),
}


@pytest.mark.filterwarnings("ignore")
def test_torch_func_jit_and_export_of_a_model_are_rejected(training):
    for transform in TRANSFORMS.values():
        with training.keeps_weights(), pytest.raises(UsageError):
            transform(training.model)
    training.step(1)
