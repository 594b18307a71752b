"""Tests all models, loops and optimizers with some and all of their state in RAM: the bits of training in RAM.

With nothing in RAM they are those of the other tests of models and loops. What is in RAM is never read again, and
computed with where it lies.
"""

import itertools
import zlib

import pytest
import torch
from parity.harness import PARTS, Mode, check, ram_tier_budget
from parity.zoo_formats import FORMATS
from parity.zoo_loops import COMPILED, LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN, stack
from parity.zoo_transformers import TRANSFORMERS

import memascend

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
HELD = ("some", "all")
OF_ONE_PARAMETER = {"sparse-adam"}


def held():
    """Each case under the log with some and with all in RAM, and once where nothing is durable.

    The ways to keep gradients that it has and the numbers of steps of a log go round over these.
    """
    for case in [*PLAIN, *TRANSFORMERS, *LOOPS, *OPTIMIZERS, *FORMATS, *COMPILED]:
        turn = zlib.crc32(case.name.encode())
        in_memory = "all" if (case.name, "all", "none") in FAST else HELD[turn % 2]
        for part, durability in (*itertools.product(HELD, ("step",)), (in_memory, "none")):
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


def training(tmp_path, part="all", **options):
    """A run that holds this part of its state."""
    case = stack("held")
    torch.manual_seed(1)
    model = case.model()
    options = {"storage": tmp_path / "run.store", **options}
    budget = ram_tier_budget(case, part, **options)
    model, optimizer = memascend.offload(model, case.optimizer(model), host_memory=budget, **options)
    return case, model, optimizer, case.batches(torch.Generator().manual_seed(2))


@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("part", PARTS)
def test_what_is_in_ram_is_never_read(part, durability, tmp_path):
    case, model, optimizer, batches = training(tmp_path, part, durability=durability)
    with optimizer:
        for batch in batches:
            optimizer.backward(case.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        report = optimizer.report()
    assert report.peak <= report.budget
    reads = {kind: report.read[kind] for kind in ("values", "values, update", "state")}
    if part == "none":
        assert report.ram_tier == 0
        assert reads["values"] > 0
        return
    assert report.owners["records in RAM"].bytes > 0
    assert report.owners["gradients in RAM"].peak > 0
    if part == "some":
        assert sum(reads.values()) > 0
        return
    # Not even once: they are in RAM as they are written first.
    assert reads == {"values": 0, "values, update": 0, "state": 0}
    if durability == "none":
        assert report.written["values"] == report.written["state"] == 0


def test_what_is_in_ram_is_computed_with_where_it_lies(tmp_path):
    case, model, optimizer, batches = training(tmp_path)
    with optimizer:
        seen = set()

        def note(module, *_):
            seen.update(parameter.data_ptr() for parameter in module.parameters(recurse=False))

        for module in model.modules():
            module.register_forward_pre_hook(note)
        for _ in range(3):
            optimizer.backward(case.loss(model, batches[0]))
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == len(list(model.parameters())), "each has one address for the whole run"
        report = optimizer.report()
        assert report.units["fetches"] == 0
