"""Trains one case with the model on a device, with state on the host and offloaded; compares bits.

The model computes with the same kernels in both, and the update is the CPU's in both, so nothing may differ.
"""

from __future__ import annotations

import contextlib

import torch
from parity.harness import BUDGETS_MAX, Outcome, Run, copies, differences
from parity.reference import Reference, threads_of_torch
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


def moved(model, device):
    """The model on a device, also where torch cannot keep its parameters when it moves them: tied ones stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(device.type != "cuda")
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def on_cpu(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def play(case, device, take, *, close):
    """Runs the case on a device; `take` makes an optimizer of the model's own."""
    with threads_of_torch(1), contextlib.ExitStack() as stack:
        torch.manual_seed(1)
        model = case.model().to(case.dtype)
        start = copies(model.named_parameters())
        batches = tree_map(
            lambda value: value.to(device) if isinstance(value, torch.Tensor) else value,
            case.batches(torch.Generator().manual_seed(2)),
        )
        model, optimizer, original = take(model)
        stack.callback(close, optimizer)
        run = Run(model, optimizer, original, batches, case.loss)
        torch.manual_seed(3)
        with torch.device(device):
            case.loop(run)
        random = torch.get_rng_state()
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        state = {name: optimizer.state_of(p) for name, p in model.named_parameters() if p in owned}
        for p in model.parameters():
            assert p.device == device
            assert p.grad is None or p.grad.device == device
        values = {name: on_cpu(value) for name, value in model.state_dict().items()}
        weights = {name: values[name].clone() for name, _ in model.named_parameters()}
        buffers = {name: on_cpu(buffer).clone() for name, buffer in model.named_buffers()}
        assert all(buffer.device == device for buffer in model.buffers())
        return Outcome([on_cpu(record) for record in run.records], weights, buffers, state, random, start)


def reference(case, device):
    def take(model):
        model = moved(model, device)
        original = case.optimizer(model)
        return model, OnHost(original, **case.options), original

    outcome = play(case, device, take, close=lambda _: None)
    assert not all(torch.equal(outcome.start[name], outcome.weights[name]) for name in outcome.weights)
    return outcome


def offloaded(case, device, gradients, folder, held=None):
    """With the smallest budgets that work, found as a user would find them; `held` are options that hold all state."""
    budgets = {"host_memory": 1, "device_memory": 1, **(held or {})}

    def take(model):
        original = case.optimizer(model)
        for _ in budgets:
            try:
                return *memascend.offload(
                    model,
                    original,
                    storage=folder / "run.store",
                    existing="replace",
                    gradients=gradients,
                    device=device,
                    **budgets,
                    **case.options,
                ), original
            except memascend.BudgetError as error:
                found = error
                budgets["device_memory" if "device_memory" in str(error) else "host_memory"] = error.smallest
        raise found

    def close(optimizer):
        report = optimizer.report().to_dict()
        assert report["host"]["peak"] <= report["host"]["budget"], report["host"]
        assert report["device"]["peak"] <= report["device"]["budget"], report["device"]
        assert bool(optimizer.plan.ram_tier) == bool(held)
        optimizer.close()

    # What a first step shows that no plan could know.
    for _ in range(BUDGETS_MAX):
        with contextlib.suppress(memascend.BudgetError):
            try:
                return play(case, device, take, close=close)
            except memascend.BudgetError as error:
                budgets["device_memory"] = error.smallest
                raise
    raise AssertionError("the budget was still too small")


def check(case, device, gradients, folder, held=None):
    lines = differences(reference(case, device), offloaded(case, device, gradients, folder, held))
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:20])
