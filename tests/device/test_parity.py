"""Tests whole training runs with the model on a device; of micro-batches by layer each backward has its own thread."""

import zlib

import pytest
from device.training import check
from parity.zoo_by_layer import MODELS, OTHERS
from parity.zoo_loops import LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS

# They name the CPU.
OF_THE_CPU = ("autocast", "grad-scaler", "grad-scaler-clip")
# Of other zoos' models by layer some, each with a difficulty of its own.
CHOSEN = (
    *("by-layer-checkpointed", "by-layer-checkpointed-reentrant", "by-layer-idle-experts", "by-layer-t5"),
    *("by-layer-lora", "by-layer-qwen2-tied-bf16", "by-layer-repeated-layers-bf16", "by-layer-frozen"),
)
WHOLE = [case for case in [*LOOPS, *OPTIMIZERS, *PLAIN, *TRANSFORMERS] if case.name not in OF_THE_CPU]
# The reference on a device has no moments of fewer bits.
BY_LAYER = [case for case in MODELS if "state" not in case.options]


def cases():
    for case in [*WHOLE, *BY_LAYER, *(case for case in OTHERS if case.name in CHOSEN)]:
        for gradients in case.gradients:
            yield pytest.param(case, gradients, None, id=f"{case.name}-{gradients}", marks=case.marks)


def held():
    """Each case with one way to keep gradients and one durability."""
    for case in [*WHOLE, *BY_LAYER]:
        turn = zlib.crc32(case.name.encode())
        gradients, durability = case.gradients[turn % len(case.gradients)], ("none", "step")[turn // 4 % 2]
        if case in BY_LAYER:
            gradients, durability = case.gradients[0], "step"
        options = {"host_memory": "1GiB", "durability": durability}
        name = f"{case.name}-{gradients}-{durability}, all state held"
        yield pytest.param(case, gradients, options, id=name, marks=case.marks)


# torch's word on speed, where a parameter that is away says nothing of how its values lie.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
# cuDNN copies the weights together, as a model of which parts come and go has no one piece of memory.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize(("case", "gradients", "options"), [*cases(), *held()])
def test_the_same_bits(case, gradients, options, device, tmp_path):
    check(case, device, gradients, tmp_path, options)
