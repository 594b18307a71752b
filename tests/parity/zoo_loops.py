"""Defines test cases of loops, optimizers, options, compiled blocks, formats of state and accumulation by layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from parity import loops
from parity.harness import GRADIENTS, KEPT, Case, adamw, usual_loop
from parity.zoo_plain import (
    PLAIN,
    VOCABULARY,
    SparseBag,
    Stack,
    Towers,
    Turned,
    next_token,
    odd_mlp,
    of_vectors,
    stack,
    tokens,
)
from parity.zoo_transformers import TRANSFORMERS, case_of, qwen2
from torch import nn

BF16, FP16 = torch.bfloat16, torch.float16
# The modes of gradients for loops that need all gradients before the update. "auto" detects such a loop in the first
# step.
WHOLE = (*KEPT, "auto")


def both(name, loop, **options):
    """Returns two cases of a loop: one in float32, and one in bfloat16 with fp32 master weights."""
    return [stack(name, loop, **options), stack(f"{name}-bf16", loop, dtype=BF16, **options)]


def smooth():
    """Returns a model that can be differentiated twice at every point."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())))


LOOPS = [
    *both("clip", loops.clips, gradients=WHOLE),
    *both("max-grad-norm", loops.clips_in_step, gradients=WHOLE, options={"max_grad_norm": loops.CLIPPED}),
    *both("accumulate", loops.accumulates, gradients=WHOLE),
    of_vectors("accumulate-turned", Turned, loops.accumulates, gradients=WHOLE),
    *both("accumulate-declared", loops.accumulates, options={"accumulation_steps": 3}),
    stack("accumulate-tied", loops.accumulates, model=lambda: Stack(tied=True), options={"accumulation_steps": 3}),
    stack("fp16-dynamic", loops.scales, dtype=FP16),
    stack("bf16-scaled", loops.scales, dtype=BF16, options={"loss_scale": "dynamic"}),
    stack("fp16-clip", loops.scales, dtype=FP16, gradients=WHOLE, options={"max_grad_norm": loops.CLIPPED}),
    stack("grad-scaler", loops.grad_scaler, gradients=WHOLE),
    stack("grad-scaler-clip", partial(loops.grad_scaler, clip=loops.CLIPPED), gradients=WHOLE),
    stack("scheduler", loops.schedules, dtype=BF16),
    stack("closure", loops.closures, dtype=BF16),
    stack("drop-some", loops.drops_some),
    of_vectors("disjoint-bf16", Towers, loops.disjoint, dtype=BF16, learns_budget=True),
    *both("loss-reads-head", loops.reads_the_head),
    stack("loss-reads-tied-head", loops.reads_the_head, model=lambda: Stack(tied=True)),
    of_vectors("gradient-penalty", smooth, loops.penalizes_gradients, learns_budget=True),
    stack("autograd-grad", loops.asks_for_gradients, learns_budget=True),
    case_of("generate", lambda: qwen2(tied=True), loop=loops.generates, dtype=BF16),
    stack("autocast", loops.casts_automatically),
    stack("retain", loops.retains, learns_budget=True),
]


def grouped(model):
    """Returns AdamW with two groups that differ in their options, and a third group with the learning rate 0."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors_ = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices[:3], "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"params": vectors_, "lr": 1e-2, "eps": 1e-6, "weight_decay": 0.0},
        {"params": matrices[3:], "lr": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def with_scheduler(model):
    optimizer = grouped(model)
    optimizer.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
    return optimizer


def other(kind, **options):
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **options)


O = torch.optim  # noqa: E741
OPTIMIZERS = [
    stack("groups", optimizer=grouped),
    stack("groups-bf16-scheduler", loops.schedules, optimizer=with_scheduler, dtype=BF16),
    stack("maximize", optimizer=lambda model: adamw(model, maximize=True)),
    stack("fused-asked-for", optimizer=lambda model: adamw(model, fused=True), dtype=BF16),
    stack("tensor-rate", optimizer=lambda model: adamw(model, lr=torch.tensor(1e-2), fused=True)),
    stack("adam", optimizer=other(O.Adam, lr=1e-2, weight_decay=0.1)),
    stack("adam-bf16", optimizer=other(O.Adam, lr=1e-2), dtype=BF16),
    stack("own-dtype", dtype=BF16, options={"master_dtype": None}),
    stack("sgd", optimizer=other(O.SGD, lr=0.1)),
    stack("sgd-momentum-bf16", optimizer=other(O.SGD, lr=0.1, momentum=0.9, nesterov=True), dtype=BF16),
    of_vectors("sgd-turned", Turned, optimizer=other(O.SGD, lr=0.05, momentum=0.9), gradients=("fused",)),
    of_vectors(
        "sgd-options",
        odd_mlp,
        loops.changes_options,
        width=7,
        optimizer=other(O.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    stack("adagrad", optimizer=other(O.Adagrad, lr=1e-2)),
    stack("rmsprop-bf16", optimizer=other(O.RMSprop, lr=1e-3, momentum=0.5), dtype=BF16),
    stack("nadam", optimizer=other(O.NAdam, lr=1e-2)),
    stack("radam", optimizer=other(O.RAdam, lr=1e-2)),
    stack("adafactor-bf16", optimizer=other(O.Adafactor, lr=1e-2), dtype=BF16),
    stack("sgd-clip", loops.clips, optimizer=other(O.SGD, lr=0.1, momentum=0.9), gradients=WHOLE),
    stack("sgd-accumulate", loops.accumulates, optimizer=other(O.SGD, lr=0.1), options={"accumulation_steps": 3}),
    stack("sparse-sgd", model=SparseBag, optimizer=other(O.SGD, lr=0.1), gradients=GRADIENTS),
    stack("sparse-adam", model=lambda: SparseBag(head=False), optimizer=other(O.SparseAdam, lr=1e-2)),
]


# --- blocks that are compiled one by one, before and after offload() ---------------------------


def compiled(backend):
    def make():
        model = Stack()
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    return make


def wrapped():
    model = Stack()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


def compiles_afterwards(run):
    for block in run.model.blocks:
        block.compile(backend="aot_eager")
    usual_loop(run)


COMPILED = [
    stack("compiled-aot-bf16", model=compiled("aot_eager"), dtype=BF16),
    stack("compiled-inductor", model=compiled("inductor"), marks=(pytest.mark.slow,)),
    stack("compiled-wrapped", model=wrapped),
    stack("compiled-afterwards", loop=compiles_afterwards),
]


# --- moments of 16 and 8 bits, and stochastic rounding of parameters ---------------------------

WIDTH, WIDE = 320, 313


class Mixed(nn.Module):
    """A model for formats of state: some parameters are larger than a chunk, and some are too small for 8-bit state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


def mixed(name, state, loop=usual_loop, *, rounding="nearest", seed=7, options=None, **fields):
    given = {"seed": seed, **({} if state is None else {"state": state}), **(options or {})}
    if rounding == "stochastic":
        given |= {"rounding": rounding, "master_dtype": None}
    return Case(name=name, model=Mixed, batches=tokens, loss=next_token, options=given, loop=loop, **fields)


sgd = other(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.25)
nesterov = other(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)


def _of(state):
    return [
        mixed(f"{state}-bf16", state, loops.drops_some, dtype=BF16),
        mixed(f"{state}-fp16", state, loops.scales, dtype=FP16),
        mixed(f"{state}-accumulates", state, loops.accumulates, optimizer=sgd, dtype=BF16, gradients=KEPT),
        mixed(f"{state}-nesterov", state, optimizer=nesterov),
        mixed(f"{state}-stochastic", state, dtype=BF16, rounding="stochastic"),
    ]


FORMATS = [
    *_of("bf16"),
    *_of("8bit"),
    mixed("stochastic-clipped", "fp32", loops.clips_in_step, dtype=BF16, rounding="stochastic", gradients=WHOLE,
          options={"max_grad_norm": loops.CLIPPED}),
    mixed("stochastic-sgd", None, loops.scales, optimizer=sgd, dtype=FP16, rounding="stochastic",
          options={"loss_scale": 128.0}),
]  # fmt: skip


# --- micro-batches by layer; the reference in RAM computes one micro-batch after the other -------

# The number of micro-batches in each of five steps. The first step records the order of the units.
COUNTS = (3, 2, 1, 5, 8)
# In cases with a loss scale, the loss of the micro-batch with this index overflows. This micro-batch belongs to the
# fourth step.
OVERFLOWS = 7


def one_after_the_other(optimizer, loss_of, batches, scale):
    """Runs a forward and a backward of each micro-batch in RAM: the reference for accumulate(). Returns the losses."""
    losses = []
    seeds = [int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()) for _ in batches]
    for seed, batch in zip(seeds, batches, strict=True):
        torch.manual_seed(seed)
        loss = loss_of(batch)
        optimizer.backward(loss * scale)
        losses.append(loss.detach())
    return losses


def accumulates(run, *, overflows=None, says=lambda _: ()):
    """Trains with `COUNTS` micro-batches per step. Records each step's losses, and the values of `says(optimizer)`."""
    taken = 0
    for count in COUNTS:
        batches = range(taken, taken + count)
        taken += count

        def loss_of(index):
            loss = run.loss_of(run.model, run.batches[index % len(run.batches)])
            return loss * overflows if overflows and index == OVERFLOWS else loss

        if hasattr(run.optimizer, "accumulate"):
            losses = run.optimizer.accumulate(loss_of, batches, scale=1 / count, by_layer=True)
        else:
            losses = one_after_the_other(run.optimizer, loss_of, batches, 1 / count)
        run.record(*losses)
        run.optimizer.step()
        run.record(*says(run.optimizer))
        run.optimizer.zero_grad()


def clips(run):
    accumulates(run, says=lambda optimizer: [round(optimizer.grad_norm, 9)])


def overflows(run):
    half = any(p.dtype == torch.float16 for p in run.model.parameters())
    accumulates(
        run, overflows=3e4 if half else 1e36, says=lambda optimizer: [optimizer.loss_scale, optimizer.overflowed]
    )


def of(case, **changes):
    """Returns a copy of `case` that trains with the loop `accumulates`."""
    return replace(case, name=f"by-layer-{case.name}", loop=accumulates, **changes)


CLIP = {"max_grad_norm": loops.CLIPPED}
BY_LAYER = [
    stack("by-layer", accumulates, everywhere=True),
    stack("by-layer-tied-bf16", accumulates, model=lambda: Stack(tied=True), dtype=BF16, everywhere=True),
    stack("by-layer-dropout", accumulates, model=lambda: Stack(dropout=0.3)),
    stack("by-layer-clip", clips, gradients=WHOLE, options=CLIP),
    stack("by-layer-clip-bf16", clips, gradients=KEPT, options=CLIP, dtype=BF16),
    stack("by-layer-fp16-overflow", overflows, dtype=FP16),
    stack("by-layer-bf16-scaled", overflows, dtype=BF16, options={"loss_scale": "dynamic"}),
    mixed("by-layer-8bit", "8bit", accumulates, dtype=BF16),
    mixed("by-layer-bf16-state", "bf16", accumulates),
]
# The models of `PLAIN`, `TRANSFORMERS` and `COMPILED`, with accumulation by layer. These cases are marked slow, because
# tests/grads/test_by_layer.py also tests `accumulate()`.
OTHERS_BY_LAYER = [
    of(case, marks=(*case.marks, pytest.mark.slow), everywhere=False)
    for case in (*PLAIN, *TRANSFORMERS, *COMPILED)
    if case.name != "stack-dropout"
]
