"""Runs the training that tests kill with -9: prints each loss before the step that follows it."""

from __future__ import annotations

import torch
from parity.loops import CLIPPED
from parity.zoo_formats import mixed
from parity.zoo_loops import BF16, stack
from parity.zoo_plain import Stack

# By name, so that it is loaded, with all that it needs, where each child is forked from.
from memascend import offload

KILLED = stack("killed", model=lambda: Stack(tied=True), dtype=BF16)
# By the format of its state.
IN_FORMATS = {state: mixed(f"killed-{state}", state, dtype=BF16) for state in ("bf16", "8bit")}


def train(storage, log, gradients, steps, state=None, together=1):
    """Trains from the last committed step to the end; says each loss before the step that follows from it.

    Of several micro-batches that are computed `together` it says the sum of the losses; each step has a seed.
    Of three lives two hold everything, with logs of several lengths; the third resumes that with nothing in RAM. Where
    micro-batches are computed together it is the other way round: what is in RAM is not computed by layer.
    """
    torch.manual_seed(1)
    lived = len(said(log))
    case = IN_FORMATS.get(state, KILLED)
    model = case.model().to(case.dtype)
    options = {"max_grad_norm": CLIPPED} if gradients == "ssd" else {}
    model, optimizer = offload(
        model,
        case.optimizer(model),
        storage=storage,
        existing="resume",
        host_memory=None if (lived % 3 == 2) == (together == 1) else "64MiB",
        log_steps=(None, 1, 3, 5)[lived % 4],
        gradients=gradients,
        **options,
        **case.options,
    )
    batches = case.batches(torch.Generator().manual_seed(2))
    with open(log, "a", buffering=1) as file, optimizer:
        for index in range(optimizer.steps, steps):
            optimizer.user_state = {"next": index + 1}
            if together == 1:
                loss = case.loss(model, batches[index % len(batches)])
                loss.backward()
            else:
                torch.manual_seed(index)
                taken = [batches[(index + more) % len(batches)] for more in range(together)]
                loss = sum(
                    optimizer.accumulate(
                        lambda batch: case.loss(model, batch), taken, scale=1 / together, by_layer=True
                    )
                )
            file.write(f"{index} {loss.item().hex()} {optimizer.steps}\n")
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.user_state == {"next": index + 1}


def said(log):
    """The losses by step; one that was said twice was the same."""
    losses = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        index, loss, steps = line.split()
        assert index == steps
        assert losses.setdefault(int(index), loss) == loss, f"step {index} was another after a kill"
    return losses
