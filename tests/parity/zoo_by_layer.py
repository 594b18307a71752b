"""Cases of micro-batches that are computed by layer; in RAM one is computed after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity.harness import KEPT
from parity.loops import CLIPPED
from parity.zoo_formats import mixed
from parity.zoo_loops import BF16, COMPILED, FP16, WHOLE
from parity.zoo_plain import PLAIN, Stack, stack
from parity.zoo_transformers import TRANSFORMERS

# Micro-batches of each step; the first step learns the order of units.
COUNTS = (3, 2, 1, 5, 8)
# The micro-batch of those in the middle whose loss overflows, in cases with a loss scale.
OVERFLOWS = 7


def one_after_the_other(optimizer, loss_of, batches, scale):
    """What `accumulate()` is to compute, in RAM."""
    losses = []
    seeds = [int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()) for _ in batches]
    for seed, batch in zip(seeds, batches, strict=True):
        torch.manual_seed(seed)
        loss = loss_of(batch)
        optimizer.backward(loss * scale)
        losses.append(loss.detach())
    return losses


def accumulates(run, *, overflows=None, says=lambda _: ()):
    """`says` gives what is recorded of the optimizer after each step."""
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
    """A case of another zoo, with this loop."""
    return replace(case, name=f"by-layer-{case.name}", loop=accumulates, **changes)


CLIP = {"max_grad_norm": CLIPPED}
MODELS = [
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
# What other zoos have is slow here: one way to keep gradients is in the tests of `accumulate()` itself.
OTHERS = [
    of(case, marks=(*case.marks, pytest.mark.slow), everywhere=False)
    for case in (*PLAIN, *TRANSFORMERS, *COMPILED)
    if case.name != "stack-dropout"
]
