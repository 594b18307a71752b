"""Runs trainings that end with -9 in the middle of a step; each says what it recorded before that."""

from __future__ import annotations

import os
import signal

import torch
from parity.harness import Run, last_of
from parity.test_resume import steps_from
from parity.zoo_formats import mixed
from parity.zoo_loops import BF16, stack
from parity.zoo_plain import Stack

import memascend

LIVES = 10


def in_one_go(run):
    steps_from(run, 0, LIVES)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


CASES = {
    case.name: case
    for case in (
        stack("unclosed-bf16", in_one_go, model=lambda: Stack(tied=True), dtype=BF16),
        stack("unclosed-fp32", in_one_go),
        stack("unclosed-sgd", in_one_go, optimizer=_sgd),
        mixed("unclosed-8bit", "8bit", in_one_go, dtype=BF16),
        mixed("unclosed-stochastic", "bf16", in_one_go, rounding="stochastic", dtype=BF16),
    )
}


def live(name, options, into):
    """Resume, make one step, write what it recorded and came to, and die with the next one staged."""
    case = CASES[name]
    torch.manual_seed(1)
    model = case.model().to(case.dtype)
    original = case.optimizer(model)
    model, optimizer = memascend.offload(model, original, existing="resume", **options, **case.options)
    batches = case.batches(torch.Generator().manual_seed(2))
    run, step = Run(model, optimizer, original, batches, case.loss), optimizer.steps
    steps_from(run, step, step + 1)
    last = last_of(model, optimizer) if step == LIVES - 1 else None
    torch.save({"step": step, "records": run.records, "last": last, "held": len(optimizer.plan.held)}, into)
    optimizer.backward(case.loss(model, batches[0]))
    os.kill(os.getpid(), signal.SIGKILL)
