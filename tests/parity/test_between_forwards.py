"""Compares programs that read and write weights between forwards with the same ones on plain torch, bit for bit."""

import copy
import itertools

import pytest
import torch
from parity.reference import threads_of_torch
from support.bits import same_bits, same_states
from support.grids import covered

import memascend

WIDTH = 64
FP32 = torch.float32
MODES = {
    "2-fp32-adamw-fused": (2, FP32, "adamw", "fused"),
    "16-fp32-sgd-ssd": (16, FP32, "sgd", "ssd"),
    "16-bf16-adamw-fused": (16, torch.bfloat16, "adamw", "fused"),
    "2-fp16-adamw-auto": (2, torch.float16, "adamw", "auto"),
}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
}


class Net(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Plain:
    """Plain torch; 16-bit parameters have float32 masters, which follow each write of other bits."""

    def __init__(self, parameters, kind):
        self.parameters = list(parameters)
        self.masters = self.parameters
        if self.parameters[0].dtype != FP32:
            self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        self.inner = OPTIMIZERS[kind](self.masters)

    def backward(self, loss):
        loss.backward()

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.parameters, self.masters, strict=True):
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, master in zip(self.parameters, self.masters, strict=True):
            p.copy_(master)

    def write(self, parameters, values):
        for p, value in zip(parameters, values, strict=True):
            if not same_bits(p, value):
                p.copy_(value)
                self.masters[next(i for i, own in enumerate(self.parameters) if own is p)].copy_(value)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    def state_of(self, p):
        return self.inner.state[self.masters[next(i for i, own in enumerate(self.parameters) if own is p)]]


class Run:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.losses = []

    def loss(self, seed=0):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = self.model(x.to(next(self.model.parameters()).dtype)).float().square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def step(self, seed=0):
        self.optimizer.backward(self.loss(seed))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outcome(self):
        kept = ("exp_avg", "exp_avg_sq", "momentum_buffer")
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            state = self.optimizer.state_of(p)
            found |= {f"{name}: {of}": state[of].reshape(-1).clone() for of in kept if of in state}
        return found | {f"loss {index}": loss for index, loss in enumerate(self.losses)}


@torch.no_grad()
def write(run, parameters, values):
    """Write values to parameters: through the door, where there is one."""
    if isinstance(run.optimizer, memascend.OffloadedOptimizer):
        with run.optimizer.edit(parameters) as real:
            torch._foreach_copy_(real, values)
    else:
        run.optimizer.write(parameters, values)


def compared(program, tmp_path, blocks, dtype, kind, gradients, **held):
    """Runs a program on plain torch and offloaded, and holds losses, weights and state against each other."""
    with threads_of_torch(1):
        model = Net(blocks).to(dtype)
        run = Run(model, Plain(model.parameters(), kind))
        program(run)
        expected = run.outcome()
        model = Net(blocks).to(dtype)
        options = {"gradients": gradients, **({"loss_scale": 1.0} if dtype == torch.float16 else {}), **held}
        original = OPTIMIZERS[kind](model.parameters())
        run = Run(*memascend.offload(model, original, storage=tmp_path / "run.store", **options))
        with run.optimizer:
            assert bool(run.optimizer.plan.ram_tier) == bool(held)
            program(run)
            got = run.outcome()
    if not same_states(expected, got):
        names = [name for name in expected if name not in got or not same_bits(expected[name], got[name])]
        pytest.fail(f"{len(names)} of {len(expected)} differ: {names[:3]}")


def ema_swap(run):
    averages = [p.detach().clone() for p in run.model.parameters()]
    for seed in range(2):
        run.step(seed)
        for average, p in zip(averages, run.model.parameters(), strict=True):
            average.lerp_(p.detach(), 0.1)
    kept = [p.detach().clone() for p in run.model.parameters()]
    for values in (averages, kept):
        write(run, list(run.model.parameters()), values)
        run.loss(7)
    run.step(3)


def vector(run):
    run.step(0)
    parameters = list(run.model.parameters())
    values = torch.nn.utils.parameters_to_vector(parameters) * 0.5
    parts = values.detach().split([p.numel() for p in parameters])
    write(run, parameters, [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)])
    run.loss(5)
    run.step(1)


def one_weight(run):
    """One weight after a step, and another before the one after."""
    for number in range(2):
        run.step(number)
        weight = run.model.layers[1 - number].weight
        values = weight.detach().clone()
        values[number:] *= 0.5
        write(run, [weight], [values])
        run.loss(7)
    run.step(2)


def rewound(run):
    first = copy.deepcopy(run.model.state_dict())
    run.step(0)
    run.step(1)
    if isinstance(run.optimizer, Plain):
        write(run, list(run.model.parameters()), list(first.values()))
    else:
        run.model.load_state_dict(first)
    run.loss(1)
    run.step(2)


def frozen(run):
    weight = run.model.layers[0].weight
    weight.requires_grad_(False)
    run.step(0)
    write(run, [weight], [weight.detach() * 0.5])
    run.loss(4)
    run.step(1)
    # Plain torch has state of what it never updated no more than we do.
    weight.requires_grad_(True)
    run.step(2)


def discarded(run):
    run.step(0)
    weight = run.model.layers[0].weight
    write(run, [weight], [weight.detach() * 0.5])
    run.optimizer.backward(run.loss(1))
    run.optimizer.zero_grad()
    run.loss(1)
    run.step(1)


def clipped_weights(run):
    for seed in range(3):
        run.step(seed)
        parameters = list(run.model.parameters())
        write(run, parameters, [p.detach().clamp(-0.1, 0.1) for p in parameters])


def penalised(run):
    """A loss with weights in it, which are read as they are and as views."""
    run.step(0)
    first, second = run.model.layers[0].weight, run.model.layers[1].weight
    for seed in range(1, 3):
        penalty = first.float().square().sum() + (first @ second.t()).float().abs().sum()
        penalty = penalty + second.view(-1).float().norm()
        run.optimizer.backward(run.loss(seed) + 1e-3 * penalty)
        run.optimizer.step()
        run.optimizer.zero_grad()
        write(run, [first], [first.detach() * 0.5])


PROGRAMS = {
    program.__name__: program
    for program in (ema_swap, vector, one_weight, rewound, frozen, discarded, clipped_weights, penalised)
}


@pytest.mark.parametrize(("mode", "program"), covered(MODES, PROGRAMS))
def test_a_program_of_users(tmp_path, program, mode):
    compared(PROGRAMS[program], tmp_path, *MODES[mode])


def held():
    """All of these where all state is in RAM; of what says the same in most of it, two in the fast set."""
    for mode, durability, name in itertools.product(MODES, ("none", "step"), PROGRAMS):
        fast = mode == "16-bf16-adamw-fused" and (name, durability) in (("one_weight", "none"), ("ema_swap", "step"))
        marks = [] if fast else [pytest.mark.slow]
        yield pytest.param(PROGRAMS[name], durability, mode, id=f"{name}-{durability}-{mode}", marks=marks)


@pytest.mark.parametrize(("program", "durability", "mode"), list(held()))
def test_in_ram_parameters_are_written_to_likewise(tmp_path, program, durability, mode):
    compared(program, tmp_path, *MODES[mode], host_memory="64MiB", durability=durability)
