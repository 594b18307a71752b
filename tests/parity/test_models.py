"""Tests models in the usual loop: losses, weights, buffers and state equal training in RAM."""

from parity.harness import check, combined
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS


@combined([*PLAIN, *TRANSFORMERS])
def test_offloaded_training_equals_training_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)
