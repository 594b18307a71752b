"""Cases with blocks compiled one by one, before and after offload()."""

from __future__ import annotations

import torch
from parity.harness import Case, usual_loop
from parity.zoo_plain import Stack, next_token, tokens


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


def case(name, **fields):
    return Case(name=name, **{"model": Stack, "batches": tokens, "loss": next_token, **fields})


COMPILED = [
    case("compiled-aot", model=compiled("aot_eager")),
    case("compiled-aot-bf16", model=compiled("aot_eager"), dtype=torch.bfloat16),
    case("compiled-inductor", model=compiled("inductor")),
    case("compiled-wrapped", model=wrapped),
    case("compiled-afterwards", loop=compiles_afterwards),
]
