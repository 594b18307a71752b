"""Tests every way to write to weights between forwards: each counts as it does in memory."""

import copy
import functools
import itertools
import math
import zlib

import pytest
import torch
from support.bits import same_bits
from support.reached import OPTIMIZERS, WIDTH, batch, one_step, stack, taken, weights
from torch import nn


def ungraded(write):
    def without_gradients(p):
        with torch.no_grad():
            write(p)

    return without_gradients


def by_numpy(p):
    p.detach().view(torch.uint8).numpy().reshape(-1)[:32] = 0


def by_dlpack(p):
    torch.from_dlpack(p.detach())[..., :3] = 0.25


def by_out(p):
    torch.mul(p.detach().clone(), 0.5, out=p)


def by_vector(p):
    vector = nn.utils.parameters_to_vector([p])
    nn.utils.vector_to_parameters(vector * 0.5, [p])


def by_pointer(p):
    p.data = torch.full(p.shape, 0.0125, dtype=p.dtype)


def by_pointer_and_then(p):
    mine = torch.full(p.shape, 0.0125, dtype=p.dtype)
    p.data = mine
    mine[0] = 0.25


def by_iteration(p):
    for row in p:
        row.mul_(0.5)
        break


def by_storage(p):
    p.data.untyped_storage()[0] = 0
    p.data.untyped_storage()[1] = 0


IDIOMS = {
    "detach": lambda p: p.detach().zero_(),
    "detach of detach": lambda p: p.detach().detach()[:1].zero_(),
    "data": lambda p: p.data.mul_(0.5),
    "data of a view": ungraded(lambda p: p.view(-1).data[:5].fill_(0.5)),
    "data item": lambda p: p.data.__setitem__(0, 0.25),
    "copy to data": lambda p: p.data.copy_(p.data.clone().mul_(0.5)),
    "data =": by_pointer,
    "data = and a write there": by_pointer_and_then,
    "index": ungraded(lambda p: p[0].fill_(0.25)),
    "slice": ungraded(lambda p: p[..., 1:3].zero_()),
    "setitem": ungraded(lambda p: p.__setitem__(0, 0.5)),
    "view": ungraded(lambda p: p.view(-1).zero_()),
    "reshape": ungraded(lambda p: p.reshape(-1)[:7].zero_()),
    "flatten": ungraded(lambda p: p.flatten().mul_(0.5)),
    "transpose": ungraded(lambda p: p.t()[0].zero_()),
    "mT": ungraded(lambda p: p.view(1, -1).mT.mul_(0.5)),
    "split": ungraded(lambda p: p.split(1)[0].zero_()),
    "chunk": ungraded(lambda p: p.chunk(2)[1].mul_(0.5)),
    "unbind": ungraded(lambda p: p.unbind()[0].zero_()),
    "iteration": ungraded(by_iteration),
    "select": ungraded(lambda p: p.select(0, 0).zero_()),
    "narrow": ungraded(lambda p: p.narrow(0, 0, 1).zero_()),
    "expand_as": ungraded(lambda p: p.expand_as(p)[0].zero_()),
    "view as another dtype": ungraded(lambda p: p.view(torch.int16 if p.element_size() == 2 else torch.int32).zero_()),
    "squeeze": ungraded(lambda p: p.unsqueeze(0).squeeze(0)[0].zero_()),
    "in place": ungraded(lambda p: p.mul_(0.5)),
    "operator": ungraded(lambda p: p.__imul__(0.5)),
    "clamp": ungraded(lambda p: p.clamp_(-0.05, 0.05)),
    "copy_": ungraded(lambda p: p.copy_(torch.full_like(p, 0.0125))),
    "foreach": ungraded(lambda p: torch._foreach_mul_([p], 0.5)),
    "out": ungraded(by_out),
    "init": lambda p: nn.init.constant_(p, 0.0125),
    "numpy": by_numpy,
    "dlpack": by_dlpack,
    "storage": by_storage,
    "vector": by_vector,
    "index_fill": ungraded(lambda p: p.index_fill_(0, torch.tensor([0]), 0.5)),
    "graph's view": lambda p: p.view(-1).data.mul_(0.5),
}


WAYS = list(
    itertools.product(
        (2, 16), (torch.float32, torch.bfloat16, torch.float16), OPTIMIZERS, ("fused", "ssd", "ram"), ("", "1")
    )
)


def played(model, optimizer, write, dtype):
    """Losses and weights of a loop that writes to all weights before each step but the first, and to one at the end."""
    records = [one_step(model, optimizer, dtype)]
    for _ in range(2):
        for parameter in model.parameters():
            write(parameter)
        records.append(one_step(model, optimizer, dtype))
    write(next(model.parameters()))
    with torch.no_grad():
        records.append(model(batch(dtype)).float())
    return [*records, *(copy.deepcopy(p.data) for p in model.parameters())]


def compare(tmp_path, monkeypatch, idiom, way):
    """Plays a loop in memory and offloaded, and opens the store once more."""
    units, dtype, optimizer, gradients, debug = way
    monkeypatch.setenv("MEMASCEND_DEBUG", debug)
    write, make = IDIOMS[idiom], OPTIMIZERS[optimizer]
    model = stack(units, dtype)
    expected = played(model, make(model.parameters()), write, dtype)

    model = stack(units, dtype)
    model, offloaded = taken(model, make(model.parameters()), tmp_path, gradients=gradients)
    with offloaded:
        found = played(model, offloaded, write, dtype)
    assert len(found) == len(expected)
    assert all(torch.isfinite(values).all() for values in expected)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))

    model = stack(units, dtype)
    model, offloaded = taken(model, make(model.parameters()), tmp_path, existing="resume")
    with offloaded:
        stored = list(weights(model).values())
    assert all(same_bits(one, other) for one, other in zip(stored, expected[-len(stored) :], strict=True))


@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_write_between_forwards_counts_as_in_memory(tmp_path, monkeypatch, idiom):
    compare(tmp_path, monkeypatch, idiom, WAYS[zlib.crc32(idiom.encode()) % len(WAYS)])


def renewed(model, number):
    """Other values for all weights, so that an idiom finds what no other one left."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.5 / WIDTH**0.5
        parameter.data.copy_(values.to(parameter.dtype))


def digest(model):
    return [zlib.crc32(p.detach().reshape(-1).contiguous().view(torch.uint8).numpy()) for p in model.parameters()]


def played_all(model, optimizer, dtype):
    """What each idiom leaves behind: of losses the bits, of weights checksums, before and after a step."""
    records = {}
    for number, (idiom, write) in enumerate(IDIOMS.items()):
        renewed(model, number)
        before = digest(model)
        one_step(model, optimizer, dtype)
        for parameter in model.parameters():
            write(parameter)
        written = digest(model)
        assert all(map(int.__ne__, written, before)), idiom
        loss = one_step(model, optimizer, dtype).item()
        assert math.isfinite(loss), idiom
        records[idiom] = written, loss, digest(model)
    return records


@functools.cache
def played_in_memory(units, dtype, optimizer):
    model = stack(units, dtype)
    return played_all(model, OPTIMIZERS[optimizer](model.parameters()), dtype)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(str(part) for part in way))
def test_a_write_between_forwards_counts_in_every_way(tmp_path, monkeypatch, way):
    """All idioms, one after the other."""
    units, dtype, optimizer, gradients, debug = way
    monkeypatch.setenv("MEMASCEND_DEBUG", debug)
    expected = played_in_memory(units, dtype, optimizer)
    model = stack(units, dtype)
    model, offloaded = taken(model, OPTIMIZERS[optimizer](model.parameters()), tmp_path, gradients=gradients)
    with offloaded:
        found = played_all(model, offloaded, dtype)
    assert found == expected
    model = stack(units, dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    model, offloaded = taken(model, made, tmp_path, existing="resume", gradients=gradients)
    with offloaded:
        assert digest(model) == list(expected.values())[-1][-1]
