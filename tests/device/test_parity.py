"""Tests training runs of a model on a device: offloaded state must give the same bits as state in host memory.

Both runs compute the model with the same kernels on the device, and the updates on the CPU. So all results must be
equal. If micro-batches run by layer, each backward runs in its own thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib

import pytest
import torch
from parity.harness import BUDGETS_MAX, differences, nothing, play
from parity.reference import Reference
from parity.zoo_loops import BY_LAYER as ALL_BY_LAYER
from parity.zoo_loops import LOOPS, OPTIMIZERS, OTHERS_BY_LAYER
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS
from torch.utils._pytree import tree_map

import memascend


class OnHost(Reference):
    """The reference run: updates copies of the parameters in host memory, and copies the results to the device."""

    def __init__(self, original, **options):
        torch.optim.Optimizer.__init__(self, original.param_groups, original.defaults)
        self.param_groups = original.param_groups
        self.original = original
        self.twins = {p: torch.nn.Parameter(p.detach().cpu()) for group in self.param_groups for p in group["params"]}
        groups = [{**group, "params": [self.twins[p] for p in group["params"]]} for group in self.param_groups]
        self.host = Reference(type(original)(groups), **options)

    def backward(self, loss):
        self.host.backward(loss)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.original._opt_called = True
        for group, twin in zip(self.param_groups, self.host.param_groups, strict=True):
            twin.update({key: value for key, value in group.items() if key != "params"})
        for p, twin in self.twins.items():
            twin.grad = None if p.grad is None else p.grad.cpu()
        # Creates the tensors of the update on the CPU. `on_device` has made the device torch's default device.
        with torch.device("cpu"):
            self.host.step()
        for p, twin in self.twins.items():
            p.copy_(twin)
        return loss

    def state_of(self, p):
        return self.host.state_of(self.twins[p])

    def __getattr__(self, name):
        if name in ("loss_scale", "overflowed", "grad_norm"):
            return getattr(self.host, name)
        raise AttributeError(name)


def on_device(case, device):
    """Returns the case with its batches and its loop on a device."""

    def batches(generator):
        made = case.batches(generator)
        return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, made)

    def loop(run):
        with torch.device(device):
            case.loop(run)
        assert all(buffer.device == device for buffer in run.model.buffers())
        for p in run.model.parameters():
            assert p.device == device
            assert p.grad is None or p.grad.device == device

    return dataclasses.replace(case, batches=batches, loop=loop)


def played(case, device, take, read):
    """Runs the case on a device; returns the outcome in host memory."""
    outcome = play(on_device(case, device), 1, take, read=read)
    records = [value.cpu() if isinstance(value, torch.Tensor) else value for value in outcome.records]
    weights, buffers = ({name: value.cpu() for name, value in of.items()} for of in (outcome.weights, outcome.buffers))
    return dataclasses.replace(outcome, records=records, weights=weights, buffers=buffers)


def reference(case, device):
    def take(model, original):
        return model.to(device), OnHost(original, **case.options)

    outcome = played(case, device, take, nothing)
    assert not all(torch.equal(outcome.start[name], outcome.weights[name]) for name in outcome.weights)
    return outcome


def offloaded(case, device, gradients, folder, ram_tier=None):
    """Runs the case offloaded. If a budget is too small, tries the budget that the error names.

    `ram_tier` has options that keep all state in RAM. None: the run keeps no state in RAM.
    """
    budgets = {"host_memory": 1, "device_memory": 1, **(ram_tier or {})}
    options = {"storage": folder / "run.store", "existing": "replace", "gradients": gradients, "device": device}
    taken = []

    def take(model, original):
        for _ in budgets:
            try:
                taken.append(memascend.offload(model, original, **options, **budgets, **case.options))
                return taken[-1]
            except memascend.BudgetError as error:
                found = error
                budgets["device_memory" if "device_memory" in str(error) else "host_memory"] = error.smallest
        raise found

    @contextlib.contextmanager
    def read(_model, optimizer):
        yield
        report = optimizer.report().to_dict()
        assert report["host"]["peak"] <= report["host"]["budget"], report["host"]
        assert report["device"]["peak"] <= report["device"]["budget"], report["device"]
        assert bool(optimizer.plan.ram_tier) == bool(ram_tier)

    # The first step may need more memory than the plan predicted. Then an error names a larger budget for the next try.
    for _ in range(BUDGETS_MAX):
        try:
            return played(case, device, take, read)
        except memascend.BudgetError as error:
            budgets["device_memory"] = error.smallest
        finally:
            for _, optimizer in taken:
                optimizer.close()
    raise AssertionError(f"{BUDGETS_MAX} budgets were too small, although an error named each budget as one that works")


def check(case, device, gradients, folder, ram_tier=None):
    lines = differences(reference(case, device), offloaded(case, device, gradients, folder, ram_tier))
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:20])


# Cases whose loops name the device "cpu", so they cannot run on another device.
OF_THE_CPU = ("autocast", "grad-scaler", "grad-scaler-clip")
# The cases of `OTHERS_BY_LAYER` that run here. Each case tests a different difficulty.
CHOSEN = (
    *("by-layer-checkpointed", "by-layer-checkpointed-reentrant", "by-layer-idle-experts", "by-layer-t5"),
    *("by-layer-lora", "by-layer-qwen2-tied-bf16", "by-layer-repeated-layers-bf16", "by-layer-frozen"),
)
WHOLE = [case for case in [*LOOPS, *OPTIMIZERS, *PLAIN, *TRANSFORMERS] if case.name not in OF_THE_CPU]
# `OnHost` cannot keep optimizer state in formats of 16 or 8 bits.
BY_LAYER = [case for case in ALL_BY_LAYER if "state" not in case.options]


def cases():
    for case in [*WHOLE, *BY_LAYER, *(case for case in OTHERS_BY_LAYER if case.name in CHOSEN)]:
        for gradients in case.gradients:
            yield pytest.param(case, gradients, None, id=f"{case.name}-{gradients}", marks=case.marks)


def held():
    """Yields each case of `WHOLE` and `BY_LAYER` once, with all state in RAM.

    In `WHOLE`, the mode of gradients and the durability depend on the case's name, so that all modes and durabilities
    are tested. Cases of `BY_LAYER` have their first mode, and durability "step".
    """
    for case in [*WHOLE, *BY_LAYER]:
        turn = zlib.crc32(case.name.encode())
        gradients, durability = case.gradients[turn % len(case.gradients)], ("none", "step")[turn // 4 % 2]
        if case in BY_LAYER:
            gradients, durability = case.gradients[0], "step"
        options = {"host_memory": "1GiB", "durability": durability}
        name = f"{case.name}-{gradients}-{durability}, all state held"
        yield pytest.param(case, gradients, options, id=name, marks=case.marks)


# torch warns that gradients may be slow, because the placeholder of an offloaded parameter has other strides than the
# parameter's values.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
# torch warns that it copies RNN weights into one block of memory. Materialized parameters do not share such a block.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize(("case", "gradients", "options"), [*cases(), *held()])
def test_offloaded_training_has_the_same_bits_as_on_the_device(case, gradients, options, device, tmp_path):
    check(case, device, gradients, tmp_path, options)
