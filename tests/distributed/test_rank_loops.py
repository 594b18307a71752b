"""Tests a loop of accelerate on two ranks, started by the command of the documents."""

import subprocess
import sys

import pytest
import torch
from support import launched
from support.bits import same_bits
from support.launched import CONFIG, llama, rows
from support.torchrun import environment

pytestmark = pytest.mark.slow


def launch(folder, *module):
    """What two ranks saved."""
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", *module, launched.__file__, str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    from transformers import LlamaForCausalLM

    saved = LlamaForCausalLM.from_pretrained(folder / "saved")
    return {name: one.detach() for name, one in saved.named_parameters()}


def by_one_process():
    trained = llama()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = list(torch.utils.data.DataLoader(rows(), batch_size=2))
    # Batch j W + r is rank r's in round j.
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        for tokens in (first, second):
            (trained(input_ids=tokens, labels=tokens).loss / 2).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: one.detach() for name, one in trained.named_parameters()}


@pytest.mark.timeout(900)
def test_accelerate_launch_has_the_bits_of_one_process(tmp_path):
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    accelerate = ("accelerate.commands.accelerate_cli", "launch", "--config_file", str(config), "--num_processes", "2")
    alone = by_one_process()
    assert all(same_bits(one, alone[name]) for name, one in launch(tmp_path / "run", *accelerate).items())
