"""Trains a small model on as many ranks as torchrun starts, or in one process; saves it, and loads what it saved."""

import os
import signal
import sys

import torch
from support.rank_models import adamw, backward, model, without_mean
from torch import distributed

import memascend

__all__ = ["load", "train"]

# Of a step, on all ranks.
MICRO_BATCHES = 6


def train(folder, steps, killed=None):
    """Resume in a folder, train to a step, and save a checkpoint there; the step at which it resumed.

    On the first attempt rank 1 is killed after step `killed`.
    """
    trained = model(torch.bfloat16)
    trained, optimizer = memascend.offload(
        trained, adamw(trained.parameters()), storage=f"{folder}/run/", existing="resume", gradients="ssd", timeout=60
    )
    without_mean(trained)
    with optimizer:
        began = optimizer.steps
        while optimizer.steps < steps:
            backward(trained, optimizer.steps, MICRO_BATCHES)
            optimizer.step()
            optimizer.zero_grad()
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0"
            if optimizer.steps == killed and distributed.get_rank() == 1 and not again:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.save(f"{folder}/saved-{steps}")
    return began


def load(folder, steps):
    """Begin another run from the checkpoint of a step, and save that one, too."""
    trained = model(torch.bfloat16)
    place = f"{folder}/of-{steps}/"
    _, optimizer = memascend.offload(
        trained, adamw(trained.parameters()), storage=place, checkpoint=f"{folder}/saved-{steps}", timeout=60
    )
    with optimizer:
        assert optimizer.steps == steps
        optimizer.save(f"{folder}/loaded-{steps}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    place, until, *more = sys.argv[1:]
    resumed = train(place, int(until), *map(int, more))
    load(place, int(until))
    print(f"rank {distributed.get_rank()} resumed at step {resumed}", flush=True)
    distributed.destroy_process_group()
