"""Tests `materialized()`: changes without `modify=True`, replaced parameters, and weights that get other memory."""

import numpy as np
import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import WIDTH, chain, loss_of, offloaded, step, values
from torch.nn.utils import vector_to_parameters

import memascend
from memascend import UsageError


def assigned(model):
    model.load_state_dict({name: one * 2 for name, one in model.state_dict().items()}, assign=True)


def new(model):
    model[1].weight = torch.nn.Parameter(model[1].weight * 2)


def exchanged(model):
    model[0].weight, model[1].weight = model[1].weight, model[0].weight


def inside(model, give):
    with memascend.materialized(model, modify=True):
        return give(model)


WRITES = {
    "in place": lambda model: model[1].weight.mul_(2),
    "numpy": lambda model: model[1].weight.detach().view(torch.uint8).numpy().fill(1),
    "data =": lambda model: setattr(model[1].weight, "data", torch.ones_like(model[1].weight)),
    "another shape": lambda model: setattr(model[1].weight, "data", torch.ones(3, dtype=torch.bfloat16)),
    "another parameter": new,
}


@pytest.mark.parametrize("write", WRITES)
def test_materialized_warns_of_a_change_without_modify_and_reverts_it(tmp_path, write):
    model, optimizer = offloaded(tmp_path / "s", chain(bias=True, dtype=torch.bfloat16))
    with optimizer:
        before, own = values(model), list(model.parameters())
        expected = pytest.warns(UserWarning, match="1.weight was changed .* modify=True")
        with expected as printed, memascend.materialized(model), torch.no_grad():
            WRITES[write](model)
            kept = model[1].weight.detach().flatten()
        assert printed[0].filename == __file__
        assert same_states(values(model), before)
        with pytest.raises(KeyError), torch.no_grad():
            inside(model, lambda model: [WRITES[write](model), {}["an error"]])
        assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
        assert same_states(values(model), before)
        del kept


@pytest.mark.parametrize("modify", [False, True])
def test_kept_view_of_a_materialized_weight_blocks_step_or_is_a_snapshot(tmp_path, modify):
    """With modify=True, step() raises if code still holds a view of a weight.

    With modify=False, the view is a snapshot.
    """
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        with memascend.materialized(model, modify=modify):
            kept = model[0].weight.detach()
        loss_of(model).backward()
        if modify:
            with pytest.raises(UsageError, match=r"0\.weight is about to change.*clone\(\)"):
                optimizer.step()
            assert optimizer.steps == 0
            del kept
            optimizer.step()
        else:
            before = kept.clone()
            optimizer.step()
            assert same_bits(kept, before)
            kept.zero_()
            with pytest.raises(UsageError, match=r"0\.weight of an offloaded model was written to"):
                optimizer.save(tmp_path / "saved")
        assert optimizer.steps == 1


# --- parameters that are replaced inside materialized() ---------------------------------------------


@pytest.mark.parametrize("replace", [assigned, exchanged])
def test_materialized_writes_the_values_of_replaced_parameters(tmp_path, replace):
    model, optimizer = offloaded(tmp_path / "s", chain(bias=True))
    with optimizer:
        step(model, optimizer)
        plain, own = chain(bias=True), list(model.parameters())
        plain.load_state_dict(values(model))
        before = optimizer.state_of(own[2])
        replace(plain)
        with memascend.materialized(model, modify=True):
            replace(model)
        assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
        assert same_states(values(model), plain.state_dict())
        assert same_states(optimizer.state_of(own[2]), {**before, "master": plain[1].weight.detach()})
        step(model, optimizer)
    model, optimizer = offloaded(tmp_path / "s", chain(bias=True), existing="previous")
    with optimizer:
        assert same_states(values(model), plain.state_dict())


def put(name, **options):
    """Returns a function that replaces the parameter `name` of layer 1.

    `options` set the shape, dtype or `requires_grad` of the new parameter.
    """

    def replace(model):
        given = torch.ones(options.pop("shape", (WIDTH, WIDTH)), dtype=options.pop("dtype", None))
        setattr(model[1], name, torch.nn.Parameter(given, **options))

    return replace


MISFITS = {
    "shape": (put("weight", shape=(3, WIDTH)), r"shape \[32, 32\], but the replacement has shape \[3, 32\]"),
    "dtype": (put("weight", dtype=torch.float64), "torch.float32, but the replacement has torch.float64"),
    "frozen": (put("weight", requires_grad=False), "requires_grad=True, but .*requires_grad=False"),
    "module": (
        lambda model: setattr(model, "1", torch.nn.Linear(WIDTH, WIDTH, bias=False)),
        r"'1\.weight' was removed .* call offload\(\) again",
    ),
}


@pytest.mark.parametrize(("replace", "says"), MISFITS.values(), ids=MISFITS)
def test_materialized_rejects_a_parameter_that_cannot_replace_the_old(tmp_path, replace, says):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        step(model, optimizer)
        before, module, own = values(model), model[1], model[1].weight
        with pytest.raises(UsageError, match=says) as refused:
            inside(model, lambda model: (model[0].weight.data.mul_(2), replace(model)))
        assert "nothing was changed on storage" in str(refused.value)
        model[1] = module
        module.weight = own
        assert same_states(values(model), before)
        step(model, optimizer)


def test_materialized_keeps_a_tied_parameter_tied(tmp_path):
    def tied():
        model = chain()
        model[1].weight = model[0].weight
        return model

    model, optimizer = offloaded(tmp_path / "s", tied())
    with optimizer:
        before, own = values(model), model[0].weight
        with pytest.raises(UsageError, match=r"'0\.weight' and '1\.weight' are one tied parameter"):
            inside(model, new)
        assert same_states(values(model), before)
        # `assigned` loads with assign=True, which replaces the tied parameter with two parameters. materialized() must
        # then restore the tied parameter.
        inside(model, assigned)
        assert model[0].weight is model[1].weight is own
        assert same_bits(model[0].weight, before["0.weight"] * 2)
        step(model, optimizer)


# --- memory that is given to weights inside materialized(): watched, or rejected --------------------


def vector(model):
    given = torch.linspace(-1, 1, sum(p.numel() for p in model.parameters()))
    vector_to_parameters(given, model.parameters())
    return given


def test_step_rejects_memory_given_to_weights_while_code_holds_it(tmp_path):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        step(model, optimizer)
        with pytest.raises(UsageError, match=r"0\.weight.*other memory through \.data: write to weights within"):
            vector(model)
        given = inside(model, vector)
        before = values(model)
        with pytest.raises(UsageError, match=r"0\.weight.*is about to change.*your code holds"):
            step(model, optimizer)
        optimizer.zero_grad()
        given.mul_(0.5)
        with pytest.raises(UsageError, match=r"0\.weight.*was written to"):
            step(model, optimizer)
        optimizer.zero_grad()
        assert same_states(values(model), before)
        del given
        step(model, optimizer)


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (lambda _: torch.from_numpy(np.ones((WIDTH, WIDTH), "float32")), "code outside of torch may use"),
        (lambda model: model[1].weight.data[:], "share memory"),
    ],
)
def test_materialized_rejects_numpy_or_shared_memory_given_to_a_weight(tmp_path, of, says):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        step(model, optimizer)
        before = values(model)
        with pytest.raises(UsageError, match=rf"0\.weight.*{says}.*nothing was changed"):
            inside(model, lambda model: setattr(model[0].weight, "data", of(model)))
        assert same_states(values(model), before)
        step(model, optimizer)
