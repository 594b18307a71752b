"""Tests models, loops, optimizers and formats of state: the same code in RAM and offloaded leaves the same bits."""

import pytest
from parity.harness import check, combined
from parity.zoo_by_layer import MODELS, OTHERS
from parity.zoo_formats import FORMATS
from parity.zoo_loops import COMPILED, LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS


@combined([*PLAIN, *TRANSFORMERS])
def test_a_model_equals_itself_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


@combined([*LOOPS, *OPTIMIZERS, *FORMATS])
def test_a_loop_equals_itself_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


# Dynamo warns of what each version of torch finds worth it.
@pytest.mark.filterwarnings("ignore")
@combined(COMPILED)
def test_compiled_blocks_equal_themselves_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


@pytest.mark.filterwarnings("ignore")
@combined([*MODELS, *OTHERS])
def test_micro_batches_by_layer_equal_one_after_the_other_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)
