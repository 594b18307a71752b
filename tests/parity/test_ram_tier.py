"""Tests that what is in RAM is never read again, and computed with where it lies; `test_loops` has the bits."""

import pytest
from parity.zoo_plain import Stack, next_token, tokens
from support.chains import offloaded, train
from torch import Generator


@pytest.mark.parametrize("durability", ["step", "none"])
def test_what_is_in_ram_is_computed_with_where_it_lies_and_never_read(durability, tmp_path):
    model, optimizer = offloaded(tmp_path / "run.store", Stack(), host_memory="64MiB", durability=durability)
    seen = set()

    def note(module, _):
        seen.update(parameter.data_ptr() for parameter in module.parameters(recurse=False))

    with optimizer:
        for module in model.modules():
            module.register_forward_pre_hook(note)
        train(model, optimizer, tokens(Generator().manual_seed(2), 3), next_token)
        report = optimizer.report()
    assert len(seen) == len(list(model.parameters())), "each has one address for the whole run"
    assert report.units["fetches"] == 0
    assert report.owners["records in RAM"].bytes > 0
    assert report.owners["gradients in RAM"].peak > 0
    # Not even once: they are in RAM as they are written first.
    assert {report.read[kind] for kind in ("values", "values, update", "state")} == {0}
    if durability == "none":
        assert report.written["values"] == report.written["state"] == 0
