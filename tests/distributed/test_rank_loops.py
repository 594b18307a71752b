"""Tests a loop of accelerate on two ranks, which `accelerate launch` starts, as the documents have it."""

import sys

import pytest
import torch
from support.bits import same_bits
from support.lives import life
from support.torchrun import CONFIG, as_if_on_gpus

import memascend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def begun(ranks):
    """A model, its optimizer and scheduler, and batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    trained = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=ranks == 1)
    # Accelerate's schedulers take a step for each rank.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * ranks)
    rows = [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(number)) for number in range(12)]
    return trained, optimizer, scheduler, torch.utils.data.DataLoader(rows, batch_size=2)


def by_accelerate(folder):
    as_if_on_gpus()
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.is_fsdp2
    model, optimizer, scheduler, loader = accelerator.prepare(*begun(2))
    model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/run")
    with optimizer:
        for batch in loader:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.save(f"{folder}/saved")
    torch.distributed.destroy_process_group()


def test_accelerate_launch_has_the_bits_of_one_process(tmp_path):
    from transformers import LlamaForCausalLM

    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    launch = ("accelerate.commands.accelerate_cli", "launch", "--config_file", config, "--num_processes", "2")
    life([sys.executable, "-m", *launch, __file__, tmp_path])
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    trained, optimizer, scheduler, loader = begun(1)
    # Batch j W + r is rank r's in round j.
    for index, tokens in enumerate(loader):
        (trained(input_ids=tokens, labels=tokens).loss / 2).backward()
        if index % 2:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert all(map(same_bits, saved.parameters(), trained.parameters()))


if __name__ == "__main__":
    by_accelerate(sys.argv[1])
