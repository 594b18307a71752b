"""Whole training runs with the model on a device."""

import pytest
from device.training import check
from parity.zoo_loops import LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS


def cases():
    return [
        pytest.param(case, gradients, id=f"{case.name}-{gradients}", marks=case.marks)
        for case in [*LOOPS, *OPTIMIZERS, *PLAIN, *TRANSFORMERS]
        for gradients in case.gradients
    ]


@pytest.mark.parametrize(("case", "gradients"), cases())
def test_the_same_bits(case, gradients, device, tmp_path):
    check(case, device, gradients, tmp_path)
