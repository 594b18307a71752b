"""Tests that ranks, started as users start them, have the same bits as one process.

`accelerate launch` runs this file as `test_torchrun.py FOLDER`. On a GPU, torchrun runs this file as
`test_torchrun.py STORE BACKEND`.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from support.bits import files, same_bits
from support.lives import Running, life
from support.torchrun import CONFIG, as_if_on_gpus, command

import memascend

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/fsdp.py"

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torchrun_restarts_a_killed_rank_with_same_bits_as_one_process(tmp_path, count):
    """Kills one rank: torchrun must restart the run, which must end with the same bits as one process.

    With four ranks, the run has two replicas. Torch's process group needs a fresh TCP store in each attempt, so the
    test tells torchrun not to share the TCP store of torchrun itself.
    """
    example = (EXAMPLE, "--steps", "6", "--storage")
    # The variables that torchrun sets for each rank, here for a single rank. Port 0 means any free port. No other rank
    # connects to this rank, so any port works.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    life([sys.executable, *example, tmp_path / "one"], **alone)
    ranks = (*example, tmp_path / "ranks", "--replicas", count // 2)
    start = command(*ranks, count=count, options=("--max-restarts", "1"))
    running = Running(start, tmp_path / "output", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    running.wait_for(f"rank {count - 1}, step 2")
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    status, output = running.ended()
    assert status == 0, output
    # The restarted run resumed instead of starting at step 0 again: rank 0 printed step 0 only once.
    assert output.count("rank 0, step 0:") == 1
    assert files(tmp_path / "ranks-saved") == files(tmp_path / "one-saved")


# --- accelerate launch ---------------------------------------------------------------------------------


def begun(ranks):
    """Returns a model, its optimizer, its scheduler, and a loader of batches."""
    from support.trained_program import model

    trained = model(attention_dropout=0.0)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=ranks == 1)
    # In accelerate, one call of `scheduler.step()` steps the scheduler once for each rank.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * ranks)
    rows = [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(number)) for number in range(12)]
    return trained, optimizer, scheduler, torch.utils.data.DataLoader(rows, batch_size=2)


def by_accelerate(folder):
    as_if_on_gpus()
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.is_fsdp2
    trained, optimizer, scheduler, loader = accelerator.prepare(*begun(2))
    trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/run")
    with optimizer:
        for batch in loader:
            accelerator.backward(trained(input_ids=batch, labels=batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.save(f"{folder}/saved")


@pytest.mark.slow
def test_accelerate_launch_has_the_bits_of_one_process(tmp_path):
    from transformers import AutoModelForCausalLM

    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    launch = ("accelerate.commands.accelerate_cli", "launch", "--config_file", config, "--num_processes", "2")
    life([sys.executable, "-m", *launch, __file__, tmp_path])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    trained, optimizer, scheduler, loader = begun(1)
    # In step j, rank 0 trained on batch 2 * j, and rank 1 on batch 2 * j + 1. This loop accumulates the two batches.
    for index, tokens in enumerate(loader):
        (trained(input_ids=tokens, labels=tokens).loss / 2).backward()
        if index % 2:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert all(map(same_bits, saved.parameters(), trained.parameters()))


# --- on a GPU: one rank with NCCL, or two ranks with gloo on the same GPU ------------------------------


def trained(store, backend=None):
    """Trains four steps; returns the loss and the gradient norm of each step.

    If `backend` is given, the model is sharded over all ranks.
    """
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
    answer = []
    with optimizer:
        for seed in range(4):
            rows = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed)).cuda()
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            answer.append((loss.item(), float(optimizer.grad_norm)))
    return answer


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "count"), [("nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("gloo", 2)])
def test_ranks_on_gpus_report_same_losses_and_norms_as_one_process(tmp_path, backend, count):
    """All ranks train on the same examples, so the mean of their gradients is the gradient of one process."""
    torch.use_deterministic_algorithms(True)
    want = trained(tmp_path / "one")
    torch.use_deterministic_algorithms(False)
    (tmp_path / "ranks").mkdir()
    start = command(__file__, f"{tmp_path / 'ranks'}/", backend, count=count)
    output = life(start, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert output.count(str(want)) == count, output


if __name__ == "__main__":
    if len(sys.argv) == 2:
        by_accelerate(sys.argv[1])
    else:
        torch.use_deterministic_algorithms(True)
        print(trained(Path(sys.argv[1]), sys.argv[2]), flush=True)
    torch.distributed.destroy_process_group()
