"""Defines optimizers that orthogonalize matrices one at a time, in batches or in stacks, as public packages do."""

import torch
from support.by_parameter import ByParameter


def orthogonal(matrices, steps=5):
    """Orthogonalizes one matrix, or a stack of matrices, by Newton-Schulz iterations in bfloat16."""
    found = matrices.bfloat16()
    tall = matrices.size(-2) > matrices.size(-1)
    found = found.mT if tall else found
    found = found / (found.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = found @ found.mT
        found = 3.4445 * found + (-4.775 * gram + 2.0315 * gram @ gram) @ found
    return found.mT if tall else found


def gradient_of(parameter):
    """Returns the parameter's gradient. If the parameter has no gradient, first sets its gradient to zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def muon_step(parameter, gradient, state, group):
    if not state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    momentum = state["momentum_buffer"]
    momentum.lerp_(gradient, 1 - group["momentum"])
    update = orthogonal(gradient.lerp(momentum, group["momentum"]))
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(update, alpha=-group["lr"] * max(1, parameter.size(-2) / parameter.size(-1)) ** 0.5)


def adam_step(parameter, gradient, state, group):
    if not state:
        state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter), step=0)
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
    state["exp_avg_sq"].lerp_(gradient.square(), 1 - group["betas"][1])
    first = state["exp_avg"] / (1 - group["betas"][0] ** state["step"])
    second = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(first / (second.sqrt() + group["eps"]), alpha=-group["lr"])


class MuonWithAdam(torch.optim.Optimizer):
    """Like KellerJordan's SingleDeviceMuonWithAuxAdam.

    The option `use_muon` selects the rule of a group. A missing gradient counts as zeros.
    """

    def __init__(self, groups):
        common = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10}
        super().__init__(groups, common)

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            rule = muon_step if group["use_muon"] else adam_step
            for parameter in group["params"]:
                rule(parameter, gradient_of(parameter), self.state[parameter], group)


class MuonOfRanks(MuonWithAdam):
    """Like KellerJordan's MuonWithAuxAdam: each rank updates some of the matrices, then gathers all matrices."""

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        for group in self.param_groups:
            params = group["params"]
            if not group["use_muon"]:
                for parameter in params:
                    adam_step(parameter, gradient_of(parameter), self.state[parameter], group)
                continue
            padded = params + [torch.empty_like(params[-1])] * (ranks - len(params) % ranks)
            for base in range(0, len(params), ranks):
                if base + rank < len(params):
                    parameter = params[base + rank]
                    muon_step(parameter, gradient_of(parameter), self.state[parameter], group)
                torch.distributed.all_gather(padded[base : base + ranks], padded[base + rank])


class StackedMuonWithAdam(torch.optim.Optimizer):
    """Like nanochat's MuonAdamW: stacks the matrices of a group and keeps one state for the stack.

    Copies options into scalar tensors.
    """

    def __init__(self, groups):
        super().__init__(groups, {})
        self.rate = torch.tensor(0.0)
        self.decay = torch.tensor(0.0)
        self.count = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            self.rate.fill_(group["lr"])
            self.decay.fill_(group["weight_decay"])
            (self.stacked if group["kind"] == "muon" else self.single)(group)

    def single(self, group):
        for parameter in (p for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state.update(step=0, average=torch.zeros_like(parameter))
            state["step"] += 1
            self.count.fill_(state["step"])
            state["average"].lerp_(parameter.grad, 0.1)
            parameter.mul_(1 - self.rate * self.decay)
            parameter.sub_(self.rate * state["average"] / (1 - 0.9**self.count))

    def stacked(self, group):
        params = group["params"]
        state = self.state[params[0]]
        gradients = torch.stack([parameter.grad for parameter in params])
        if not state:
            state["momentum"] = torch.zeros_like(gradients)
            state["second"] = torch.zeros(len(params), params[0].shape[0], 1)
        state["momentum"].lerp_(gradients, 0.1)
        update = orthogonal(gradients.lerp(state["momentum"], 0.9)).float()
        state["second"].lerp_(update.square().mean(dim=-1, keepdim=True), 0.1)
        update = update * state["second"].clamp_min(1e-10).rsqrt()
        values = torch.stack(params)
        torch._foreach_copy_(params, list((values - self.rate * (update + self.decay * values)).unbind(0)))


class CoupledStack(StackedMuonWithAdam):
    """A stack that divides all gradients by their common norm, so updating one parameter alone gives wrong values."""

    def stacked(self, group):
        norm = torch.stack([parameter.grad for parameter in group["params"]]).norm()
        for parameter in group["params"]:
            parameter.sub_(parameter.grad / norm)


class BatchedMuon(torch.optim.Optimizer):
    """Like the Muon of Dion's package: runs foreach operations on lists of parameters.

    These operations reject an empty list.
    """

    def __init__(self, parameters, lr=0.02, momentum=0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in params:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[parameter]["momentum"] for parameter in params]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, [parameter.grad for parameter in params])
            updates = [orthogonal(momentum).to(momentum.dtype) for momentum in momenta]
            torch._foreach_add_(params, updates, alpha=-group["lr"])


class LowRank(ByParameter):
    """Like the optimizer Dion: the first step draws a random low-rank matrix for each parameter."""

    def __init__(self, parameters, lr=0.02):
        super().__init__(parameters, {"lr": lr})

    def one(self, group, parameter, state):
        if not state:
            state["basis"] = torch.randn(parameter.shape[1], 2)
        state["basis"].copy_(parameter.grad.T @ torch.linalg.qr(parameter.grad @ state["basis"])[0])
        parameter.sub_(parameter.grad @ state["basis"] @ state["basis"].T, alpha=group["lr"])
