"""Tests real parameters for a while: what is changed without `modify` is dropped, with a warning."""

import warnings

import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import chain, loss_of, offloaded, values

import memascend

WRITES = {
    "in place": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "detach": lambda p: p.detach()[0].zero_(),
    "numpy": lambda p: p.detach().view(torch.uint8).numpy().fill(1),
    "data =": lambda p: setattr(p, "data", torch.ones_like(p)),
    "another shape": lambda p: setattr(p, "data", torch.ones(3, dtype=p.dtype)),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_changed_without_modify_is_said(tmp_path, write):
    model, optimizer = offloaded(tmp_path / "s", chain(bias=True, dtype=torch.bfloat16))
    with optimizer:
        before = values(model)
        expected = pytest.warns(UserWarning, match="1.weight were changed .* modify=True")
        with expected as said, memascend.materialized(model), torch.no_grad():
            WRITES[write](model[1].weight)
        assert said[0].filename == __file__
        assert same_states(values(model), before)


def test_what_is_looked_at_is_not_said(tmp_path):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        with memascend.materialized(model), torch.no_grad():
            loss_of(model)
            # The same bits.
            model[0].weight.mul_(1)
        with memascend.materialized(model, modify=True), torch.no_grad():
            model[0].weight.mul_(2)


@pytest.mark.parametrize("modify", [False, True])
def test_memory_of_a_weight_that_is_kept_is_watched(tmp_path, modify):
    """Of a real weight it would follow the steps; what is discarded in any case is a snapshot."""
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        with memascend.materialized(model, modify=modify):
            kept = model[0].weight.detach()
        loss_of(model).backward()
        if modify:
            with pytest.raises(memascend.UsageError, match=r"0\.weight is about to change.*clone\(\)"):
                optimizer.step()
            assert optimizer.steps == 0
            del kept
            optimizer.step()
        else:
            before = kept.clone()
            optimizer.step()
            assert same_bits(kept, before)
            kept.zero_()
            with pytest.raises(memascend.UsageError, match=r"0\.weight of an offloaded model was written to"):
                optimizer.save(tmp_path / "saved")
        assert optimizer.steps == 1
