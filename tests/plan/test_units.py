"""Tests find_units(): each parameter is in one unit, each block is a unit, and small modules share a unit."""

import pytest
import torch
from torch import nn

from memascend import ConfigError
from memascend.plan.units import find_units


class Block(nn.Module):
    def __init__(self, width, *, extra=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        if extra:
            self.bias = nn.Embedding(width, 2)


class Language(nn.Module):
    def __init__(self, layers=3, width=32, vocabulary=256, *, tied=False, first=False):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(width))
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, extra=first and not index) for index in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Mixture(nn.Module):
    def __init__(self, experts, width=32):
        super().__init__()
        self.attention = nn.Linear(width, 8 * width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(experts))


def holds_each_once(model, units):
    found = [name for unit in units for name in unit.parameters]
    assert len(found) == len(set(found))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert len({unit.name for unit in units}) == len(units)
    sizes = dict(model.named_parameters())
    for unit in units:
        tensors = [sizes[name] for name in unit.parameters]
        assert unit.nbytes == sum(-(-tensor.nbytes // 4096) * 4096 for tensor in tensors)
        assert unit.elements == sum(tensor.numel() for tensor in tensors)
        if unit.module:
            assert all(name.startswith(f"{unit.module}.") for name in unit.parameters)
    return {unit.name: unit for unit in units}


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_language_model_gives_embedding_block_head_and_rest_units(layers):
    model = Language(layers)
    units = holds_each_once(model, find_units(model))
    blocks = [f"layers.{index}" for index in range(layers)]
    assert [name for name in units if name != "rest"] == ["embedding", *blocks, "head"]
    assert set(units["rest"].parameters) == {"token", "norm.weight", "norm.bias"}
    assert [name for name, unit in units.items() if unit.pinned] == ["rest"]
    assert units["layers.0"].module == "layers.0"
    assert units["rest"].module is None


def test_first_block_with_an_extra_module_is_one_unit():
    model = Language(2, first=True)
    units = holds_each_once(model, find_units(model))
    assert "layers.0.bias" not in units
    assert "layers.0.bias.weight" in units["layers.0"].parameters


def test_pinned_unit_takes_only_some_of_many_small_modules():
    model = Language(2)
    for index in range(60):
        model.add_module(f"norm{index}", nn.LayerNorm(32))
    units = holds_each_once(model, find_units(model))
    resident = sum(model.get_parameter(name).nbytes for name in units["rest"].parameters)
    assert 0 < 4 * resident <= sum(parameter.nbytes for parameter in model.layers[0].parameters())


def test_tied_parameters_are_in_the_first_unit_and_used_again():
    model = Language(3, tied=True)
    units = holds_each_once(model, find_units(model))
    assert "head" not in units
    assert units["embedding"].again == ("layers.2",)
    assert not any(unit.again for name, unit in units.items() if name != "embedding")


def test_output_embeddings_are_the_last_unit():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(32, 256)
            self.body = Language(2)

        def get_output_embeddings(self):
            return self.head

    model = Backwards()
    assert list(holds_each_once(model, find_units(model)))[-1] == "head"


def test_module_registered_under_two_names_is_one_unit():
    shared = Block(16)
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(16, 16), "c": shared})
    units = holds_each_once(model, find_units(model))
    assert "a" in {name.split(".")[0] for name in units}
    assert "c" not in {name.split(".")[0] for name in units}


def test_each_block_of_nested_stages_is_a_unit():
    stages = [nn.Sequential(*(Block(width) for _ in range(2))) for width in (32, 64)]
    model = nn.Sequential(nn.Linear(8, 32), nn.ModuleList(stages))
    units = holds_each_once(model, find_units(model))
    assert {"1.0.0", "1.0.1", "1.1.0", "1.1.1"} <= set(units)


def test_each_encoder_and_decoder_layer_is_a_unit():
    model = nn.Transformer(32, 2, 2, 2, 64, batch_first=True)
    units = holds_each_once(model, find_units(model))
    assert [name for name in units if name != "rest"] == [
        f"{side}.layers.{index}" for side in ("encoder", "decoder") for index in range(2)
    ]


def test_a_bound_divides_blocks_by_module():
    model = nn.ModuleList(Mixture(64) for _ in range(2))
    whole = holds_each_once(model, find_units(model))
    assert list(whole) == ["0", "1"]
    bound = sum(parameter.nbytes for parameter in model[0].attention.parameters())
    units = holds_each_once(model, find_units(model, bytes_max=bound))
    sizes = {name: sum(model.get_parameter(each).nbytes for each in unit.parameters) for name, unit in units.items()}
    assert max(sizes.values()) <= bound
    assert units["0.attention"].module == "0.attention"
    # The experts of one block are divided among several units. No unit has parameters of two blocks.
    assert len([name for name in units if ".experts." in name]) > 4
    assert all(len({name.split(".")[0] for name in unit.parameters}) == 1 for unit in units.values())


def test_bytes_max_does_not_divide_a_single_module():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert [unit.nbytes for unit in find_units(model, bytes_max=4096)] == [20480, 20480]


def test_units_option_sets_the_units():
    model = Language(3)
    units = holds_each_once(model, find_units(model, units=["layers", "norm"]))
    assert list(units) == ["rest", "embedding", "layers", "norm", "head"]
    assert units["layers"].module is None  # a ModuleList is never called
    assert units["norm"].parameters == ("norm.weight", "norm.bias")
    inside = holds_each_once(model, find_units(model, units=["layers.1.up"]))
    assert {"layers.0", "layers.1.up", "layers.2"} <= set(inside)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["layers.9", "layers.0"], "contains 'layers.9'"),
        (["head"], "tied"),
        (["layers.0", "layers.0.up"], "read with one unit"),
        (["layers.0", "layers.0"], "read with one unit"),
        (["", "layers.0"], "read with one unit"),
    ],
)
def test_invalid_units_option_is_rejected(given, says):
    with pytest.raises(ConfigError) as refused:
        find_units(Language(tied=True), units=given)
    assert says in str(refused.value)


def test_unit_names_do_not_collide():
    model = nn.ModuleDict({"rest": nn.Linear(64, 64), "root": nn.Linear(64, 64), "norm": nn.LayerNorm(4)})
    model.register_parameter("large", nn.Parameter(torch.zeros(64, 64)))
    holds_each_once(model, find_units(model))


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.LSTM(8, 8, 2), nn.MultiheadAttention(8, 2)], ids=repr)
def test_units_of_a_single_module_hold_each_parameter_once(model):
    holds_each_once(model, find_units(model))


def test_model_without_parameters_or_with_lazy_ones_is_rejected():
    with pytest.raises(ConfigError, match="no parameters"):
        find_units(nn.ReLU())
    with pytest.raises(ConfigError, match="run one forward"):
        find_units(nn.LazyLinear(4))


def test_units_count_the_bytes_of_frozen_parameters():
    model = Language()
    model.layers[0].requires_grad_(requires_grad=False)
    model.layers[1].up.requires_grad_(requires_grad=False)
    units = holds_each_once(model, find_units(model))
    assert units["layers.0"].frozen_bytes == units["layers.0"].nbytes
    assert 0 < units["layers.1"].frozen_bytes < units["layers.1"].nbytes
    assert units["layers.2"].frozen_bytes == 0


def test_empty_parameter_of_a_meta_model_is_in_the_rest_unit():
    with torch.device("meta"):
        model = Language()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    assert "empty" in holds_each_once(model, find_units(model))["rest"].parameters


class Head(nn.Module):
    """A head whose last layer shares its weight with the embedding."""

    def __init__(self, width, vocabulary, embedding):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dense = nn.Linear(width, width)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight, self.decoder.bias = embedding.weight, self.bias


def test_around_lists_the_units_of_enclosing_modules():
    """`around` lists the units of enclosing modules.

    While an inner module computes, the parameters of its enclosing modules, also tied ones, stay materialized.
    """
    model = Language()
    model.head = Head(32, 256, model.embedding)
    units = holds_each_once(model, find_units(model, units=["embedding", "head"]))
    assert (units["embedding"].again, units["embedding"].around) == (("head",), ())
    assert units["embedding"].around_again == ("head",)
    assert "head" not in units["layers.0"].around + units["rest"].around
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.lists = nn.ModuleList([Block(32), Block(32)])
    model.lists[0].scales = nn.ParameterList([nn.Parameter(torch.zeros(64, 64))])
    units = holds_each_once(model, find_units(model, units=["lists.0.up", "lists.0.down"]))
    assert "lists.0.scales" in units
    # The call of the module that owns a ParameterList materializes the list's parameters.
    assert units["lists.0.up"].around == units["lists.0.down"].around == ("lists.0.scales",)
    assert units["lists.0.scales"].around == ()


def test_a_list_of_parameters_alone_is_one_unit():
    # The list is the root of the model. No module encloses the list, so the search for an enclosing module must end.
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(2)])
    assert [unit.parameters for unit in find_units(model)] == [("0", "1")]
