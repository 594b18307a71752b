"""Tests optimizers of several libraries: the rows of docs/optimizers.md, and 8-bit state against bitsandbytes."""

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from clients.optimizers import LIBRARIES, cases, heading, row, written
from support import blockwise
from support.bits import same_bits
from support.moments import MomentsInRam, exact_root

from benchmarks.reduced import adamw_reduced, encoded
from memascend import engine

STEPS = 25


def gradient(kind, numel, generator):
    usual = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 6
    if kind == "zeros":
        return usual * 0
    if kind == "wild":
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
        usual = torch.where(bits.abs() < 1e18, bits, 0.0)
        usual[:300] = 0
        usual[300:600] *= 1e-30
    return usual.bfloat16() if kind == "bfloat16" else usual


def test_dynamic_maps_equal_the_maps_of_bitsandbytes():
    for signed in (True, False):
        numbers = create_dynamic_map(signed)
        assert same_bits(blockwise.dynamic_map(signed=signed), numbers)
        # `codes` is one block with all 256 codes. Its absmax is 1, so the codes decode to the numbers of the map.
        codes = torch.arange(256, dtype=torch.uint8)
        name = "exp_avg" if signed else "exp_avg_sq"
        state = {like: torch.zeros(256, dtype=torch.uint8) for like in ("exp_avg", "exp_avg_sq")}
        state |= {f"{like}_absmax": torch.ones(1) for like in ("exp_avg", "exp_avg_sq")}
        state[name] = codes
        assert same_bits(engine.decode_state(torch.zeros(256), state, "8bit")[name], numbers)


@pytest.mark.parametrize(
    ("kind", "numel", "weight_decay"),
    [
        ("usual", 4096 + 77, 0.02),
        ("usual", 40 * 256, 0.0),
        ("bfloat16", 4096 + 77, 0.0),
        ("wild", 40 * 256, 0.02),
        ("zeros", 4096 + 77, 0.02),
    ],
)
def test_adamw_has_the_bits_of_bitsandbytes(monkeypatch, kind, numel, weight_decay):
    generator = torch.Generator().manual_seed(numel)
    master = torch.randn(numel, generator=generator)
    theirs = torch.nn.Parameter(master.clone())
    optimizer = bitsandbytes.optim.AdamW8bit([theirs], lr=3e-3, weight_decay=weight_decay)
    ours, half = master.clone(), master.bfloat16()
    state = encoded(ours, {}, "8bit")
    compact = encoded(half, {"master": master}, "compact 8bit")
    for step in range(1, STEPS + 1):
        grad = gradient(kind, numel, generator)
        theirs.grad = grad.float()
        with monkeypatch.context() as patched:
            # bitsandbytes calls torch's `sqrt`. On some machines, the result of `sqrt` differs from the exact root in
            # the last bit.
            patched.setattr(torch.Tensor, "sqrt", exact_root)
            optimizer.step()
        numbers = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay, "step": step}
        adamw_reduced(ours, state, grad, form="8bit", **numbers)
        adamw_reduced(half, compact, grad, form="compact 8bit", **numbers)
        kept = optimizer.state[theirs]
        assert same_bits(ours, theirs.detach()), step
        assert same_bits(engine.decode_state(half, compact, "compact 8bit")["master"], theirs.detach()), step
        for found in (state, compact):
            for name, codes, absmax in (("exp_avg", "state1", "absmax1"), ("exp_avg_sq", "state2", "absmax2")):
                assert same_bits(found[name], kept[codes]), (step, name)
                assert same_bits(found[f"{name}_absmax"], kept[absmax]), (step, name)


def test_momentum_in_ram_has_the_bits_of_bitsandbytes():
    """`MomentsInRam` computes the bits of bitsandbytes. tests/parity compares offloaded runs with `MomentsInRam`."""
    generator = torch.Generator().manual_seed(1)
    theirs = torch.nn.Parameter(torch.randn(4096 + 77, generator=generator))
    ours = torch.nn.Parameter(theirs.detach().clone())
    numbers = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = bitsandbytes.optim.SGD8bit([theirs], **numbers)
    group = {"params": [ours], "dampening": 0, "nesterov": False, **numbers}
    reference = MomentsInRam([group], widths={ours: "8bit"}, keys={}, rule="momentum")
    for step in range(1, STEPS + 1):
        theirs.grad = gradient("usual", theirs.numel(), generator)
        ours.grad = theirs.grad.clone()
        optimizer.step()
        reference.step()
        kept, found = optimizer.state[theirs], reference.state[ours]
        assert same_bits(ours.detach(), theirs.detach()), step
        assert same_bits(found["momentum_buffer"], kept["state1"]), step
        assert same_bits(found["momentum_buffer_absmax"], kept["absmax1"]), step


# --- the tables of the page ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [case for library in LIBRARIES for case in cases(library)], ids=lambda case: f"{case.library}-{case.name}"
)
def test_optimizers_page_has_the_current_row_of_each_optimizer(case):
    if case.name == "SWATS":
        pytest.skip("the step at which SWATS switches to SGD depends on the last bits of the processor's arithmetic")
    assert row(case) in written()[heading(case.library)], "make clients-table"


def test_optimizers_page_lists_exactly_the_libraries_and_their_classes():
    found = written()
    assert list(found) == [heading(library) for library in LIBRARIES]
    for library in LIBRARIES:
        names = [line.split(" | ")[0].removeprefix("| ") for line in found[heading(library)]]
        assert names == [case.name for case in cases(library)]
        outcomes = [line.split(" | ")[1] for line in found[heading(library)]]
        assert all(outcome.startswith(("streams", "rejected: ", "not tried: ")) for outcome in outcomes)
