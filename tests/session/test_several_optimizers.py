"""Tests several optimizers of one model, beside the same optimizers in memory, bit for bit."""

import copy
import logging

import pytest
import torch
from optim.test_shared import ScheduleFree
from parity.reference import Reference
from support.bits import same_bits
from support.orthogonal import (
    BatchedMuon,
    CoupledStack,
    LowRank,
    MuonAlone,
    MuonOfRanks,
    MuonWithAdam,
    StackedMuonWithAdam,
)
from torch import nn

import memascend
from memascend import ConfigError, UsageError

GRADIENTS = ("fused", "ssd", "ram", "auto")
WIDTH = 32


def made(dtype=torch.float32):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(16, WIDTH), *blocks, nn.LayerNorm(WIDTH)).to(dtype)


def parts(named):
    """The matrices within, and the rest."""
    matrices = [one for name, one in named.items() if one.dim() == 2 and name != "0.weight"]
    return matrices, [one for name, one in named.items() if one.dim() != 2 or name == "0.weight"]


def muon_and_adamw(named):
    matrices, rest = parts(named)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def two_alike(named):
    matrices, rest = parts(named)
    groups = [{"params": matrices[:2], "lr": 1e-3}, {"params": matrices[2:]}]
    return [torch.optim.AdamW(groups, lr=1e-2, fused=True), torch.optim.AdamW(rest, lr=1e-4, fused=True)]


def by_zeros(named):
    matrices, rest = parts(named)
    return [MuonAlone(matrices), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def with_aux_adam(named, kind=MuonWithAdam):
    matrices, rest = parts(named)
    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False, "lr": 1e-2}]
    return [kind(groups)]


def in_stacks(named, kind=StackedMuonWithAdam):
    matrices, rest = parts(named)
    shapes = sorted({tuple(one.shape) for one in matrices})
    stacks = [[one for one in matrices if tuple(one.shape) == shape] for shape in shapes]
    groups = [{"params": stack, "kind": "muon", "lr": 0.02, "weight_decay": 0.1} for stack in stacks]
    groups += [{"params": [one], "kind": "adam", "lr": 0.01 * (at + 1), "weight_decay": 0.0}
               for at, one in enumerate(rest[:2])]  # fmt: skip
    return [kind(groups), torch.optim.SGD(rest[2:], lr=0.05, momentum=0.9)]


def in_batches(named):
    matrices, rest = parts(named)
    return [BatchedMuon(matrices), torch.optim.RMSprop(rest, lr=1e-3)]


# The state machine has Muon beside AdamW, and three classes.
OPTIMIZERS = {one.__name__: one for one in (two_alike, by_zeros, with_aux_adam, in_stacks, in_batches)}


def loss_of(model, index):
    inputs = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(index))
    return model(inputs).float().pow(2).mul(torch.arange(WIDTH)).mean()


class InMemory:
    """The same optimizers without offloading: 16-bit parameters have masters, as `offload()` gives them."""

    def __init__(self, optimizers, dtype):
        self.model = made(dtype)
        self.members = optimizers(dict(self.model.named_parameters()))
        if dtype != torch.float32:
            self.members = [Reference(member) for member in self.members]

    def step(self):
        for member in self.members:
            member.step()

    def zero_grad(self):
        self.model.zero_grad()


def turn(run, model, index, *, clips=False, missing=()):
    for micro in range(2 if clips else 1):
        loss_of(model, 2 * index + micro).backward()
    named = dict(model.named_parameters())
    for name in missing:
        named[name].grad = None
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    run.step()
    run.zero_grad()


def schedulers(members):
    return [torch.optim.lr_scheduler.StepLR(member, 2, 0.5) for member in members]


def require_same(memory, model):
    with memascend.materialized(model):
        values = dict(model.named_parameters())
        differ = [name for name, one in memory.model.named_parameters() if not same_bits(one, values[name])]
    assert not differ


def compared(optimizers, path, *, dtype=torch.float32, steps=4, resumes=None, missing=(), clips=False, **options):
    """Train in memory and offloaded, closed and opened again before step `resumes`; the bits are the same."""
    memory = InMemory(optimizers, dtype)
    model = made(dtype)
    members = optimizers(dict(model.named_parameters()))
    in_memory, own = schedulers(memory.members), schedulers(members)
    model, optimizer = memascend.offload(model, members, storage=path, **options)
    optimizer.schedule(*own)
    for index in range(steps):
        if index == resumes:
            optimizer.close()
            model = made(dtype)
            members = optimizers(dict(model.named_parameters()))
            more = {**options, "existing": "resume"}
            model, optimizer = memascend.offload(model, members, storage=path, **more)
            optimizer.schedule(*schedulers(members))
        assert optimizer.steps == index
        turn(memory, memory.model, index, clips=clips, missing=missing if index in (1, 2) else ())
        turn(optimizer, model, index, clips=clips, missing=missing if index in (1, 2) else ())
        for scheduler in in_memory:
            scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == [
            group["lr"] for member in memory.members for group in member.param_groups
        ]
    require_same(memory, model)
    optimizer.close()


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
@pytest.mark.parametrize("optimizers", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_is_that_of_all_members_in_memory(tmp_path, optimizers, gradients):
    compared(optimizers, tmp_path / "store", gradients=gradients, resumes=2)


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
@pytest.mark.parametrize("optimizers", [by_zeros, with_aux_adam])
def test_a_missing_gradient_is_what_the_member_takes_it_for(tmp_path, optimizers, gradients):
    compared(optimizers, tmp_path / "store", gradients=gradients, missing=("2.0.weight", "2.0.bias"))


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("optimizers", [by_zeros, with_aux_adam, in_stacks])
def test_each_combination_has_the_bits_of_memory(tmp_path, optimizers, gradients, dtype, budget, durability):
    """Of optimizers whose parameters go together, or take zeros for a gradient: the state machine has the others."""
    options = {"gradients": gradients, "host_memory": budget, "durability": durability}
    compared(optimizers, tmp_path / "store", dtype=dtype, steps=5, resumes=3, **options)
    if gradients in ("ssd", "ram"):
        compared(optimizers, tmp_path / "other", dtype=dtype, clips=True, resumes=2, **options)


def of_ranks(named):
    return with_aux_adam(named, MuonOfRanks)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_an_optimizer_that_divides_its_parameters_streams_in_a_group_of_one_rank(tmp_path, gradients):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        compared(of_ranks, tmp_path / "store", gradients=gradients, resumes=2)
    finally:
        torch.distributed.destroy_process_group()


# --- one optimizer for all ----------------------------------------------------------------


def test_the_returned_optimizer_has_all_groups_and_the_originals_none_of_the_steps(tmp_path):
    model = made()
    members = muon_and_adamw(dict(model.named_parameters()))
    model, optimizer = memascend.offload(model, tuple(members), storage=tmp_path / "store")
    assert optimizer.members == tuple(members)
    assert [id(group) for group in optimizer.param_groups] == [id(one.param_groups[0]) for one in members]
    heard = []
    members[1].register_step_post_hook(lambda *_: heard.append("member"))
    optimizer.register_step_post_hook(lambda *_: heard.append("all"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert heard == ["member", "all"]
    for member in members:
        with pytest.raises(UsageError, match="step the returned one"):
            member.step()
        with pytest.raises(UsageError, match=r"of the optimizer that offload\(\) returned"):
            member.state_dict()
    members[0].param_groups[0]["params"].pop()
    with pytest.raises(UsageError, match="other parameters"):
        optimizer.step()
    optimizer.close()


def test_groups_with_names_of_parameters_go_with_others(tmp_path):
    model = made()
    named = dict(model.named_parameters())
    ids = {id(one) for one in parts(named)[0]}
    muon = torch.optim.Muon([(name, one) for name, one in named.items() if id(one) in ids])
    model, optimizer = memascend.offload(model, [muon, torch.optim.AdamW(parts(named)[1])], storage=tmp_path / "store")
    turn(optimizer, model, 0)
    optimizer.close()


def refused(tmp_path, optimizers, says, **options):
    model = made()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=says):
        memascend.offload(model, optimizers(dict(model.named_parameters())), storage=tmp_path / "store", **options)
    assert all(same_bits(before[name], value) for name, value in model.state_dict().items())


def test_what_cannot_be_joined_is_refused(tmp_path):
    refused(tmp_path, lambda _: [], "list of optimizers is empty")
    refused(tmp_path, lambda named: [torch.optim.AdamW(named.values()), 3], r"optimizer\[1\] must be")
    refused(tmp_path, lambda named: 2 * [torch.optim.AdamW(named.values())], r"optimizer\[1\] is in the list twice")
    refused(
        tmp_path,
        lambda named: [*muon_and_adamw(named), torch.optim.SGD([named["1.0.weight"]])],
        r"1\.0\.weight is owned by two of the optimizers \(Muon and SGD\)",
    )
    refused(
        tmp_path, lambda named: muon_and_adamw(named)[:1], r"does not own 9 trainable.*offload\(model, \[one, other\]"
    )
    refused(tmp_path, lambda named: in_stacks(named, CoupledStack), "CoupledStack.*depends on the others")
    refused(
        tmp_path, lambda named: [LowRank(parts(named)[0]), torch.optim.AdamW(parts(named)[1])], "LowRank.*draws random"
    )
    refused(tmp_path, lambda named: [torch.optim.Adagrad(parts(named)[0]), torch.optim.Rprop(parts(named)[1])],
            "the optimizer is", state="bf16")  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_state_of_a_stack_that_is_there_already_is_refused(tmp_path):
    model = made()
    members = in_stacks(dict(model.named_parameters()))
    loss_of(model, 0).backward()
    members[0].step()
    with pytest.raises(ConfigError, match="start without its state"):
        memascend.offload(model, members, storage=tmp_path / "store")
    assert members[0].state


def test_state_of_the_members_moves_into_the_store(tmp_path):
    memory, model = InMemory(muon_and_adamw, torch.float32), made()
    members = muon_and_adamw(dict(model.named_parameters()))
    loss_of(model, 0).backward()
    for member in members:
        member.step()
        member.zero_grad()
    turn(memory, memory.model, 0)
    model, optimizer = memascend.offload(model, members, storage=tmp_path / "store")
    for index in (1, 2):
        turn(memory, memory.model, index)
        turn(optimizer, model, index)
    require_same(memory, model)
    optimizer.close()


# --- stores and checkpoints -----------------------------------------------------------------


def swapped(named):
    return muon_and_adamw(named)[::-1]


@pytest.mark.parametrize("then", [swapped, lambda named: torch.optim.AdamW(named.values())])
def test_what_was_made_with_other_optimizers_is_refused(tmp_path, then):
    model, says = made(), r"Muon \+ AdamW"
    members = muon_and_adamw(dict(model.named_parameters()))
    model, optimizer = memascend.offload(model, members, storage=tmp_path / "store")
    turn(optimizer, model, 0)
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    content = (tmp_path / "store").read_bytes()
    refused(tmp_path, then, says, existing="resume")
    assert (tmp_path / "store").read_bytes() == content
    (tmp_path / "store").unlink()
    refused(tmp_path, then, says, checkpoint=tmp_path / "saved")


# --- what each of them keeps ------------------------------------------------------------------


def test_formats_are_of_the_members_that_have_them(tmp_path, caplog):
    model = made(torch.bfloat16)
    matrices, rest = parts(dict(model.named_parameters()))
    optimizers = [
        torch.optim.Adagrad(matrices[:1]),
        torch.optim.Muon(matrices[1:], lr=0.02),
        torch.optim.AdamW(rest, lr=1e-2, fused=True),
    ]
    with caplog.at_level(logging.WARNING, "memascend"):
        model, optimizer = memascend.offload(model, optimizers, storage=tmp_path / "store", state="bf16")
    assert "state='bf16' does not apply to torch.optim.Adagrad" in caplog.text
    assert "Muon" not in caplog.text
    turn(optimizer, model, 0)
    records = {
        id(model.get_parameter(record["name"])): record for record in optimizer._session.run.resources.store.records()
    }
    assert records[id(rest[0])]["format"] == records[id(matrices[1])]["format"] == "compact bf16"
    assert not records[id(matrices[0])]["format"]
    assert {name: dtype for name, dtype, _ in records[id(matrices[0])]["state"]}["sum"] == "float32"
    optimizer.close()


def test_modes_are_of_the_members_that_have_them(tmp_path):
    def optimizers(named):
        matrices, rest = parts(named)
        own = ScheduleFree(matrices)
        own.train()
        return [own, torch.optim.AdamW(rest, lr=1e-2, fused=True)]

    memory, model = InMemory(optimizers, torch.float32), made()
    model, optimizer = memascend.offload(model, optimizers(dict(model.named_parameters())), storage=tmp_path / "store")
    for index in range(2):
        turn(memory, memory.model, index)
        turn(optimizer, model, index)
    memory.members[0].eval()
    optimizer.eval()
    require_same(memory, model)
    memory.members[0].train()
    optimizer.train()
    turn(memory, memory.model, 2)
    turn(optimizer, model, 2)
    require_same(memory, model)
    optimizer.close()
