"""Tests all models, loops and optimizers with some and all of their state in RAM: the bits of training in RAM.

With nothing in RAM they are those of the other tests of models and loops.
"""

import itertools
import zlib

import pytest
from parity.harness import Mode, check
from parity.zoo_compiled import COMPILED
from parity.zoo_formats import FORMATS
from parity.zoo_loops import LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS

# These run in the fast set: all in RAM and nothing durable, where most of it happens, and some under the log.
FAST = {
    ("lora", "all", "none"),
    ("scheduler", "all", "none"),
    ("idle-experts", "all", "none"),
    ("scheduler", "all", "step"),
    ("idle-experts", "some", "step"),
    ("clip", "all", "step"),
    ("8bit-bf16", "some", "step"),
    ("fp16-dynamic", "all", "step"),
    ("sgd-options", "all", "step"),
}
# One in which every record is written whole at each step, and one that no run here gets to the end of.
LOG_STEPS = (1, 2, 3, None)
PARTS = ("some", "all")

OF_ONE_PARAMETER = {"sparse-adam"}


def held():
    """Each case under the log with some and with all in RAM, and once where nothing is durable.

    The ways to keep gradients that it has and the numbers of steps of a log go round over these.
    """
    for case in [*PLAIN, *TRANSFORMERS, *LOOPS, *OPTIMIZERS, *FORMATS, *COMPILED]:
        turn = zlib.crc32(case.name.encode())
        in_memory = "all" if (case.name, "all", "none") in FAST else PARTS[turn % 2]
        for part, durability in (*itertools.product(PARTS, ("step",)), (in_memory, "none")):
            turn += 1
            if part == "some" and case.name in OF_ONE_PARAMETER:
                continue
            log = None if durability == "none" else LOG_STEPS[turn % len(LOG_STEPS)]
            mode = Mode(case.gradients[turn % len(case.gradients)], part, 1 + turn // 4 % 2, durability, log)
            fast = (case.name, part, durability) in FAST
            marks = [*case.marks, *([] if fast else [pytest.mark.slow])]
            yield pytest.param(case, mode, id=f"{case.name}-{mode}", marks=marks)


# Dynamo warns of what each version of torch finds worth it.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "mode"), list(held()))
def test_a_run_with_in_ram_records_equals_itself_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)
