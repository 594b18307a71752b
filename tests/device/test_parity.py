"""Tests whole training runs with the model on a device."""

import zlib

import pytest
from device.training import check
from parity.zoo_loops import LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS

# What the device that poses does not compute: convolutions, cells of recurrent networks, sparse tensors, histograms.
BEYOND_POSING = (
    *("channels-last", "convolutions", "convolutions-bf16", "resnet", "resnet-channels-last", "vit"),
    *("gru-bidirectional", "lstm", "sparse-sgd", "sparse-adam", "mixtral-bf16", "qwen2-moe"),
)
# They name the CPU.
OF_THE_CPU = ("autocast", "grad-scaler", "grad-scaler-clip")


def cases():
    return [
        pytest.param(case, gradients, id=f"{case.name}-{gradients}", marks=case.marks)
        for case in [*LOOPS, *OPTIMIZERS, *PLAIN, *TRANSFORMERS]
        for gradients in case.gradients
        if case.name not in OF_THE_CPU
    ]


# torch's word on speed, where a parameter that is away says nothing of how its values lie.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
@pytest.mark.parametrize(("case", "gradients"), cases())
def test_the_same_bits(case, gradients, device, tmp_path):
    if device.type == "posing" and case.name in BEYOND_POSING:
        pytest.skip("the device that poses does not compute it")
    check(case, device, gradients, tmp_path)


def held():
    """Each case with one way to keep gradients and one durability."""
    for case in [*LOOPS, *OPTIMIZERS, *PLAIN, *TRANSFORMERS]:
        turn = zlib.crc32(case.name.encode())
        gradients, durability = case.gradients[turn % len(case.gradients)], ("none", "step")[turn // 4 % 2]
        if case.name not in OF_THE_CPU:
            yield pytest.param(
                case, gradients, durability, id=f"{case.name}-{gradients}-{durability}", marks=case.marks
            )


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
@pytest.mark.parametrize(("case", "gradients", "durability"), list(held()))
def test_the_same_bits_where_all_state_is_held(case, gradients, durability, device, tmp_path):
    if device.type == "posing" and case.name in BEYOND_POSING:
        pytest.skip("the device that poses does not compute it")
    check(case, device, gradients, tmp_path, {"host_memory": "1GiB", "durability": durability})
