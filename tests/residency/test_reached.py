"""Tests weights reached between forwards in every way that torch has: the bits of the same loop in memory."""

import copy
import functools
import itertools
import math
import zlib

import pytest
import torch
from torch import nn

import memascend
from memascend import UsageError

WIDTH = 64


def given_to_data(p):
    p.data = mine = p.detach().clone()
    return mine


def same_bits(one, other):
    return one.shape == other.shape and torch.equal(
        one.detach().reshape(-1).contiguous().view(torch.uint8),
        other.detach().reshape(-1).contiguous().view(torch.uint8),
    )


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
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
}
WAYS = list(
    itertools.product(
        (2, 16), (torch.float32, torch.bfloat16, torch.float16), OPTIMIZERS, ("fused", "ssd", "ram"), ("", "1")
    )
)


def stack(units, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(units)]).to(dtype)


def batch(dtype=torch.float32):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)


def taken(model, optimizer, folder, **options):
    half = next(model.parameters()).dtype == torch.float16
    options = {"master_dtype": None, "loss_scale": 1.0 if half else None, **options}
    if next(model.parameters()).dtype == torch.float32:
        options.pop("master_dtype")
    return memascend.offload(model, optimizer, storage=folder / "run.store", host_memory="64MiB", **options)


def one_step(model, optimizer, dtype):
    loss = model(batch(dtype)).float().pow(2).mean()
    (optimizer.backward if hasattr(optimizer, "backward") else torch.Tensor.backward)(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


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


@pytest.fixture
def training(tmp_path):
    """Makes a stack that was trained for a step, by default of 16 units in fp32."""
    made = []

    def make(units=16, dtype=torch.float32, optimizer="adamw", steps=1, **options):
        model = stack(units, dtype)
        model, offloaded = taken(model, OPTIMIZERS[optimizer](model.parameters()), tmp_path, **options)
        made.append(offloaded)
        for _ in range(steps):
            one_step(model, offloaded, dtype)
        return model, offloaded

    yield make
    for offloaded in made:
        offloaded.close()


def stored(offloaded):
    """Bytes that were written to the store."""
    return sum(offloaded.report().to_dict()["written"].values())


def test_a_swap_and_its_return_leave_masters_and_state(training):
    """What an evaluation with averaged weights does: nothing of it is written."""
    model, offloaded = training(dtype=torch.bfloat16, master_dtype=torch.float32)
    before = {name: offloaded.state_of(p) for name, p in model.named_parameters()}
    expected, written = model(batch(torch.bfloat16)).detach(), stored(offloaded)
    kept = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))
    with torch.no_grad():
        assert not model(batch(torch.bfloat16)).any()
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(values)
    assert torch.equal(model(batch(torch.bfloat16)), expected)
    assert stored(offloaded) == written
    for name, parameter in model.named_parameters():
        state = offloaded.state_of(parameter)
        assert all(same_bits(state[key], before[name][key]) for key in state), name
    one_step(model, offloaded, torch.bfloat16)


def test_a_changed_value_is_its_new_master(training, tmp_path):
    model, offloaded = training(dtype=torch.bfloat16, master_dtype=torch.float32)
    changed, other = model[3].weight, model[4].weight
    before, moment = offloaded.state_of(other), offloaded.state_of(changed)["exp_avg"]
    changed.data.fill_(0.5)
    offloaded.close()
    again = stack(16, torch.bfloat16)
    again, offloaded = taken(
        again,
        OPTIMIZERS["adamw"](again.parameters()),
        tmp_path,
        existing="resume",
        master_dtype=torch.float32,
    )
    with offloaded:
        assert torch.equal(again[3].weight, torch.full((WIDTH, WIDTH), 0.5, dtype=torch.bfloat16))
        state = offloaded.state_of(again[3].weight)
        assert torch.equal(state["master"], torch.full((WIDTH, WIDTH), 0.5))
        assert same_bits(state["exp_avg"], moment)
        assert all(same_bits(offloaded.state_of(again[4].weight)[key], before[key]) for key in before)


def test_a_deep_copy_is_a_plain_model_with_files_of_its_own(training):
    model, offloaded = training(units=2)
    model[0].weight.data.mul_(0.5)
    copied = copy.deepcopy(model)
    part = copy.deepcopy(model[1])
    assert all(type(p) is nn.Parameter and p.requires_grad for p in copied.parameters())
    assert not any(copied[0]._forward_pre_hooks or module.__dict__.get("_memascend") for module in copied.modules())
    expected = [p.detach().clone() for p in model.parameters()]
    assert all(same_bits(one, other) for one, other in zip(copied.parameters(), expected, strict=True))
    assert same_bits(part.weight, expected[2])
    assert torch.equal(copied(batch()), model(batch()))
    copied[0].weight.data.zero_()
    one_step(model, offloaded, torch.float32)
    assert model[0].weight.any()
    one_step(copied, torch.optim.SGD(copied.parameters(), lr=0.1), torch.float32)
    assert all(same_bits(one, other) for one, other in zip(part.parameters(), expected[2:], strict=True))
    # Its own hooks are there again.
    with pytest.raises(UsageError):
        model.to(torch.float64)


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        copied = type(self)(self.in_features, self.out_features)
        copied.load_state_dict(copy.deepcopy(self.state_dict(), memo))
        copied.copies = getattr(self, "copies", 0) + 1
        return copied


def test_a_module_that_copies_itself_does_so(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), CopiesItself(WIDTH, WIDTH))
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=tmp_path)
    with optimizer:
        copied = copy.deepcopy(model)
        assert copied[1].copies == 1
        assert not copied[1]._forward_pre_hooks
        assert torch.equal(copied(batch()), model(batch()))


def test_a_state_dict_that_was_loaded_stays_the_models_memory(training):
    """As in memory, where loading what is there already changes nothing, and its tensors are still the parameters'."""
    model, offloaded = training(units=2)
    state = model.state_dict()
    model.load_state_dict(state)
    with torch.no_grad():
        for tensor in state.values():
            tensor.mul_(0.5)
    assert all(same_bits(p.detach(), tensor) for p, tensor in zip(model.parameters(), state.values(), strict=True))
    one_step(model, offloaded, torch.float32)


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_a_staged_step_refuses_writes(training, gradients):
    model, offloaded = training(gradients=gradients)
    weight = model[1].weight
    loss = model(batch()).square().mean()
    loss.backward()
    expected = weight.detach().clone()
    with torch.no_grad(), pytest.raises(UsageError, match="staged"):
        weight.zero_()
    with pytest.raises(UsageError, match="staged"):
        weight.data = torch.zeros_like(expected)
    assert torch.equal(weight.data, expected)
    weight.data.zero_()
    with pytest.raises(UsageError, match=r"1\.weight"):
        offloaded.step()
    offloaded.zero_grad()
    assert torch.equal(weight, expected)
    one_step(model, offloaded, torch.float32)


def refused_once(model, offloaded, words, expected):
    """The next step is refused; zero_grad() leads back to the weights that are expected, and the one after it works."""
    model(batch()).square().mean().backward()
    with pytest.raises(UsageError, match=words):
        offloaded.step()
    offloaded.zero_grad()
    assert all(same_bits(p, expected[name]) for name, p in model.named_parameters())
    one_step(model, offloaded, torch.float32)
    assert offloaded.steps == 3


KEPT = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "slice": lambda p: p.detach()[:1],
    "view in a graph": lambda p: p.view(-1),
    "numpy": lambda p: p.detach().view(torch.uint8).numpy(),
    "given to data": given_to_data,
}


def kept(model, optimizer, take):
    """Views that are kept over steps: what they have after each, and what becomes of what is written through them."""
    views, records = [take(p) for p in model.parameters()], []
    for number in range(4):
        records.append(one_step(model, optimizer, torch.float32))
        records += [torch.as_tensor(view).detach().clone() for view in views]
        with torch.no_grad():
            if number == 1:
                views[2][:1] = 0
            elif number == 2:
                model[0].bias.data.mul_(0.5)
                records.append(torch.as_tensor(views[1]).detach().clone())
    with torch.no_grad():
        views[-1][:1] = 1
    return [*records, *weights(model).values()]


@pytest.mark.parametrize("way", KEPT)
@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_views_that_are_kept_over_steps_are_the_weights(tmp_path, caplog, way, gradients):
    model = stack(2)
    expected = kept(model, OPTIMIZERS["adamw"](model.parameters()), KEPT[way])
    model = stack(2)
    model, offloaded = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, gradients=gradients)
    with offloaded:
        found = kept(model, offloaded, KEPT[way])
    assert len(found) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    assert sum("is kept over a step" in message for message in caplog.messages) == 1


def test_a_view_that_is_kept_follows_loads_and_what_was_discarded(training):
    model, offloaded = training(units=2)
    view, before = model[1].weight.detach(), {name: p.clone() for name, p in model.state_dict().items()}
    one_step(model, offloaded, torch.float32)
    assert not same_bits(view, before["1.weight"])
    model.load_state_dict(before)
    assert same_bits(model[1].weight.detach(), before["1.weight"])
    assert same_bits(view, before["1.weight"])
    model(batch()).square().mean().backward()
    view.zero_()
    with pytest.raises(UsageError, match=r"1\.weight.*zero_grad"):
        offloaded.step()
    offloaded.zero_grad()
    assert same_bits(view, before["1.weight"])
    one_step(model, offloaded, torch.float32)


def test_a_graph_of_a_view_from_before_a_step_is_refused(training):
    """As in memory, where the step has written to what the graph saved."""
    model, offloaded = training(units=2)
    factor = torch.ones(WIDTH, WIDTH, requires_grad=True)
    loss = (model[0].weight.detach() * factor).sum()
    one_step(model, offloaded, torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_view_that_could_not_be_renewed_is_renewed_later(training, monkeypatch):
    model, offloaded = training(units=2)
    view = model[1].weight.detach()
    residency = offloaded._session.run.residency

    def failing(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(residency, "read_into", failing)
        with pytest.raises(KeyboardInterrupt):
            one_step(model, offloaded, torch.float32)
    assert offloaded.steps == 2
    offloaded.zero_grad()
    model(batch())
    assert same_bits(view, model.state_dict()["1.weight"])


def test_what_nobody_has_any_more_is_let_go(training):
    model, offloaded = training()
    reached = offloaded._session.run.residency.reached
    for parameter in model.parameters():
        parameter.data.norm()
    assert len(reached._now) == 32
    kept = model[0].weight.detach()
    model(batch())
    assert list(reached._now) == ["0.weight"]
    one_step(model, offloaded, torch.float32)
    assert list(reached._now) == ["0.weight"], "it is somebody's"
    del kept
    one_step(model, offloaded, torch.float32)
    assert not reached._now


def averaged(model, optimizer):
    """Torch's averaged weights, evaluated and taken at the end, as a loop in memory does it."""
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        one_step(model, optimizer, torch.float32)
        average.update_parameters(model)
    with torch.no_grad():
        for own, other in zip(model.parameters(), average.module.parameters(), strict=True):
            own.detach().copy_(other)
    return [average(batch()).detach(), model(batch()).detach(), *weights(model).values()]


def swapped(model, optimizer):
    """What diffusers does with its moving average: store, copy to, evaluate, restore."""
    shadow, records = [p.detach().clone() for p in model.parameters()], []
    for _ in range(3):
        one_step(model, optimizer, torch.float32)
        with torch.no_grad():
            for mine, parameter in zip(shadow, model.parameters(), strict=True):
                mine.sub_(0.25 * (mine - parameter))
            stored = [p.detach().cpu().clone() for p in model.parameters()]
            for mine, parameter in zip(shadow, model.parameters(), strict=True):
                parameter.data.copy_(mine.to(parameter.device).data)
            records.append(model(batch()))
            for mine, parameter in zip(stored, model.parameters(), strict=True):
                parameter.data.copy_(mine.data)
    return [*records, *weights(model).values()]


def referred(model, optimizer):
    """TRL's reference model, which follows the one that is trained."""
    reference, records = copy.deepcopy(model), []
    for _ in range(3):
        one_step(model, optimizer, torch.float32)
        for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
            theirs.data.mul_(1.0 - 0.25).add_(ours.data, alpha=0.25)
        records.append(reference(batch()).detach())
    return [*records, *weights(model).values()]


@pytest.mark.parametrize("loop", [averaged, swapped, referred])
@pytest.mark.parametrize("units", [2, 16])
def test_averages_are_those_in_memory(tmp_path, loop, units):
    model = stack(units)
    expected = loop(model, OPTIMIZERS["adamw"](model.parameters()))
    model = stack(units)
    model, offloaded = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path)
    with offloaded:
        found = loop(model, offloaded)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("units", [2, 16])
def test_a_view_from_inside_of_a_forward_that_is_written_outside_is_told(training, units):
    model, offloaded = training(units=units)
    views = []
    with model[1].register_forward_pre_hook(lambda module, _: views.append(module.weight.detach())):
        one_step(model, offloaded, torch.float32)
    expected = weights(model)
    views[0].zero_()
    refused_once(model, offloaded, r"1\.weight", expected)
