"""Tests the compact state of bfloat16 parameters: nothing is lost, and training equals a whole master's."""

import pytest
import torch

from memascend import engine
from memascend.errors import ConfigError
from memascend.storage import formats

SHAPES = [(), (1,), (0, 3), (13,), (3, 1741)]


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def masters(count):
    """Every upper half once, with lower halves around the tie; no signalling NaN, which no arithmetic leaves."""
    upper = torch.arange(65_536, dtype=torch.int32).repeat(-(-count // 65_536))[:count] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32).repeat(count)[:count]
    both = upper | lower
    nan = (both & 0x7FFFFFFF) > 0x7F800000
    return torch.where(nan, both | 0x400000, both).view(torch.float32)


def rounded(master):
    """As the kernels round, which differs from torch only in the payload of a NaN."""
    quiet = ((bits(master) >> 16) | 0x40).to(torch.int16).view(torch.bfloat16)
    return torch.where(master.isnan(), quiet, master.bfloat16())


def test_every_kind_of_master_is_given_back_with_its_moments():
    master = masters(6 * 65_536)
    exp_avg_sq = torch.tensor([0.0, 1e-45, 1.5, 3e38, torch.inf, torch.nan, -0.0]).repeat(master.numel())[
        : master.numel()
    ]
    whole = {"master": master, "exp_avg": -exp_avg_sq, "exp_avg_sq": exp_avg_sq}
    values = rounded(master)
    state = formats.encode_state(values, whole, "compact")
    assert [(name, tensor.dtype) for name, tensor in state.items()] == [
        ("rest", torch.int16),
        ("exp_avg", torch.float32),
        ("exp_avg_sq", torch.float32),
    ]
    back = formats.decode_state(values, state, "compact")
    assert torch.equal(bits(back["master"]), bits(master))
    assert torch.equal(bits(back["exp_avg"]), bits(whole["exp_avg"]))
    assert torch.equal(bits(back["exp_avg_sq"]), bits(exp_avg_sq.abs()))
    assert torch.equal(bits(state["exp_avg_sq"].abs()), bits(exp_avg_sq.abs()))
    again = formats.encode_state(values, state, "compact")
    assert again.keys() == state.keys()
    assert all(torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8)) for name, tensor in again.items())


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_given_begins_as_the_values_and_zeros(shape):
    values = torch.randn(shape).bfloat16()
    state = formats.encode_state(values, {}, "compact")
    assert all(tensor.shape == values.shape and not tensor.any() for tensor in state.values())
    assert torch.equal(formats.decode_state(values, state, "compact")["master"], values.float())
    described = formats.encode_state(values.to("meta"), {}, "compact")
    assert all(tensor.device.type == "meta" for tensor in described.values())
    assert described.keys() == state.keys()


def test_the_order_of_memory_stays():
    master = torch.randn(4, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    whole = {"master": master, "exp_avg": master * 2, "exp_avg_sq": master * master}
    values = master.bfloat16()
    state = formats.encode_state(values, whole, "compact")
    assert all(tensor.stride() == values.stride() for tensor in state.values())
    back = formats.decode_state(values, state, "compact")
    for name, tensor in whole.items():
        assert back[name].stride() == tensor.stride(), name
        assert torch.equal(back[name], tensor), name


def test_other_layouts_have_their_master_as_it_is():
    values = torch.randn(5)
    assert engine.adam_state(values).keys() == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(engine.adam_state(values.half())["master"], values.half().float())
    with pytest.raises(ConfigError, match="no state in the format"):
        formats.decode_state(torch.zeros(3), {"momentum": torch.zeros(3)}, "compact")
    with pytest.raises(ConfigError, match="is not in the format"):
        formats.decode_state(values.bfloat16(), {"momentum": torch.zeros(5)}, "compact")


def test_what_would_lose_something_is_refused():
    master = torch.tensor([1.0, 1.001, 3.0])
    with pytest.raises(ConfigError, match="1 of 3 values are not their master rounded"):
        formats.encode_state(torch.tensor([1.0, 2.0, 3.0]).bfloat16(), {"master": master}, "compact")
    values = master.bfloat16()
    with pytest.raises(ConfigError, match="negative"):
        formats.encode_state(values, {"exp_avg_sq": torch.tensor([0.0, 1.0, -1e-30])}, "compact")
    with pytest.raises(ConfigError, match=r"'exp_avg' is torch\.float64"):
        formats.encode_state(values, {"exp_avg": torch.zeros(3, dtype=torch.float64)}, "compact")
    with pytest.raises(ConfigError, match="no state in the format"):
        formats.encode_state(values.half(), {"master": master}, "compact")
    with pytest.raises(ConfigError, match="no state called 'momentum'"):
        formats.encode_state(values, {"momentum": master}, "compact")
