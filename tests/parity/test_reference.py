"""Tests that each kind of difference from the reference is noticed."""

import dataclasses

import torch
from parity.harness import differences, reference
from parity.zoo_plain import PLAIN


def test_every_kind_of_difference_is_noticed():
    case = next(case for case in PLAIN if case.name == "rooted")
    expected = reference(case, 1)
    assert differences(expected, expected) == []

    def changed(**fields):
        return differences(expected, dataclasses.replace(expected, **fields))

    weights = {**expected.weights, "shift": torch.nextafter(expected.weights["shift"], torch.tensor(9.0))}
    assert changed(weights=weights)[0].startswith("parameter shift: 32 of 32 elements")
    assert "buffer seen" in changed(buffers={"seen": expected.buffers["seen"] + 1})[0]
    assert changed(buffers={}) == ["missing: buffer seen"]
    assert changed(records=[*expected.records[:-1], expected.records[-1] + 1e-6])[0].startswith("record 3")
    state = {**expected.state, "unused": {"exp_avg": torch.zeros(5)}}
    assert changed(state=state) == ["not in the reference: state of unused: exp_avg"]
    assert changed(random=expected.random + 1)[0].startswith("random numbers drawn")
