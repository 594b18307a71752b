"""Tests what is read from and written to divided weights between steps: the bits of FSDP2 in memory."""

import contextlib

import pytest
import torch
from support.bits import same_bits
from support.rank_models import Odd, loss_of
from support.ranks import on_ranks
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import memascend

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def made(folder, **options):
    """Odd, whose rows do not divide, divided; offloaded where there is a folder."""
    torch.manual_seed(0)
    trained = Odd()
    for block in trained:
        fully_shard(block)
    fully_shard(trained)
    # Its bits do not depend on where in a vector an element lies.
    optimizer = torch.optim.SGD([one for one in trained.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    if options:
        trained, optimizer = memascend.offload(trained, optimizer, storage=folder, timeout=60.0, **options)
    return trained, optimizer


def others():
    torch.manual_seed(7)
    return Odd().state_dict().items()


@contextlib.contextmanager
def edited(optimizer, parameters):
    """This rank's rows of parameters, to write into."""
    if hasattr(optimizer, "edit"):
        with optimizer.edit(parameters) as rows:
            yield rows
    else:
        with torch.no_grad():
            yield [one.to_local() for one in parameters]


def loop(folder, options):
    """The losses of a loop that does all of it, and the values at its end."""
    trained, optimizer = made(folder, **options)
    rank, found = distributed.get_rank(), []
    named = dict(trained.named_parameters())
    weight, bias = named["narrow.2.weight"], named["narrow.2.bias"]
    ema = {name: one.detach().clone() for name, one in named.items()}

    def step(index):
        loss = loss_of(trained, index, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        with torch.no_grad():
            # Foreach on all, and one by one.
            torch._foreach_lerp_(list(ema.values()), [one.detach() for one in named.values()], 0.1)
            for name, one in named.items():
                ema[name].lerp_(one, 0.1)

    step(0)
    with edited(optimizer, [weight, bias]) as (rows, more):
        rows.mul_(0.5)
        more.add_(0.25)[:1].zero_()
    found.append(weight.detach().t().full_tensor())
    step(1)
    # A snapshot that is kept over a step.
    kept = weight.to_local().detach().clone()
    step(2)
    found.append(kept)
    found.append(torch.from_numpy(bias.to_local().detach().numpy().copy()))
    step(3)
    # As loops load their weights.
    load(trained)
    found.append(get_model_state_dict(trained, options=FULL).get("narrow.0.weight", torch.zeros(0)))
    step(4)
    set_model_state_dict(trained, dict(others()), options=WHOLE)
    state = {name: one.clone() for name, one in trained.state_dict().items()}
    step(5)
    trained.load_state_dict(state)
    step(6)
    # An evaluation with other weights, and back.
    own = [one.to_local().detach().clone() for one in named.values()]
    for values in ([one.to_local() for one in ema.values()], own):
        with edited(optimizer, list(named.values())) as each:
            for rows, value in zip(each, values, strict=True):
                rows.copy_(value)
        with torch.no_grad():
            found.append(loss_of(trained, 7, rank))
    step(7)
    if options:
        refuse_others(weight, trained, optimizer)
        optimizer.close()
        trained, optimizer = made(folder, **{**options, "existing": "resume"})
    found += [one.full_tensor() for one in trained.parameters()]
    found += [one.full_tensor() for one in ema.values()]
    if options:
        optimizer.close()
    return found


def load(trained):
    """Values that rank 0 has."""
    like = trained.state_dict()
    values = {name: distribute_tensor(one, like[name].device_mesh, like[name].placements) for name, one in others()}
    trained.load_state_dict(values)


def refuse_others(weight, trained, optimizer):
    """Whoever writes to weights in another way is told of the door, and nothing is changed."""
    before, rank = weight.full_tensor().clone(), distributed.get_rank()

    def foreach():
        torch._foreach_mul_([weight.detach()], 0.5)

    def through_numpy():
        weight.to_local().detach().numpy()[:] = 0

    def through_a_view():
        weight.to_local().detach().flatten()[0] = 7

    def refused(write):
        with pytest.raises(memascend.UsageError, match=r"offloaded.*edit\("), torch.no_grad():
            write()

    def by_torch():
        set_model_state_dict(trained, dict(others()) if rank == 0 else {}, options=FROM_RANK_0)

    for write in (lambda: weight.fill_(0.5), lambda: weight.data.mul_(0.5), foreach, by_torch):
        refused(write)
    # Memory that was handed out is compared at the next forward.
    for write in (through_numpy, through_a_view):
        with torch.no_grad():
            write()
        refused(lambda: loss_of(trained, 8, rank))
    assert same_bits(weight.full_tensor(), before)
    # Memory that is still held would not follow.
    kept = weight.to_local().detach().t()
    loss_of(trained, 8, rank).backward()
    with pytest.raises((memascend.UsageError, memascend.RankError), match=r"narrow\.2\.weight.*clone\(\)"):
        optimizer.step()
    del kept
    optimizer.zero_grad()
    assert same_bits(weight.full_tensor(), before)


def loops(folder, cases):
    return [loop(None, {}), *(loop(f"{folder}/{index}", options) for index, options in enumerate(cases))]


def assert_same(tmp_path, count, cases):
    for whole, *others in on_ranks(count, loops, tmp_path, cases):
        for options, found in zip(cases, others, strict=True):
            same = [same_bits(one, other) for one, other in zip(whole, found, strict=True)]
            assert all(same), (options, [index for index, is_same in enumerate(same) if not is_same])


def test_weights_are_read_and_written_between_steps_as_in_memory(tmp_path):
    assert_same(tmp_path, 2, [{"gradients": "auto"}])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, 4])
def test_they_are_in_every_mode(tmp_path, count):
    """Of four ranks one has no rows of some weights; the backend's order is that of the run in memory."""
    cases = [{"gradients": "ssd"}, {"gradients": "fused"}, {"gradients": "ram", "durability": "none"}]
    cases += [{"gradients": "ssd", "host_memory": "1GiB", "log_steps": 3}]
    assert_same(tmp_path, count, [{**case, "reduction": "native"} for case in cases])
