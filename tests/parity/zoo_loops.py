"""Cases of loops, optimizers, options and compiled blocks, each with its model."""

from __future__ import annotations

from functools import partial

import torch
from parity import loops
from parity.harness import GRADIENTS, KEPT, adamw, usual_loop
from parity.zoo_plain import SparseBag, Stack, Towers, Turned, odd_mlp, of_vectors, stack
from parity.zoo_transformers import case_of, qwen2
from torch import nn

BF16, FP16 = torch.bfloat16, torch.float16
# What needs its gradients before the update; "auto" finds out in its first step.
WHOLE = (*KEPT, "auto")


def both(name, loop, **options):
    """In float32, and in bfloat16 with masters."""
    return [stack(name, loop, **options), stack(f"{name}-bf16", loop, dtype=BF16, **options)]


def smooth():
    """What has a second derivative everywhere."""
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
    """Two groups with everything their own, and one that is frozen until somebody gives it a rate."""
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
    stack("compiled-inductor", model=compiled("inductor")),
    stack("compiled-wrapped", model=wrapped),
    stack("compiled-afterwards", loop=compiles_afterwards),
]
