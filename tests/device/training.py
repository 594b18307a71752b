"""Trains one case with the model on a device, with state on the host and offloaded; compares bits.

The model computes with the same kernels in both, and the update is the CPU's in both, so nothing may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from parity.harness import BUDGETS_MAX, differences, nothing, play
from parity.reference import Reference
from torch.utils._pytree import tree_map

import memascend


class OnHost(Reference):
    """All state on the host, and copies of the parameters there, which are updated and copied back."""

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
        # Else what a test made on the device by default would be made there by the CPU's code, too.
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
    """The case with its batches and its loop on a device."""

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
    """What the case leaves on a device, in host memory."""
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
    """With the smallest budgets that work, found as a user finds them; options in `ram_tier` keep all state in RAM."""
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

    # The first step may show that it needs what no plan could know.
    for _ in range(BUDGETS_MAX):
        try:
            return played(case, device, take, read)
        except memascend.BudgetError as error:
            budgets["device_memory"] = error.smallest
        finally:
            for _, optimizer in taken:
                optimizer.close()
    raise AssertionError("the budget was still too small")


def check(case, device, gradients, folder, ram_tier=None):
    lines = differences(reference(case, device), offloaded(case, device, gradients, folder, ram_tier))
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:20])
