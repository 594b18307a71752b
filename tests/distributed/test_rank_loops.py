"""Tests loops of accelerate and of the Trainer of transformers on several ranks, divided by their own FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import launched
from support.bits import same_bits
from support.launched import as_if_on_gpus, llama, rows
from support.ranks import on_ranks

import memascend

pytestmark = [pytest.mark.slow, pytest.mark.skipif("not __import__('importlib.util').util.find_spec('accelerate')")]


def adamw(trained):
    return torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)


def loop_of_accelerate(folder):
    as_if_on_gpus()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    trained = llama()
    optimizer = adamw(trained)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    data = torch.utils.data.DataLoader(rows(), batch_size=2)
    trained, optimizer, data, scheduler = accelerator.prepare(trained, optimizer, data, scheduler)
    trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/run")
    for tokens in data:
        accelerator.backward(trained(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    optimizer.save(f"{folder}/saved")
    optimizer.close()
    return accelerator.is_fsdp2


def loop_of_the_trainer(folder):
    as_if_on_gpus()
    from transformers import Trainer, TrainingArguments

    from memascend.trainer import Offload

    options = {"per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True}
    divided = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}
    data = [{"input_ids": tokens, "labels": tokens} for tokens in rows()]
    refused = None
    try:
        arguments = TrainingArguments(f"{folder}/out", **options, **divided)
        Trainer(llama(), arguments, train_dataset=data, callbacks=[Offload()])
    except memascend.ConfigError as error:
        refused = str(error)
    arguments = TrainingArguments(f"{folder}/out", save_strategy="no", **options, **divided)
    offloading = Offload(storage=f"{folder}/run")
    trainer = Trainer(llama(), arguments, train_dataset=data, callbacks=[offloading])
    trainer.train()
    offloading.optimizer.save(f"{folder}/saved")
    values = {name: one.full_tensor().detach() for name, one in trainer.model.named_parameters()}
    steps = offloading.optimizer.steps
    offloading.optimizer.close()
    try:
        again = Offload(storage=f"{folder}/run", existing="resume")
        Trainer(llama(), arguments, train_dataset=data, callbacks=[again]).train()
    except memascend.ConfigError as error:
        refused += str(error)
    return refused, steps, values, [said["read_bytes"] for said in trainer.state.log_history if "loss" in said]


def test_a_loop_of_accelerate_has_the_bits_of_one_process(tmp_path):
    assert on_ranks(2, loop_of_accelerate, tmp_path) == [True, True]
    from transformers import LlamaForCausalLM

    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    trained = llama()
    optimizer = adamw(trained)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = list(torch.utils.data.DataLoader(rows(), batch_size=2))
    # Batch j W + r is rank r's in round j; accelerate's schedulers take a step for each rank.
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        for tokens in (first, second):
            (trained(input_ids=tokens, labels=tokens).loss / 2).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert all(map(same_bits, saved.parameters(), trained.parameters()))


def test_the_trainer_divides_and_its_callback_offloads(tmp_path):
    from transformers import LlamaForCausalLM

    for refused, steps, values, read in on_ranks(2, loop_of_the_trainer, tmp_path):
        assert "save_strategy='no'" in refused
        assert "Offload(existing='resume') cannot resume where a Trainer of several ranks ended" in refused
        assert steps == 2
        assert all(read)
        saved = LlamaForCausalLM.from_pretrained(Path(tmp_path, "saved"))
        assert all(same_bits(one.detach(), values[name]) for name, one in saved.named_parameters())
        assert not same_bits(values["lm_head.weight"], llama().lm_head.weight.detach())


# As docs/distributed.md has it.
CONFIG = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


def launch(loop, folder, *command):
    folder.mkdir()
    ran = subprocess.run(
        [*command, launched.__file__, loop, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "saved")


@pytest.mark.timeout(900)
def test_torchrun_and_accelerate_launch_start_it(tmp_path):
    """The documents' commands; both loops have the same micro-batches, and the same bits."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    accelerate = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config))
    first = launch("torchrun", tmp_path / "torchrun", *torchrun)
    second = launch("accelerate", tmp_path / "accelerate", *accelerate, "--num_processes", "2")
    assert all(map(same_bits, first.parameters(), second.parameters()))
    assert not same_bits(first.lm_head.weight, llama().lm_head.weight)
    trained = launch("trainer", tmp_path / "trainer", *torchrun)
    assert not same_bits(trained.lm_head.weight, llama().lm_head.weight)
