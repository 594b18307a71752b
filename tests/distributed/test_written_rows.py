"""Tests what is read from divided weights between steps, and written through doors: the bits of FSDP2 in memory."""

import pytest
import torch
from support.bits import same_bits
from support.rank_models import Odd, adamw, loss_of, shard, sharded
from support.ranks import on_ranks
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import memascend

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def made(folder, **options):
    """Odd, whose rows do not divide, divided; offloaded where there is a folder."""
    torch.manual_seed(0)
    trained = shard(Odd())
    # Its bits do not depend on where in a vector an element lies.
    optimizer = torch.optim.SGD([one for one in trained.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    if options:
        trained, optimizer = memascend.offload(trained, optimizer, storage=folder, timeout=60.0, **options)
    return trained, optimizer


def copied(values, given):
    for value, one in zip(values, given.values(), strict=True):
        value.copy_(local(one))


def others():
    torch.manual_seed(7)
    return {name: one.detach().clone() for name, one in Odd().state_dict().items()}


def local(one):
    return getattr(one, "_local_tensor", one)


@torch.no_grad()
def write(optimizer, parameters, do):
    """Change this rank's rows of parameters: through the door, where there is one."""
    if isinstance(optimizer, memascend.OffloadedOptimizer):
        with optimizer.edit(parameters) as values:
            do(values)
    else:
        do([local(one) for one in parameters])


def within(trained, do):
    with memascend.materialized(trained, modify=True):
        do()


def replaced(trained, factor, *, alike=True):
    """Other parameters in the place of all, a multiple of theirs; those that are not alike are whole ones."""
    for module in trained.modules():
        for short, one in list(module.named_parameters(recurse=False)):
            values = one.detach() * factor if alike else torch.zeros(one.shape)
            setattr(module, short, torch.nn.Parameter(values, one.requires_grad))


def refused(trained, optimizer):
    """What goes through no door is refused on each rank, and an edit that fails on one of them changes nothing."""
    weight, before = trained[0].weight, [one.full_tensor() for one in trained.parameters()]
    rank = distributed.get_rank()
    with torch.no_grad():
        for change in (lambda: weight.mul_(2), lambda: weight.data.add_(1), weight.zero_):
            with pytest.raises(memascend.UsageError, match=r"'0\.weight' is offloaded.*optimizer\.edit"):
                change()
    weight.to_local().detach().numpy()[:] = 7
    with pytest.raises(memascend.UsageError, match=r"0\.weight of an offloaded model was written to"):
        optimizer.save(str(rank))
    kept = weight.to_local().detach().numpy()
    loss_of(trained, 0, rank).backward()
    with pytest.raises((memascend.UsageError, memascend.RankError), match=r"0\.weight is about to change"):
        optimizer.step()
    del kept
    optimizer.zero_grad()

    def fails(values):
        values[0].zero_()
        if rank == 1:
            raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, memascend.RankError)):
        write(optimizer, list(trained.parameters()), fails)
    own = trained[3].bias
    with pytest.raises((memascend.UsageError, memascend.RankError), match="within materialized"):
        within(trained, lambda: replaced(trained, 2.0, alike=rank == 0))
    trained[3].bias = own
    within(trained, lambda: replaced(trained, 1.0))
    return all(map(same_bits, before, [one.full_tensor() for one in trained.parameters()]))


def refusals(folder):
    trained = sharded(torch.float32)
    trained, optimizer = memascend.offload(trained, adamw(trained.parameters()), storage=f"{folder}/s", timeout=60.0)
    with optimizer:
        same = refused(trained, optimizer)
        loss_of(trained, 0, distributed.get_rank()).backward()
        optimizer.step()
        return same, optimizer.steps


def test_a_write_through_no_door_is_refused_and_one_ranks_failure_undoes_an_edit(tmp_path):
    assert on_ranks(2, refusals, tmp_path) == [(True, 1)] * 2


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
    write(optimizer, [weight, bias], lambda values: torch._foreach_mul_(values, 0.5))
    found.append(weight.detach().t().full_tensor())
    step(1)
    write(optimizer, [bias], lambda values: values[0].add_(0.25))
    step(2)
    found.append(torch.from_numpy(bias.to_local().detach().numpy().copy()))
    step(3)
    # As loops load their weights.
    full = others()
    set_model_state_dict(trained, full if rank == 0 else {}, options=FROM_RANK_0)
    found += get_model_state_dict(trained, options=FULL).values()
    step(4)
    state = {name: one.clone() for name, one in trained.state_dict().items()}
    step(5)
    trained.load_state_dict(state)
    if options:
        within(trained, lambda: replaced(trained, 0.5))
    else:
        torch._foreach_mul_([local(one.detach()) for one in trained.parameters()], 0.5)
    step(6)
    # An evaluation with other weights, and back.
    own = {name: one.detach().clone() for name, one in named.items()}
    for given in (ema, own):
        write(optimizer, list(named.values()), lambda values, given=given: copied(values, given))
        with torch.no_grad():
            found.append(loss_of(trained, 7, rank))
    step(7)
    write(optimizer, [weight], lambda values: values[0].fill_(0.5))
    if options:
        optimizer.close()
        trained, optimizer = made(folder, **{**options, "existing": "resume"})
    found += [one.full_tensor() for one in trained.parameters()]
    found += [one.full_tensor() for one in ema.values()]
    if options:
        optimizer.close()
    return found


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
