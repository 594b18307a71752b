"""Saves a checkpoint of step 1 on as many ranks as torchrun starts; rank 1 is killed while they save step 2."""

import os
import signal
import sys

import torch
from support.torchrun_loop import train
from torch import distributed

from memascend.checkpoint.shares import TensorFiles

PUTS = 3


def kill_in_midst():
    """Let this process die within its next save."""
    own, calls = TensorFiles.put, []

    def put(*arguments):
        calls.append(1)
        if len(calls) == PUTS:
            os.kill(os.getpid(), signal.SIGKILL)
        own(*arguments)

    TensorFiles.put = put


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    train(sys.argv[1], 1)
    if distributed.get_rank() == 1:
        kill_in_midst()
    train(sys.argv[1], 2)
