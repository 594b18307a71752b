"""Tests users' code on several ranks: all ranks get the bits of in-memory training, or all ranks raise an error."""

import contextlib
import gc
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from support.bits import same_bits
from support.rank_models import (
    adamw,
    backward,
    divide_gradients,
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
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memascend
from memascend import ConfigError
from memascend.distributed import setup
from memascend.plan.options import Options
from memascend.session.optimizer import session_of


def require_refusals(folder):
    rank = distributed.get_rank()

    def refused(words, trained, kind=adamw, **options):
        options = {"storage": f"{folder}/refused", **options}
        with pytest.raises(memascend.MemascendError, match=words):
            memascend.offload(trained, kind(trained.parameters()), **options)

    plain = model(torch.float32)
    with torch.no_grad():
        plain[0].weight.add_(rank)
    refused("the model on rank 1 has other values", plain)
    refused("pass the module inside it", nn.parallel.DistributedDataParallel(model(torch.float32)))
    columns = parallelize_module(model(torch.float32), init_device_mesh("cpu", (2,)), {"3": ColwiseParallel()})
    refused("Tensor parallelism", columns)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    refused("a mesh of 1 of 2 ranks", fully_shard(model(torch.float32), mesh=mesh["shard"]))
    refused("put {rank}", sharded(torch.float32), storage=[f"{folder}/same.store"])
    # Both ranks get LOCAL_RANK 0, as on two hosts.
    os.environ["LOCAL_RANK"] = "0"
    refused("rank 0 and to rank 1", sharded(torch.float32), storage=f"{folder}/twice-{{local_rank}}")
    os.environ["LOCAL_RANK"] = str(rank)
    refused("Adafactor needs whole parameters", sharded(torch.float32), torch.optim.Adafactor)
    refused("within a block of 256", fully_shard(nn.Linear(40, 110)), state="8bit")
    # Only rank 1 has a host_memory that is too small, but both ranks raise an error.
    refused("" if rank else "the call failed on rank 1", sharded(torch.float32), host_memory=1 if rank else None)
    # Waits until all ranks have removed their unfinished stores.
    distributed.barrier()
    assert not list(Path(folder).rglob("*.store"))


def require_reads_and_no_writes(folder):
    """Requires that offloaded weights can be read, and that writes to them inside a forward are rejected.

    Also requires errors for replaced weights, a gradient divide factor that rounds, and a forward after `close()`.
    """
    rank = distributed.get_rank()
    trained = sharded(torch.float32)
    optimizer = adamw(trained.parameters())
    values = whole(trained)
    trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/run")
    assert all(map(same_bits, values, whole(trained)))
    rows = [one.to_local().clone() for one in trained.state_dict().values()]
    assert all(map(same_bits, [one.to_local().clone() for one in trained.parameters()], rows))
    *_, last = trained.parameters()
    raised = []

    def inside(*_):
        with pytest.raises(memascend.UsageError, match=r"is offloaded and cannot be written to by mul_\(\)"):
            last.mul_(2.0)
        with pytest.raises(memascend.UsageError, match=r"t\(\) needs their memory while the model computes"):
            last.detach().t()
        raised.append(True)

    hook = trained[0].register_forward_hook(inside)
    with torch.no_grad():
        loss_of(trained, 0, rank)
    hook.remove()
    assert raised
    with pytest.raises(memascend.UsageError):
        trained.load_state_dict(trained.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        trained.double()
    divide_gradients(trained, by=3.0)
    with pytest.raises(memascend.UsageError, match=r"(?s)by 3, which rounds.*set_gradient_divide_factor\(1\.0\)"):
        loss_of(trained, 0, rank)
    with torch.no_grad():
        loss_of(trained, 0, rank)
    divide_gradients(trained, by=2.0)
    # `optimizer.clip_grad_norm_` returns the norm over all ranks.
    loss_of(trained, 0, rank).backward()
    whole_model = model(torch.float32)
    sum(loss_of(whole_model, 0, micro) / 2 for micro in range(2)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(whole_model.parameters(), 0.01)
    assert torch.allclose(optimizer.clip_grad_norm_(0.01).full_tensor(), wanted)
    optimizer.step()
    optimizer.close()
    with pytest.raises(memascend.UsageError):
        loss_of(trained, 0, rank)


def require_finite_norms(folder, **options):
    """Requires that `step()` raises an error if gradients are not finite.

    With `nonfinite="skip"`, `step()` must skip the step instead.
    """
    rank, skips = distributed.get_rank(), "nonfinite" in options
    trained, optimizer = offloaded(folder, **options)
    backward(trained, 0)
    optimizer.step()
    optimizer.zero_grad()
    values = whole(trained)
    if skips:
        (loss_of(trained, 1, 0) * math.nan).backward()
        optimizer.step()
    else:
        backward(trained, 1)
        if rank:
            *_, last = trained.parameters()
            session_of(optimizer).sharding.leaf_of(last).grad.mul_(math.nan)
        with pytest.raises(
            memascend.UsageError, match="step 2 was not committed: the norm of its gradients is nan"
        ) as no:
            optimizer.step()
        assert ("(not finite: " in str(no.value)) == (rank == 1)
    optimizer.zero_grad()
    assert all(map(same_bits, values, whole(trained)))
    assert (optimizer.steps, optimizer.overflowed) == (1, skips)
    backward(trained, 1)
    optimizer.step()
    assert optimizer.steps == 2
    optimizer.close()


@ranks(2)
def test_all_ranks_reject_unsupported_models_writes_and_nonfinite_norms(folder):
    require_refusals(folder)
    require_reads_and_no_writes(folder)
    require_finite_norms(f"{folder}/clips", max_grad_norm=1.0)
    require_finite_norms(f"{folder}/keeps", gradients="ssd")
    require_finite_norms(f"{folder}/skips", gradients="fused", nonfinite="skip")


# --- gradient hooks, which see the sum over all ranks --------------------------------------------------

CUSTOM = r"set_custom_reduce_scatter\(\) was called on 1"


def double(parameter):
    parameter.grad.mul_(2)


class Doubling(DefaultReduceScatter):
    """Stands for a reduce-scatter that a user wrote."""


def trained_with_hooks(folder=None, *, before=False, after=False, **options):
    """Trains offloaded, or in memory if `folder` is None; returns the final values.

    `before` and `after` say whether gradient hooks are registered before and after `offload()`. The sum of two ranks'
    gradients has the same bits in either order.
    """
    found = sharded(torch.float32)
    optimizer = adamw(found.parameters())
    for parameter in found.parameters() if before else ():
        parameter.register_post_accumulate_grad_hook(double)
    if folder is not None:
        found, optimizer = memascend.offload(found, optimizer, storage=folder, **options)
    for parameter in found.parameters() if after else ():
        parameter.register_post_accumulate_grad_hook(double)
    for number in range(2):
        backward(found, number)
        optimizer.step()
        optimizer.zero_grad()
    values = whole(found)
    if folder is not None:
        optimizer.close()
    return values


def require_refused(folder, words, prepare, make=sharded, **options):
    mine = make(torch.float32)
    prepare(mine)
    values = [parameter.detach().clone() for parameter in mine.parameters()]
    with pytest.raises(memascend.MemascendError, match=words):
        memascend.offload(mine, adamw(mine.parameters()), storage=f"{folder}/refused", **options)
    assert all(map(torch.equal, values, mine.parameters()))


@ranks(2)
def test_hooks_see_the_sum_of_all_ranks_or_are_rejected(folder):
    """Training with a hook must give the same values as with FSDP2 in memory, unless memascend rejects the hook."""
    ways = "(?s)set_all_reduce_hook\\(\\) was called on 1.*reduction='native'"
    require_refused(folder, ways, lambda mine: mine[1].set_all_reduce_hook(lambda sums: sums.mul_(2)))
    for options in ({}, {"reduction": "native"}):
        require_refused(folder, CUSTOM, lambda mine: mine[1].set_custom_reduce_scatter(Doubling()), **options)
    hooked = r"1\.0\.weight has a hook of register_post_accumulate_grad_hook\(\)"
    require_refused(folder, hooked, lambda mine: mine[1][0].weight.register_post_accumulate_grad_hook(double))
    new = r"1\.0\.weight has a gradient hook, and fully_shard\(\) makes new parameters"
    require_refused(folder, new, lambda mine: mine[1][0].weight.register_hook(lambda one: 2 * one), model)
    wanted = trained_with_hooks(before=True)
    assert not all(map(same_bits, wanted, trained_with_hooks()))
    for name, options in {
        "native": {"before": True, "reduction": "native", "gradients": "ssd"},
        "ssd": {"after": True, "gradients": "ssd"},
        "ram": {"after": True, "gradients": "ram"},
    }.items():
        assert all(map(same_bits, trained_with_hooks(f"{folder}/{name}", **options), wanted)), name
    mine = sharded(torch.float32)
    mine, optimizer = memascend.offload(mine, adamw(mine.parameters()), storage=f"{folder}/later")
    with optimizer:
        mine[1].set_custom_reduce_scatter(Doubling())
        with pytest.raises(memascend.MemascendError, match=CUSTOM):
            loss_of(mine, 0, 0)


# --- aliases of weights, which are rejected, and of gradients, which work ------------------------------


# Ways to make a tensor that shares memory with a weight. Before torch 2.15, `to_local()` without a graph returned
# `_local_tensor` itself.
VIEW = {"view": lambda p: p.detach()}
ROWS = {
    "rows": lambda p: p.to_local(),
    "rows without a graph": torch.no_grad()(lambda p: p.to_local()),
    "very rows": lambda p: p._local_tensor,
}


@ranks(2)
def test_alias_of_a_weight_on_one_rank_is_rejected_on_all_ranks(folder):
    """Both ranks must reject each alias.

    Once all aliases are deleted, a sharded model and a model that is not sharded train with the same loss.
    """
    rank, losses = distributed.get_rank(), []
    for make, ways in ((sharded, VIEW | ROWS), (model, VIEW)):
        trained = make(torch.float32)
        optimizer = adamw(trained.parameters())
        for take in ways.values():
            kept = take(trained[0].weight) if rank else None
            words = "(?s)0.weight shares memory" if rank else "(?s)the call failed on rank 1.*0.weight shares memory"
            with pytest.raises(memascend.MemascendError, match=words):
                memascend.offload(trained, optimizer, storage=f"{folder}/{make.__name__}", gradients="ssd")
            del kept
            gc.collect()
        trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/{make.__name__}", gradients="ssd")
        with optimizer:
            loss = loss_of(trained, 0, rank)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def flat_views(trained):
    """Makes this rank's rows of each gradient a view of one buffer; returns the buffer."""
    parameters = list(trained.parameters())
    flat = torch.zeros(sum(one.to_local().numel() for one in parameters))
    begin = 0
    for one in parameters:
        rows = one.to_local()
        own = flat[begin : begin + rows.numel()].view(rows.shape)
        one.grad = DTensor.from_local(own, one.device_mesh, one.placements, shape=one.shape, stride=one.stride())
        begin += rows.numel()
    return flat


@ranks(2)
def test_gradients_that_are_views_of_one_buffer_train_as_in_memory(folder):
    """The loop reads its gradients from one buffer.

    In each mode, the loop must read the same gradients as in memory, and end with the same weights.
    """
    wanted = []
    for mode in (None, "ssd", "ram", "auto", "fused"):
        trained = sharded(torch.float32)
        # SGD's bits do not depend on an element's position in a SIMD vector.
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        if mode is not None:
            trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/{mode}", gradients=mode)
        flat, seen = flat_views(trained), []
        for number in range(3):
            backward(trained, number)
            seen.append(flat.clone())
            flat.mul_(0.5)
            optimizer.step()
            if number:
                flat.zero_()
            else:
                optimizer.zero_grad(set_to_none=False)
        assert all(one.any() for one in seen)
        found = [*seen, *whole(trained)]
        wanted = wanted or found
        assert all(map(same_bits, found, wanted)), mode
        if mode is not None:
            optimizer.close()


# --- a torch without FSDP2's private names -------------------------------------------------------------


def begin():
    model = nn.Linear(2, 2)
    with contextlib.ExitStack() as undo:
        return setup.begin(model, torch.optim.SGD(model.parameters()), Options(), undo)


def test_torch_without_fsdp2_internals_fails_only_for_sharded_models(monkeypatch):
    for name in ("memascend.distributed.fsdp", "memascend.distributed.sharding"):
        monkeypatch.setitem(sys.modules, name, None)
    assert begin()[0] is None
    monkeypatch.setattr(setup, "_is_sharded", lambda _: True)
    with pytest.raises(ConfigError, match=r"does not work with FSDP2 of torch .*: use a torch version"):
        begin()


# --- reads and writes between steps --------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# The number of micro-batches that all ranks together run in a step.
MICRO_BATCHES = 2


def made(folder, **options):
    """Returns a sharded model of kind "odd", whose shards differ in size, and its optimizer.

    If `options` are given, the model is offloaded with these options.
    """
    trained = shard(model(torch.float32, "odd"))
    # SGD's bits do not depend on an element's position in a SIMD vector.
    optimizer = torch.optim.SGD(trainable(trained), lr=0.1, momentum=0.9)
    if options:
        trained, optimizer = memascend.offload(trained, optimizer, storage=folder, timeout=60.0, **options)
    return trained, optimizer


def local(one):
    return getattr(one, "_local_tensor", one)


@torch.no_grad()
def write(optimizer, parameters, do):
    """Calls `do` with this rank's rows of `parameters`. For an offloaded run, the call is inside `optimizer.edit`."""
    if isinstance(optimizer, memascend.OffloadedOptimizer):
        with optimizer.edit(parameters) as values:
            do(values)
    else:
        do([local(one) for one in parameters])


def within(trained, do, *, modify=True):
    with memascend.materialized(trained, modify=modify), torch.no_grad():
        do()


def replaced(trained, factor, *, same_kind=True):
    """Replaces each parameter by itself times `factor`.

    If `same_kind` is false, replaces each parameter by a tensor of zeros that is not sharded.
    """
    for module in trained.modules():
        for short, one in list(module.named_parameters(recurse=False)):
            values = one.detach() * factor if same_kind else torch.zeros(one.shape)
            setattr(module, short, torch.nn.Parameter(values, one.requires_grad))


def require_the_doors(trained, optimizer):
    """Requires errors for writes outside `edit` and `materialized`.

    Also requires that all ranks undo an edit that fails on one rank.
    """
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
        within(trained, lambda: replaced(trained, 2.0, same_kind=rank == 0))
    trained[3].bias = own
    within(trained, lambda: replaced(trained, 1.0))
    assert all(map(same_bits, before, whole(trained)))


@ranks(2)
def test_weight_write_outside_edit_is_rejected_and_failed_edit_is_undone(folder):
    trained = sharded(torch.float32)
    trained, optimizer = memascend.offload(trained, adamw(trained.parameters()), storage=f"{folder}/s", timeout=60.0)
    with optimizer:
        require_the_doors(trained, optimizer)
        backward(trained, 0)
        optimizer.step()
        assert optimizer.steps == 1


@torch.no_grad()
def change_in_place(trained, rank, *, offloads):
    """Changes weights in place by several operations of torch.

    If `offloads` is true, a forward inside `materialized` must compute with the changed weights.
    """
    kept = trained.embed.weight.detach()
    with memascend.materialized(trained, modify=True) if offloads else contextlib.nullcontext():
        named = dict(trained.named_parameters())
        # The head shares the embedding's weight. The factor 1 leaves the bits of the bias unchanged.
        named["embed.weight"].mul_(2)
        named["narrow.2.bias"].mul_(1)
        named["narrow.0.weight"].data.add_(0.25)
        torch._foreach_mul_([named["frozen.weight"], named["frozen.bias"]], 0.5)
        local(named["narrow.2.weight"]).detach().view(torch.int32).numpy()[...] ^= 1
        # The run in memory skips this forward. Without a backward, FSDP2 would leave the run's parameters gathered.
        inside = loss_of(trained, 7, rank) if offloads else None
        del named
    # `kept` is a view that was made before the change. `kept` must read the new values.
    assert torch.equal(kept.full_tensor(), trained.embed.weight.full_tensor())
    assert inside is None or loss_of(trained, 7, rank).item() == inside.item()


def loop(folder, options):
    """Trains, and reads and writes weights between steps in many ways.

    Returns the losses, the values that were read, and the final values.
    """
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
            # Updates the moving averages with one foreach operation, and then one by one.
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
    # Loads weights from rank 0, as training loops do.
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
    # Evaluates with the averages, and then with the model's own weights again.
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
def test_weight_reads_and_writes_between_steps_equal_memory_in_every_mode(tmp_path, count):
    """With four ranks, one rank has no rows of some weights.

    `reduction="native"` makes the offloaded runs add gradients as FSDP2 in memory does.
    """
    cases = [{"gradients": "ssd"}, {"gradients": "fused"}, {"gradients": "ram", "durability": "none"}]
    cases += [{"gradients": "ssd", "host_memory": "1GiB", "log_steps": 3}]
    on_ranks(count, loops, tmp_path, [{**case, "reduction": "native"} for case in cases])


# --- within materialized() ----------------------------------------------------------------------


def faults(folder):
    """Rank 1 raises an error inside `materialized()`, and in the end is killed inside `materialized()`.

    Rank 0 must raise errors that name rank 1.
    """
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
