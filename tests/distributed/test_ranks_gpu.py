"""Tests ranks under torchrun on a GPU: one by NCCL, and two that share it by gloo, train as one process does.

usage: test_ranks_gpu.py STORE BACKEND
"""

import sys
from pathlib import Path

import pytest
import torch
from support.lives import life
from support.torchrun import command

import memascend

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def trained(store, backend=None):
    """Losses and norms of four steps; of ranks, where there is a backend."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(4))).cuda()
    if backend is not None:
        torch.distributed.init_process_group(backend)
        mesh = torch.distributed.init_device_mesh("cuda", (torch.distributed.get_world_size(),))
        for layer in model:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memascend.offload(model, optimizer, storage=store, device="cuda", max_grad_norm=1.0)
    told = []
    with optimizer:
        for seed in range(4):
            rows = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed)).cuda()
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append((loss.item(), float(optimizer.grad_norm)))
    return told


@pytest.mark.parametrize(("backend", "count"), [("nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("gloo", 2)])
def test_ranks_are_one_process(tmp_path, backend, count):
    """Each rank has the same rows, so that their mean is what one process has."""
    torch.use_deterministic_algorithms(True)
    want = trained(tmp_path / "one")
    torch.use_deterministic_algorithms(False)
    (tmp_path / "ranks").mkdir()
    start = command(__file__, f"{tmp_path / 'ranks'}/", backend, count=count)
    output = life(start, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert output.count(str(want)) == count, output


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    print(trained(Path(sys.argv[1]), sys.argv[2]), flush=True)
    torch.distributed.destroy_process_group()
