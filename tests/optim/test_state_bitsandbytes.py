"""Tests that bitsandbytes' 8-bit Adams are recognised by type, and their state read, without bitsandbytes."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support.bits import same_bits

from memascend.optim import state as bitsandbytes_state
from memascend.optim.state import StateFormats


def stand_in(parameters, *, module="bitsandbytes.optim.adamw", name="AdamW8bit", manager=None, **arguments):
    def init(self):
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        torch.optim.Optimizer.__init__(self, parameters, defaults)

    kind = type(name, (torch.optim.Optimizer,), {"__module__": module, "__init__": init})
    optimizer = kind()
    given = {"optim_bits": 8, "min_8bit_size": 4096, "max_unorm": 0.0, "skip_zeros": False, **arguments}
    optimizer.args = SimpleNamespace(**given)
    empty = {"index2config": {}, "pid2config": {}, "module_weight_config_triple": []}
    optimizer.mng = SimpleNamespace(**{**empty, **(manager or {})})
    return optimizer


def parameter(*shape):
    return torch.nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"module": "bitsandbytes.optim.adam", "name": "Adam8bit"}, True),
        ({"name": "PagedAdamW8bit"}, True),
        ({"name": "AdamW"}, True),
        ({"name": "AdamW", "optim_bits": 32}, False),
        ({"max_unorm": 1.0}, False),
        ({"skip_zeros": True}, False),
        ({"module": "somebody.optim.adamw"}, False),
        ({"name": "Lion8bit", "module": "bitsandbytes.optim.lion"}, False),
    ],
)
def test_it_is_recognised_by_its_exact_type(changed, taken):
    assert bitsandbytes_state.is_8bit_adam(stand_in([parameter(64, 64)], **changed)) == taken
    assert "bitsandbytes" not in sys.modules


def test_a_parameter_has_the_bits_that_its_manager_and_its_state_say():
    module = torch.nn.Embedding(64, 64)
    plain, small, by_index, by_id, has_state = (parameter(64, 64) for _ in range(5))
    small = parameter(4095)
    given = [plain, small, by_index, by_id, module.weight, has_state]
    manager = {
        "index2config": {(0, 2): {"optim_bits": 32}},
        "pid2config": {id(by_id): {"min_8bit_size": 5000}},
        "module_weight_config_triple": [(module, "weight", {"optim_bits": 32})],
    }
    optimizer = stand_in(given, manager=manager)
    optimizer.state[has_state] = {"state1": torch.zeros(64, 64)}
    found = [bitsandbytes_state.has_8_bits(optimizer, 0, place) for place in range(len(given))]
    assert found == [True, False, False, False, False, False]
    formats = StateFormats().of(optimizer, torch.float32)
    assert [formats[id(one)] for one in given] == ["8bit", "", "", "", "", ""]
    assert StateFormats().of(optimizer, None) == {}


def test_its_state_is_read_by_our_names():
    one = parameter(70, 70)
    optimizer = stand_in([one])
    state = {
        "step": 7,
        "state1": torch.randint(0, 255, (70, 70), dtype=torch.uint8),
        "state2": torch.randint(0, 255, (70, 70), dtype=torch.uint8),
        "absmax1": torch.rand(20),
        "absmax2": torch.rand(20),
        "qmap1": torch.zeros(256),
        "qmap2": torch.zeros(256),
    }
    assert bitsandbytes_state.state_of(optimizer, one) == ({}, 0)
    optimizer.state[one] = state
    found, step = bitsandbytes_state.state_of(optimizer, one)
    assert step == 7
    names = {"exp_avg": "state1", "exp_avg_sq": "state2", "exp_avg_absmax": "absmax1", "exp_avg_sq_absmax": "absmax2"}
    assert found.keys() == names.keys()
    assert all(same_bits(found[ours], state[theirs]) for ours, theirs in names.items())
