"""Tests what is read from divided weights between steps, and written through doors: the bits of FSDP2 in memory."""

import contextlib
import os
import signal
import time

import pytest
import torch
from support.bits import same_bits
from support.rank_models import (
    adamw,
    backward,
    loss_of,
    model,
    offloaded,
    shard,
    sharded,
    step,
    trainable,
    whole,
)
from support.ranks import on_ranks, ranks
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import memascend

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# Of a step, on all ranks.
MICRO_BATCHES = 2


def made(folder, **options):
    """Odd, whose rows do not divide, divided; offloaded where there is a folder."""
    trained = shard(model(torch.float32, "odd"))
    # Its bits do not depend on where in a vector an element lies.
    optimizer = torch.optim.SGD(trainable(trained), lr=0.1, momentum=0.9)
    if options:
        trained, optimizer = memascend.offload(trained, optimizer, storage=folder, timeout=60.0, **options)
    return trained, optimizer


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


def within(trained, do, *, modify=True):
    with memascend.materialized(trained, modify=modify), torch.no_grad():
        do()


def replaced(trained, factor, *, alike=True):
    """Other parameters in the place of all, a multiple of theirs; those that are not alike are whole ones."""
    for module in trained.modules():
        for short, one in list(module.named_parameters(recurse=False)):
            values = one.detach() * factor if alike else torch.zeros(one.shape)
            setattr(module, short, torch.nn.Parameter(values, one.requires_grad))


def require_refusals(trained, optimizer):
    """What goes through no door is refused on each rank, and an edit that fails on one of them changes nothing."""
    weight, before = trained[0].weight, whole(trained)
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
    assert all(map(same_bits, before, whole(trained)))


@ranks(2)
def test_a_write_through_no_door_is_refused_and_one_ranks_failure_undoes_an_edit(folder):
    trained = sharded(torch.float32)
    trained, optimizer = memascend.offload(trained, adamw(trained.parameters()), storage=f"{folder}/s", timeout=60.0)
    with optimizer:
        require_refusals(trained, optimizer)
        backward(trained, 0)
        optimizer.step()
        assert optimizer.steps == 1


@torch.no_grad()
def change_in_place(trained, rank, *, offloads):
    """Change weights in the ways that torch has, which the model computes with at once."""
    kept = trained.embed.weight.detach()
    with memascend.materialized(trained, modify=True) if offloads else contextlib.nullcontext():
        named = dict(trained.named_parameters())
        # It is the head, too; the biases have the same bits.
        named["embed.weight"].mul_(2)
        named["narrow.2.bias"].mul_(1)
        named["narrow.0.weight"].data.add_(0.25)
        torch._foreach_mul_([named["frozen.weight"], named["frozen.bias"]], 0.5)
        local(named["narrow.2.weight"]).detach().view(torch.int32).numpy()[...] ^= 1
        # In memory it would leave parameters gathered.
        inside = loss_of(trained, 7, rank) if offloads else None
        del named
    # A view that was taken of a sharded weight reads its newest values.
    assert torch.equal(kept.full_tensor(), trained.embed.weight.full_tensor())
    assert inside is None or loss_of(trained, 7, rank).item() == inside.item()


def loop(folder, options):
    """The losses of a loop that does all of it, and the values at its end."""
    trained, optimizer = made(folder, **options)
    rank, found = distributed.get_rank(), []
    named = dict(trained.named_parameters())
    weight, bias = named["narrow.2.weight"], named["narrow.2.bias"]
    ema = {name: one.detach().clone() for name, one in named.items()}

    def turn(index):
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

    turn(0)
    write(optimizer, [weight, bias], lambda values: torch._foreach_mul_(values, 0.5))
    found.append(weight.detach().t().full_tensor())
    turn(1)
    write(optimizer, [bias], lambda values: values[0].add_(0.25))
    turn(2)
    found.append(torch.from_numpy(bias.to_local().detach().numpy().copy()))
    turn(3)
    # As loops load their weights.
    full = model(torch.float32, "odd").state_dict()
    set_model_state_dict(trained, full if rank == 0 else {}, options=FROM_RANK_0)
    found += get_model_state_dict(trained, options=FULL).values()
    turn(4)
    state = {name: one.clone() for name, one in trained.state_dict().items()}
    turn(5)
    trained.load_state_dict(state)
    if options:
        within(trained, lambda: replaced(trained, 0.5))
    else:
        torch._foreach_mul_([local(one.detach()) for one in trained.parameters()], 0.5)
    turn(6)
    change_in_place(trained, rank, offloads=bool(options))
    turn(7)
    # An evaluation with other weights, and back.
    own = {name: one.detach().clone() for name, one in named.items()}
    for given in (ema, own):
        rows = [local(one) for one in given.values()]
        write(optimizer, list(named.values()), lambda values, rows=rows: torch._foreach_copy_(values, rows))
        with torch.no_grad():
            found.append(loss_of(trained, 8, rank))
    turn(8)
    write(optimizer, [weight], lambda values: values[0].fill_(0.5))
    if options:
        optimizer.close()
        trained, optimizer = made(folder, **{**options, "existing": "resume"})
    found += [*whole(trained), *(one.full_tensor() for one in ema.values())]
    if options:
        optimizer.close()
    return found


def loops(folder, cases):
    wanted = loop(None, {})
    for index, options in enumerate(cases):
        same = [same_bits(one, other) for one, other in zip(wanted, loop(f"{folder}/{index}", options), strict=True)]
        assert all(same), (options, same)


def test_weights_are_read_and_written_between_steps_as_in_memory(tmp_path):
    on_ranks(2, loops, tmp_path, [{"gradients": "auto"}])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, 4])
def test_they_are_in_every_mode(tmp_path, count):
    """Of four ranks one has no rows of some weights; the backend's order is that of the run in memory."""
    cases = [{"gradients": "ssd"}, {"gradients": "fused"}, {"gradients": "ram", "durability": "none"}]
    cases += [{"gradients": "ssd", "host_memory": "1GiB", "log_steps": 3}]
    on_ranks(count, loops, tmp_path, [{**case, "reduction": "native"} for case in cases])


# --- within materialized() ----------------------------------------------------------------------


def faults(folder):
    """Rank 1 fails within the block and is named on rank 0; at last it is killed there."""
    rank = distributed.get_rank()
    trained, optimizer = offloaded(f"{folder}/faults/", of="odd", gradients="ssd", timeout=10.0)
    step(trained, optimizer, MICRO_BATCHES)
    before = whole(trained)
    for modify in (True, False):
        with pytest.raises((ZeroDivisionError, memascend.RankError)) as met:
            within(trained, lambda: (trained.embed.weight.zero_(), 1 // (1 - rank)), modify=modify)
        assert rank or met.value.ranks == (1,)
        assert all(map(torch.equal, before, whole(trained)))
    loss_of(trained, 1, rank).backward()
    with pytest.raises(memascend.UsageError, match="a step is staged"):
        within(trained, list)
    optimizer.step()
    optimizer.zero_grad()
    began = time.monotonic()
    with pytest.raises(memascend.RankError) as met:
        within(trained, lambda: trained.embed.weight.zero_() if rank == 0 else os.kill(os.getpid(), signal.SIGKILL))
    optimizer.close()
    return met.value.ranks == (1,), time.monotonic() - began < 15


def test_weights_are_changed_within_materialized_on_all_ranks_or_on_none(tmp_path):
    assert on_ranks(2, faults, tmp_path, ends=(0, -signal.SIGKILL)) == [(True, True), None]
    with memascend.engine.Store.open(tmp_path / "faults/rank-0-of-2/memascend.store") as store:
        assert store.step == 2
        assert store.read("embed.weight")[0].any()
