"""Defines small models, batches and an optimizer for several ranks.

Trains these models in one of two ways: offloaded on several ranks, or in memory in one process.
"""

import math

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import memascend


class Odd(nn.Module):
    """A model with a frozen block and a tied head.

    Its parameters have 33, 16 or `narrow` rows, so no number of ranks above 1 divides all row counts. `narrow` may be
    smaller than the number of ranks.
    """

    def __init__(self, narrow=3):
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        self.narrow = nn.Sequential(nn.Linear(16, narrow), nn.GELU(), nn.Linear(narrow, 16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.frozen(self.narrow(self.embed(tokens))))

    def __iter__(self):
        return iter((self.narrow, self.frozen))


class Checkpointed(nn.Sequential):
    """A block whose activations the backward recomputes."""

    def forward(self, values):
        return checkpoint(super().forward, values, use_reentrant=False)


def model(dtype, kind="plain"):
    """Returns a seeded model; `kind` is "checkpointed", "odd", a class, or any other text for a plain model."""
    torch.manual_seed(0)
    if kind == "odd" or isinstance(kind, type):
        return (Odd if kind == "odd" else kind)().to(dtype)
    block = Checkpointed if kind == "checkpointed" else nn.Sequential
    blocks = [block(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(32, 16), *blocks, nn.Linear(16, 32)).to(dtype)


def batch(step, micro):
    """Returns the inputs and targets of micro-batch `micro` of step `step`. All ranks get the same tensors."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, 32, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(trained, step, micro):
    inputs, targets = batch(step, micro)
    return nn.functional.cross_entropy(trained(inputs).float().flatten(0, 1), targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def trainable(trained):
    return [parameter for parameter in trained.parameters() if parameter.requires_grad]


def shard(trained, mesh=None):
    """Shards each block that iteration over the model yields, then the model itself; returns the model."""
    for block in (*trained, trained):
        fully_shard(block, mesh=mesh)
    return trained


def sharded(dtype, kind="plain"):
    return shard(model(dtype, kind))


def divide_gradients(trained, by=1.0):
    """Sets the number by which FSDP2 divides gradient sums.

    The default 1 keeps the sums, because a mean over three ranks would be rounded.
    """
    for module in trained.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(by)


def output(call):
    """Returns the class and the text of the MemascendError that `call` raises.

    Returns "" if `call` raises no such error.
    """
    try:
        call()
    except memascend.MemascendError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def offloaded(folder, *, kind=torch.optim.AdamW, dtype=torch.bfloat16, of="plain", shards=True, mesh=None, **options):
    """Offloads a model of kind `of`.

    FSDP2 does not divide the gradient sums of the ranks. With `shards=False`, `offload()` itself shards the model if
    there are several ranks.
    """
    with torch.device("meta" if "checkpoint" in options else "cpu"):
        trained = model(dtype, of)
    if shards:
        shard(trained, mesh)
    options = {"storage": folder, "timeout": 60.0, **options}
    trained, optimizer = memascend.offload(trained, kind(trainable(trained), lr=1e-2), **options)
    divide_gradients(trained)
    return trained, optimizer


def position():
    """Returns this rank and the number of ranks; (0, 1) without a process group."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def backward(trained, step, micros=None):
    """Runs this rank's share of the backwards of a step.

    All ranks together run `micros` backwards. If `micros` is None, each rank runs one backward.
    """
    rank, count = position()
    for micro in range(rank, micros or count, count):
        (loss_of(trained, step, micro) / (micros or count)).backward()


def step(trained, optimizer, micros=None):
    backward(trained, optimizer.steps, micros)
    optimizer.user_state = {"step": optimizer.steps, "rank": position()[0]}
    optimizer.step()
    optimizer.zero_grad()


def whole(trained):
    """Returns copies of all parameters, gathered from the ranks."""
    return [getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for one in trained.parameters()]


def train(trained, optimizer, until, micros=None):
    """Trains up to step `until`; returns the gathered parameters."""
    while optimizer.steps < until:
        step(trained, optimizer, micros)
    return whole(trained)


def accumulated(dtype, micros, kind="plain", max_grad_norm=None, divisor=1, steps=3):
    """Trains in memory on one process; returns the losses, then a list of the final values and the gradient norms.

    The gradient norms are one tensor at the end of this list. With `divisor` 1, the gradient of a step is the mean over
    its `micros` micro-batches. With any other `divisor`, the gradient is the sum over the micro-batches, divided by
    `divisor`.
    """
    trained = model(dtype, kind)
    masters = [p.detach().float().clone().requires_grad_() for p in trainable(trained)]
    optimizer = adamw(masters)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(micros):
            loss = loss_of(trained, step, micro)
            (loss / (micros if divisor == 1 else 1)).backward()
            losses.append(loss.detach())
        for parameter in trainable(trained):
            parameter.grad.div_(divisor)
        norms.append(_norm(trainable(trained)))
        factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norms[-1] + 1e-6))
        _step(trained, masters, optimizer, torch.tensor(factor, dtype=torch.float32))
    values = [parameter.detach() for parameter in trained.parameters()]
    return losses, [*values, torch.tensor(norms, dtype=torch.float64)]


def _norm(parameters):
    """Returns the norm of all gradients.

    The sum of squares is rounded only once, so the order of the squares does not matter.
    """
    # float64 holds the square of a float32 exactly, and fsum rounds only its result.
    return math.sqrt(math.fsum(square for p in parameters for square in p.grad.double().square().flatten().tolist()))


def _step(trained, masters, optimizer, factor=1.0):
    with torch.no_grad():
        for master, parameter in zip(masters, trainable(trained), strict=True):
            master.grad = parameter.grad.float() * factor
            parameter.grad = None
        optimizer.step()
        for master, parameter in zip(masters, trainable(trained), strict=True):
            parameter.copy_(master)
