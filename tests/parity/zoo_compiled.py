"""Cases with blocks compiled one by one, before and after offload()."""

from __future__ import annotations

import torch
from parity.harness import usual_loop
from parity.zoo_plain import Stack, stack


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
    stack("compiled-aot", model=compiled("aot_eager")),
    stack("compiled-aot-bf16", model=compiled("aot_eager"), dtype=torch.bfloat16),
    stack("compiled-inductor", model=compiled("inductor")),
    stack("compiled-wrapped", model=wrapped),
    stack("compiled-afterwards", loop=compiles_afterwards),
]
