"""Tests precision policies of `fully_shard` and experts that nothing reaches: the bits of FSDP2 in memory."""

import pytest
import torch
from support.bits import same_bits
from support.rank_models import position, whole
from support.ranks import on_ranks, ranks
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


def trained(store=None, *, dtype=torch.float32, policy=None, used=3, fused=True, is_one=False, **options):
    """All values after some steps: of FSDP2 in memory, or offloaded where there is a store.

    Without a policy of precision no mean is taken, and one process adds up the batches of three ranks.
    """
    torch.manual_seed(0)
    model = Experts().to(dtype)
    for module in () if is_one else (*model.experts, model):
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
        if policy is None:
            # The mean of three is no exact division.
            module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    if store is not None:
        model, optimizer = memascend.offload(model, optimizer, storage=store, gradients="ssd", **options)
    for step in range(3):
        for rank in range(3) if is_one else [position()[0]]:
            generator = torch.Generator().manual_seed(3 * step + rank)
            model(torch.randint(0, 32, (4, 6), generator=generator), used).to(dtype).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = whole(model)
    if store is not None:
        optimizer.close()
    return values


def train_all(folder):
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for used in (3, 1):
            wanted = trained(policy=policy, used=used)
            assert all(map(same_bits, trained(f"{folder}/{dtype}-{used}", policy=policy, used=used), wanted))


def doubles_of_three(folder):
    """Torch's fused kernel rounds the end of a tensor differently, and a rank's tensor is its rows."""
    one = trained(dtype=torch.float64, fused=False, is_one=True)
    assert all(map(same_bits, trained(f"{folder}/in-order", dtype=torch.float64, fused=False), one))
    fused = trained(f"{folder}/fused", dtype=torch.float64, reduction="native")
    assert all(map(same_bits, fused, trained(dtype=torch.float64)))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "do"), [(2, train_all), (3, doubles_of_three)])
def test_ranks_have_the_bits_of_fsdp2_in_memory_and_float64_those_of_one_process(tmp_path, count, do):
    on_ranks(count, do, tmp_path)


@ranks(2)
def test_experts_that_one_rank_alone_reaches_are_refused_by_name(folder):
    """Each rank reaches an expert of its own, which is a unit or not: that is refused, and the run goes on."""
    rank, tokens = distributed.get_rank(), torch.zeros(2, 3, dtype=torch.long)
    for each in (True, False):
        torch.manual_seed(0)
        model = Experts()
        for module in (*(model.experts if each else ()), model):
            fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/own-{each}", gradients="ssd")
        before = whole(model)
        model(tokens, 1, first=rank).square().mean().backward()
        with pytest.raises(memascend.UsageError, match="the ranks reached different parts of the model") as refused:
            optimizer.step()
        assert "experts.0" in str(refused.value)
        assert "experts.1" in str(refused.value) or not each
        optimizer.zero_grad()
        assert all(map(same_bits, before, whole(model)))
        model(tokens, 2).square().mean().backward()
        optimizer.step()
        assert optimizer.steps == 1
        optimizer.close()
