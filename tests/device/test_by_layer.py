"""Tests micro-batches by layer with the model on a device: each backward runs in its micro-batch's own thread."""

import pytest
from device.training import check
from parity.zoo_by_layer import MODELS, OTHERS

# Of models of other zoos those that the device that poses computes, each with a difficulty of its own.
CHOSEN = (
    *("by-layer-checkpointed", "by-layer-checkpointed-reentrant", "by-layer-idle-experts", "by-layer-t5"),
    *("by-layer-lora", "by-layer-qwen2-tied-bf16", "by-layer-repeated-layers-bf16", "by-layer-frozen"),
)
# The reference on a device has no moments of fewer bits.
OF_32_BITS = [case for case in MODELS if "state" not in case.options]


def cases():
    for case in [*OF_32_BITS, *(case for case in OTHERS if case.name in CHOSEN)]:
        for gradients in case.gradients:
            yield pytest.param(case, gradients, id=f"{case.name}-{gradients}", marks=case.marks)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
@pytest.mark.parametrize(("case", "gradients"), list(cases()))
def test_the_same_bits(case, gradients, device, tmp_path):
    check(case, device, gradients, tmp_path)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
@pytest.mark.parametrize(
    ("case", "gradients"), [pytest.param(case, case.gradients[0], id=case.name) for case in OF_32_BITS]
)
def test_the_same_bits_where_all_state_is_held(case, gradients, device, tmp_path):
    check(case, device, gradients, tmp_path, {"host_memory": "1GiB"})
