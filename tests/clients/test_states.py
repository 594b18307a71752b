"""Tests that quantised state and the modes of schedule-free optimizers are those in memory, bit for bit."""

import pytest
import schedulefree
import torch
import torchao.optim
from clients.optimizers import model, train
from support.bits import same_bits

import memascend


@pytest.fixture(autouse=True)
def uncompiled():
    # Else torchao compiles its step for each shape, which takes minutes.
    with torch.compiler.set_stance("force_eager"):
        yield


def parts(value):
    if hasattr(value, "__tensor_flatten__"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [torch.as_tensor(value)]


KINDS = [
    torchao.optim.AdamW8bit,
    torchao.optim.AdamWFp8,
    torchao.optim.AdamW4bit,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__.split('.')[0]}-{kind.__name__}")
@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_quantised_state_has_the_bits_of_memory(tmp_path, kind, gradients):
    plain, trained = model(), model()
    reference = kind(plain.parameters())
    train(plain, reference, range(4))
    trained, optimizer = memascend.offload(
        trained, kind(trained.parameters()), storage=tmp_path / "store", gradients=gradients
    )
    train(trained, optimizer, range(4))
    for parameter, twin in zip(trained.parameters(), plain.parameters(), strict=True):
        state = optimizer.state_of(parameter)
        assert same_bits(state.pop("master"), twin.detach())
        assert state.keys() == reference.state[twin].keys()
        for name, value in state.items():
            assert type(value) is type(reference.state[twin][name])
            assert all(map(same_bits, parts(value), parts(reference.state[twin][name])))
    optimizer.close()


@pytest.mark.parametrize("kind", [schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree])
def test_an_evaluation_sees_the_averaged_weights_and_training_goes_on(tmp_path, kind):
    plain, trained = model(), model()
    reference = kind(plain.parameters(), warmup_steps=3)
    trained, optimizer = memascend.offload(
        trained, kind(trained.parameters(), warmup_steps=3), storage=tmp_path / "store"
    )
    inputs = torch.randn(3, 64)
    for epoch in range(3):
        for each, stepping in ((plain, reference), (trained, optimizer)):
            stepping.train()
            train(each, stepping, range(2 * epoch, 2 * epoch + 2))
            stepping.eval()
        with torch.no_grad():
            assert same_bits(trained(inputs), plain(inputs))
    assert [group["k"] for group in optimizer.param_groups] == [6]
    optimizer.close()
