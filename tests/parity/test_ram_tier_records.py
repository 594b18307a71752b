"""Tests what is kept in RAM: never read again, and computed with where it lies."""

from __future__ import annotations

import pytest
import torch
from parity.harness import PARTS, ram_tier_budget
from parity.zoo_plain import stack

import memascend


def training(tmp_path, part="all", **options):
    """A run that holds this part of its state."""
    case = stack("held")
    torch.manual_seed(1)
    model = case.model()
    options = {"storage": tmp_path / "run.store", **options}
    budget = ram_tier_budget(case, part, **options)
    model, optimizer = memascend.offload(model, case.optimizer(model), host_memory=budget, **options)
    held = len(optimizer.plan.ram_tier)
    assert part == ("none" if not held else "all" if held >= len(list(model.parameters())) else "some")
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
        assert report.read["values"] == report.read["state"] == 0
