"""Trains on the ranks of torchrun, of which rank 1 raises, hangs or is killed, and prints what the others met."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from support.rank_models import offloaded, train
from torch import distributed

from memascend import RankError


def meet(kind, folder):
    """Resume, take a step, and begin another in which rank 1 has a fault."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    trained, optimizer = offloaded(f"{folder}/run", existing="resume", timeout=10.0)
    try:
        with optimizer:
            train(trained, optimizer, optimizer.steps + 1)
            began = time.monotonic()
            if rank == 1:
                fail(kind, [Path(folder, f"{kind}-{other}") for other in range(count) if other != 1])
            train(trained, optimizer, optimizer.steps + 1)
    except (RankError, ValueError) as error:
        said = [type(error).__name__, *getattr(error, "ranks", ())]
        print(f"rank {rank}, {kind}: {said} after {time.monotonic() - began:.1f} s", flush=True)
    Path(folder, f"{kind}-{rank}").touch()


def fail(kind, over):
    if kind == "raises":
        raise ValueError("as a user's code may")
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while not all(path.exists() for path in over):
        time.sleep(0.05)


if __name__ == "__main__":
    # torchrun ends the other ranks once one is dead, often before they can say anything.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for each in ("raises", "hangs", "dies"):
        meet(each, sys.argv[1])
        if each != "dies":
            distributed.barrier()
