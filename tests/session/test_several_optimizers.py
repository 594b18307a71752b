"""Tests several optimizers of one model against the same optimizers in memory, bit for bit.

tests/parity/machine.py tests optimizers of torch. This file tests optimizers that update several parameters together,
and optimizers that use zeros in place of a missing gradient.
"""

import copy
import logging

import pytest
import torch
from optim.test_shared import ScheduleFree
from parity.reference import Reference
from support.bits import same_bits
from support.chains import chain, loss_of, offloaded, require_same, step
from support.orthogonal import BatchedMuon, CoupledStack, LowRank, MuonOfRanks, MuonWithAdam, StackedMuonWithAdam
from torch.optim.lr_scheduler import StepLR

from memascend import ConfigError, UsageError


def made(dtype=torch.float32):
    return chain(4, bias=True, dtype=dtype)


def parts(parameters):
    """Returns two lists: the matrices among `parameters`, and the remaining parameters."""
    parameters = list(parameters)
    return [one for one in parameters if one.dim() == 2], [one for one in parameters if one.dim() != 2]


def muon_and_adamw(parameters, **_):
    matrices, rest = parts(parameters)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def by_zeros(parameters, **_):
    matrices, rest = parts(parameters)
    groups = [{"params": matrices, "use_muon": True}]
    return [MuonWithAdam(groups), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def with_aux_adam(parameters, kind=MuonWithAdam, **_):
    matrices, rest = parts(parameters)
    return [kind([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False, "lr": 1e-2}])]


def in_stacks(parameters, kind=StackedMuonWithAdam, **_):
    matrices, rest = parts(parameters)
    stacks = matrices[::2], matrices[1::2]
    groups = [{"params": stack, "kind": "muon", "lr": 0.02, "weight_decay": 0.1} for stack in stacks]
    groups += [{"params": [one], "kind": "adam", "lr": 0.01 * (at + 1), "weight_decay": 0.0}
               for at, one in enumerate(rest[:2])]  # fmt: skip
    return [kind(groups), torch.optim.SGD(rest[2:], lr=0.05, momentum=0.9)]


def in_batches(parameters, **_):
    matrices, rest = parts(parameters)
    return [BatchedMuon(matrices[:2]), BatchedMuon(matrices[2:], lr=0.01), torch.optim.RMSprop(rest, lr=1e-3)]


def turn(model, members, index, missing=()):
    """Runs a backward and the steps of all `members`.

    The parameters named in `missing` have no gradient in this step.
    """
    loss_of(model, index).backward()
    for name in missing:
        model.get_parameter(name).grad = None
    for member in members:
        member.step()
    model.zero_grad()


def compared(optimizers, path, *, dtype=torch.float32, missing=(), **options):
    """Trains in memory and offloaded, and requires equal bits. The offloaded run is resumed before the third step."""
    plain = made(dtype)
    theirs = optimizers(plain.parameters())
    if dtype != torch.float32:
        theirs = [Reference(one) for one in theirs]
    schedulers = [StepLR(one, 2, 0.5) for one in theirs]
    for index in range(4):
        if index in (0, 2):
            model, optimizer = offloaded(path, made(dtype), optimizers, existing="resume", **options)
            optimizer.schedule(*(StepLR(one, 2, 0.5) for one in optimizer.members))
            assert optimizer.steps == index
        for one, members in ((plain, theirs), (model, [optimizer])):
            turn(one, members, index, missing if index in (1, 2) else ())
        for scheduler in schedulers:
            scheduler.step()
        rates = [group["lr"] for one in theirs for group in one.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == rates
        require_same(plain, model)
        if index in (1, 3):
            optimizer.close()


BF16, NONE = {"dtype": torch.bfloat16}, {"durability": "none", "host_memory": "64MiB"}
# The names of two parameters that have no gradient in some steps. MuonWithAdam uses zeros in place of a missing
# gradient. AdamW skips a parameter without a gradient.
MISSING = {"missing": ("1.weight", "1.bias")}


@pytest.mark.parametrize(
    ("optimizers", "options"),
    [
        (by_zeros, {"gradients": "ram", **BF16}),
        (by_zeros, {"gradients": "ssd", **MISSING}),
        (with_aux_adam, {"gradients": "fused", **MISSING}),
        (with_aux_adam, {"gradients": "auto", **NONE}),
        (in_stacks, {"gradients": "fused", **NONE}),
        (in_stacks, {"gradients": "ssd", **BF16}),
        (in_batches, {"gradients": "fused", **BF16}),
    ],
)
def test_step_of_several_optimizers_equals_torch(tmp_path, optimizers, options):
    compared(optimizers, tmp_path / "store", **options)


def test_muon_of_ranks_equals_torch_in_a_process_group_of_one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        compared(lambda given, **_: with_aux_adam(given, MuonOfRanks), tmp_path / "store", gradients="ssd")
    finally:
        torch.distributed.destroy_process_group()


# --- one optimizer for all ----------------------------------------------------------------


def test_returned_optimizer_steps_all_members_and_member_step_raises(tmp_path):
    model, optimizer = offloaded(tmp_path / "store", made(), lambda *given, **_: tuple(muon_and_adamw(*given)))
    members = optimizer.members
    with optimizer:
        assert [id(group) for group in optimizer.param_groups] == [id(one.param_groups[0]) for one in members]
        received = []
        members[1].register_step_post_hook(lambda *_: received.append("member"))
        optimizer.register_step_post_hook(lambda *_: received.append("all"))

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        assert received == ["member", "all"]
        for member in members:
            with pytest.raises(UsageError, match=r"call step\(\) of the returned optimizer"):
                member.step()
            with pytest.raises(UsageError, match=r"of the optimizer that offload\(\) returned"):
                member.state_dict()
        members[0].param_groups[0]["params"].pop()
        with pytest.raises(UsageError, match="or their parameters, were changed"):
            optimizer.step()


def refused(tmp_path, optimizers, says, **options):
    model = made()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=says):
        offloaded(tmp_path / "store", model, optimizers, **options)
    assert all(same_bits(before[name], value) for name, value in model.state_dict().items())


UNJOINED = {
    "none": (lambda _: [], "list of optimizers is empty"),
    "no optimizer": (lambda given: [torch.optim.AdamW(given), 3], r"optimizer\[1\] must be"),
    "twice": (lambda given: 2 * [torch.optim.AdamW(given)], r"optimizer\[1\] is in the list twice"),
    "of two": (
        lambda given: [*muon_and_adamw(given), torch.optim.SGD(given[:1])],
        r"0\.weight is owned by two of the optimizers \(Muon and SGD\)",
    ),
    "of none": (
        lambda given: muon_and_adamw(given)[:1], r"does not own 4 trainable.*offload\(model, \[first, second\]",
    ),
    "coupled": (lambda given: in_stacks(given, CoupledStack), "CoupledStack.*depends on other parameters"),
    "random": (lambda given: [LowRank(parts(given)[0]), torch.optim.AdamW(parts(given)[1])], "LowRank.*draws random"),
}  # fmt: skip


@pytest.mark.parametrize(("join", "says"), UNJOINED.values(), ids=UNJOINED)
def test_offload_rejects_optimizers_that_cannot_be_joined(tmp_path, join, says):
    refused(tmp_path, lambda given, **_: join(list(given)), says)
    assert not list(tmp_path.iterdir())


def test_offload_rejects_existing_state_of_a_stacked_optimizer(tmp_path):
    model = made()
    members = in_stacks(model.parameters())
    turn(model, members, 0)
    with pytest.raises(ConfigError, match="start without this state"):
        offloaded(tmp_path / "store", model, lambda *_, **__: members)
    assert members[0].state


def test_members_with_named_parameters_keep_their_state_at_offload(tmp_path):
    plain, model = made(), made()
    named = [(name, one) for name, one in model.named_parameters() if one.dim() == 2]
    rest = torch.optim.AdamW(parts(model.parameters())[1], lr=1e-2, fused=True)
    theirs, members = muon_and_adamw(plain.parameters()), [torch.optim.Muon(named, lr=0.02), rest]
    turn(model, members, 0)
    turn(plain, theirs, 0)
    model, optimizer = offloaded(tmp_path / "store", model, lambda *_, **__: members)
    with optimizer:
        for index in (1, 2):
            turn(plain, theirs, index)
            turn(model, [optimizer], index)
        require_same(plain, model)


# --- stores and checkpoints, formats and modes -----------------------------------------------


@pytest.mark.parametrize(
    "then", [lambda given, **_: muon_and_adamw(given)[::-1], lambda given, **_: torch.optim.AdamW(given)]
)
def test_resume_and_checkpoint_reject_other_optimizers_than_stored(tmp_path, then):
    says = r"Muon \+ AdamW"
    model, optimizer = offloaded(tmp_path / "store", made(), muon_and_adamw)
    step(model, optimizer)
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    content = (tmp_path / "store").read_bytes()
    refused(tmp_path, then, says, existing="resume")
    assert (tmp_path / "store").read_bytes() == content
    (tmp_path / "store").unlink()
    refused(tmp_path, then, says, checkpoint=tmp_path / "saved")


def test_state_format_applies_only_to_members_that_support_it(tmp_path, caplog):
    def optimizers(parameters, **_):
        matrices, rest = parts(parameters)
        return [torch.optim.Adagrad(matrices[:1]), *muon_and_adamw(matrices[1:] + rest)]

    with caplog.at_level(logging.WARNING, "memascend"):
        model, optimizer = offloaded(tmp_path / "store", made(torch.bfloat16), optimizers, state="bf16")
    assert "state='bf16' has no effect on the state of torch.optim.Adagrad" in caplog.text
    assert "Muon" not in caplog.text
    with optimizer:
        step(model, optimizer)
        assert optimizer.state_of(model[0].weight)["sum"].dtype == torch.float32
        formats = {one["name"]: one["format"] for one in optimizer._session.run.resources.store.records()}
        assert formats["1.weight"] == formats["1.bias"] == "compact bf16"
        assert not formats["0.weight"]


def test_train_and_eval_switch_the_member_that_has_modes(tmp_path):
    def optimizers(parameters, **_):
        matrices, rest = parts(parameters)
        own = ScheduleFree(matrices)
        own.train()
        return [own, torch.optim.AdamW(rest, lr=1e-2, fused=True)]

    plain = made()
    theirs = optimizers(plain.parameters())
    model, optimizer = offloaded(tmp_path / "store", made(), optimizers)
    with optimizer:
        for index in range(3):
            turn(plain, theirs, index)
            turn(model, [optimizer], index)
            for mode in ("eval", "train"):
                getattr(theirs[0], mode)()
                getattr(optimizer, mode)()
                require_same(plain, model)
