"""Tests whole runs of several ranks: closed and resumed, and with a rank that fails, against runs without."""

import pytest
import torch
from support.bits import same_bits
from support.ranks import on_ranks
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import memascend

TIMEOUT = 60.0


def offloaded(folder, **options):
    """A small model that is divided, and its optimizer."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(32, 16), *blocks, nn.Linear(16, 32)).to(torch.bfloat16)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    kind = options.pop("kind", torch.optim.AdamW)
    return memascend.offload(
        model, kind(model.parameters(), lr=1e-2), storage=folder, **{"timeout": TIMEOUT, **options}
    )


def backward(model, step):
    generator = torch.Generator().manual_seed(100 * step + distributed.get_rank())
    tokens = torch.randint(0, 32, (4, 6), generator=generator)
    nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()


def train(model, optimizer, until):
    """Train on to a step; the gathered values."""
    while optimizer.steps < until:
        backward(model, optimizer.steps)
        optimizer.user_state = {"step": optimizer.steps}
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


def rows(optimizer):
    """This rank's rows and their state, as its store has them."""
    store = optimizer._session.run.resources.store
    return [tensor for entry in store.entries() for tensor in _tensors(*store.read(entry["name"]))]


def _tensors(values, state):
    return [values, *state.values()]


def resumes(folder, cases):
    """Of each case, whether a run that was closed and resumed has the bits of one that was not."""
    found = []
    for number, options in enumerate(cases):
        model, optimizer = offloaded(f"{folder}/{number}-whole", **options)
        values = [*train(model, optimizer, 4), *rows(optimizer)]
        optimizer.close()
        for life, until in enumerate((1, 3, 4)):
            existing = "resume" if life else "refuse"
            model, optimizer = offloaded(f"{folder}/{number}-parts", existing=existing, **options)
            assert optimizer.user_state == ({"step": optimizer.steps - 1} if life else None)
            parts = train(model, optimizer, until)
            parts += rows(optimizer)
            optimizer.close()
        found.append(len(parts) == len(values) and all(map(same_bits, parts, values)))
    return found


def test_a_run_of_two_ranks_is_resumed(tmp_path):
    cases = [{}, {"durability": "none", "host_memory": "1GiB"}, {"host_memory": "1GiB", "log_steps": 3}]
    assert on_ranks(2, resumes, tmp_path, cases) == [[True] * len(cases)] * 2


@pytest.mark.slow
def test_runs_of_three_ranks_are_resumed(tmp_path):
    cases = [
        {**options, "durability": durability}
        for durability in ("step", "close", "none")
        for options in (
            {"gradients": "ssd"},
            {"gradients": "ram", "host_memory": "1GiB"},
            {"kind": torch.optim.RMSprop},
            {"loss_scale": None, "max_grad_norm": 0.1},
        )
    ]
    assert on_ranks(3, resumes, tmp_path, cases, seconds=300) == [[True] * len(cases)] * 3
