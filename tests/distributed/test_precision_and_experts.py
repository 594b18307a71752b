"""Tests precision policies of `fully_shard` and experts that nothing reaches: the bits of FSDP2 in memory."""

import pytest
import torch
from support.bits import same_bits
from support.ranks import on_ranks
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memascend


class Experts(nn.Module):
    """Blocks of which some are used, each a unit."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens, used, first=0):
        values = self.embed(tokens)
        for number in range(first, first + used):
            values = values + self.experts[number](values)
        return self.head(values)


def trained(store=None, *, dtype=torch.float32, policy=None, used=3, fused=True, **options):
    """All values after some steps: of FSDP2 in memory, or offloaded where there is a store.

    Without a policy of precision no mean is taken, and one process adds up the batches of three ranks.
    """
    torch.manual_seed(0)
    model = Experts().to(dtype)
    is_one = options.pop("is_one", False)
    for module in () if is_one else (*model.experts, model):
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
        if policy is None:
            # The mean of three is no exact division.
            module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    if store is not None:
        model, optimizer = memascend.offload(model, optimizer, storage=store, gradients="ssd", **options)
    for step in range(3):
        for rank in range(3) if is_one else [distributed.get_rank()]:
            generator = torch.Generator().manual_seed(3 * step + rank)
            model(torch.randint(0, 32, (4, 6), generator=generator), used).to(dtype).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [(one if is_one else one.full_tensor()).detach().clone() for one in model.parameters()]
    if store is not None:
        optimizer.close()
    return values


def train_all(folder):
    found = []
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for used in (3, 1):
            wanted = trained(policy=policy, used=used)
            found.append(all(map(same_bits, trained(f"{folder}/{dtype}-{used}", policy=policy, used=used), wanted)))
    return found


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_fsdp2_in_memory(tmp_path):
    assert on_ranks(2, train_all, tmp_path) == [[True] * 4] * 2


def doubles_of_three(folder):
    one = trained(dtype=torch.float64, fused=False, is_one=True)
    in_order = trained(f"{folder}/in-order", dtype=torch.float64, fused=False)
    in_memory = trained(dtype=torch.float64)
    fused = trained(f"{folder}/fused", dtype=torch.float64, reduction="native")
    return [all(map(same_bits, in_order, one)), all(map(same_bits, fused, in_memory))]


@pytest.mark.slow
def test_float64_on_three_ranks_is_that_of_one_process_and_fused_is_that_of_fsdp2(tmp_path):
    """Torch's fused kernel rounds the end of a tensor differently, and a rank's tensor is its rows."""
    assert on_ranks(3, doubles_of_three, tmp_path) == [[True] * 2] * 3


def own_expert(folder):
    """Each rank reaches an expert of its own, which is a unit or not: what is said, and whether anything changed."""
    rank, found, tokens = distributed.get_rank(), [], torch.zeros(2, 3, dtype=torch.long)
    for number, each in enumerate((True, False)):
        torch.manual_seed(0)
        model = Experts()
        for module in (*(model.experts if each else ()), model):
            fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/own-{number}", gradients="ssd")
        before = [parameter.full_tensor() for parameter in model.parameters()]
        model(tokens, 1, first=rank).square().mean().backward()
        with pytest.raises(memascend.UsageError, match="the ranks reached different parts of the model") as refused:
            optimizer.step()
        optimizer.zero_grad()
        after = [parameter.full_tensor() for parameter in model.parameters()]
        found.append((str(refused.value), all(map(same_bits, before, after))))
        # The run goes on.
        model(tokens, 2).square().mean().backward()
        optimizer.step()
        found.append(optimizer.steps)
        optimizer.close()
    return found


def test_experts_that_one_rank_alone_reaches_are_refused_by_name(tmp_path):
    for each, steps, whole, again in on_ranks(2, own_expert, tmp_path):
        assert (steps, again) == (1, 1)
        assert "experts.0" in each[0], each
        assert "experts.1" in each[0], each
        assert "experts.0" in whole[0], whole
        assert each[1]
        assert whole[1]
