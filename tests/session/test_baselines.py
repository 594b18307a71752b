"""Tests which update in memory an offloaded one is bit-identical to, as docs/how-it-works.md lists it."""

import pytest
import torch
from parity.reference import Reference
from support.chains import chain, train

import memascend

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE, NARROW = torch.float32, torch.bfloat16


def made(dtype):
    return chain(bias=True, width=64, dtype=dtype)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def plain(dtype, **options):
    model = made(dtype)
    train(model, adamw(model.parameters(), **options), range(8))
    return list(model.parameters())


def with_masters(dtype):
    model = made(dtype)
    train(model, Reference(adamw(model.parameters())), range(8))
    return list(model.parameters())


def offloaded(dtype, asked=None, **options):
    model = made(dtype)
    model, optimizer = memascend.offload(model, adamw(model.parameters(), **options), device="cpu", **(asked or {}))
    with optimizer:
        train(model, optimizer, range(8))
        return list(model.state_dict().values())


def same(one, other):
    return all(map(torch.equal, one, other))


def test_each_update_has_the_bits_of_its_baseline_and_added_masters_are_logged(caplog):
    caplog.set_level("INFO", "memascend")
    found = offloaded(WIDE)
    assert same(found, plain(WIDE, fused=True))
    assert not same(found, plain(WIDE)), "torch's default path is another baseline"
    for fused in (False, True):
        options = {"amsgrad": True, "fused": fused}
        assert same(offloaded(WIDE, **options), plain(WIDE, **options)), fused
    for options in ({}, {"fused": True}, {"amsgrad": True}):
        assert same(offloaded(NARROW, {"master_dtype": None}, **options), plain(NARROW, **options)), options
    assert "adds none" not in caplog.text
    found = offloaded(NARROW)
    assert same(found, with_masters(NARROW))
    assert not same(found, plain(NARROW, fused=True)), "plain torch has no master weights"
    assert caplog.text.count("master_dtype=None adds none") == 1
