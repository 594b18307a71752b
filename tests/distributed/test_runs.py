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
    if distributed.get_world_size() == 3:
        # A mean over three is no exact one: the loss is divided.
        for module in (*model, model):
            module.set_gradient_divide_factor(1.0)
    kind = options.pop("kind", torch.optim.AdamW)
    return memascend.offload(
        model, kind(model.parameters(), lr=1e-2), storage=folder, **{"timeout": TIMEOUT, **options}
    )


def backward(model, step):
    generator = torch.Generator().manual_seed(100 * step + distributed.get_rank())
    tokens = torch.randint(0, 32, (4, 6), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    (loss / 3 if distributed.get_world_size() == 3 else loss).backward()


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


@pytest.mark.slow
def test_runs_of_three_ranks_are_resumed(tmp_path):
    cases = [
        {**options, "durability": durability}
        for durability in ("step", "none")
        for options in (
            {"gradients": "ssd"},
            {"gradients": "ram", "host_memory": "1GiB"},
            {"kind": torch.optim.RMSprop},
            {"loss_scale": None, "max_grad_norm": 0.1},
        )
    ]
    assert on_ranks(3, resumes, tmp_path, cases, seconds=300) == [[True] * len(cases)] * 3


# --- one rank fails ------------------------------------------------------------------------


def raised(call):
    """The error that a call raises, in words, and the ranks that it names."""
    try:
        call()
    except Exception as error:
        return [f"{type(error).__name__}: {error}", list(getattr(error, "ranks", []))]
    return None


def failing(*_, **__):
    raise OSError(5, "as if the drive were gone")


def fails(folder):
    """What ranks meet where rank 1 fails: in step(), in a gather, in a backward; and whether a step is done again."""
    faulty = distributed.get_rank() == 1
    found = {}
    model, optimizer = offloaded(f"{folder}/whole")
    values = train(model, optimizer, 3)
    optimizer.close()

    model, optimizer = offloaded(f"{folder}/run", gradients="ssd")
    train(model, optimizer, 1)
    backward(model, 1)
    buffers = optimizer._session.run.record.buffers
    if faulty:
        buffers.stage = failing
    found["step"] = raised(optimizer.step)
    if faulty:
        del buffers.stage
    optimizer.zero_grad()
    found["again"] = all(map(same_bits, train(model, optimizer, 3), values))
    residency = optimizer._session.run.residency
    if faulty:
        residency.read_into = failing
    found["gather"] = raised(lambda: backward(model, 3))
    found["after"] = raised(optimizer.step)
    optimizer.close()

    model, optimizer = offloaded(f"{folder}/run", existing="resume", gradients="ssd")
    if faulty:
        optimizer._session.run.gradients._arrive = failing
    found["backward"] = raised(lambda: backward(model, 3))
    optimizer.close()
    model, optimizer = offloaded(f"{folder}/run", existing="resume")
    found["resumed"] = optimizer.steps
    optimizer.close()
    return found


def resumes_and_fails(folder, cases):
    return resumes(folder, cases), fails(folder)


def test_a_run_is_resumed_and_a_rank_that_fails_ends_its_step_on_both_by_its_name(tmp_path):
    cases = [{}, {"durability": "none", "host_memory": "1GiB"}, {"host_memory": "1GiB", "log_steps": 3}]
    for rank, (resumed, found) in enumerate(on_ranks(2, resumes_and_fails, tmp_path, cases)):
        assert resumed == [True] * len(cases)
        for where in ("step", "gather", "backward"):
            words, ranks = found[where]
            assert "as if the drive were gone" in words, (where, found)
            assert words.startswith("RankError" if rank == 0 else "OSError"), (where, found)
            assert ranks == ([1] if rank == 0 else []), (where, found)
        assert found["again"]
        assert found["after"][0].startswith("RankError"), found
        assert found["resumed"] == 3
