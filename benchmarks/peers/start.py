"""Prepares DeepSpeed in a process of DeepSpeed's interpreter."""

from __future__ import annotations

import os
import socket


def start() -> None:
    """Loads DeepSpeed's extensions; the first call builds them. Makes a process group that has only this process."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    for builder in (AsyncIOBuilder(), CPUAdamBuilder()):
        builder.load()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    backend = "nccl" if get_accelerator().device_name() == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
