"""Tests loops of accelerate and of the Trainer of transformers on several ranks, divided by their own FSDP2."""

import os
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.ranks import on_ranks

import memascend

pytestmark = [pytest.mark.slow, pytest.mark.skipif("not __import__('importlib.util').util.find_spec('accelerate')")]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return LlamaForCausalLM(config)


def rows():
    return [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(number)) for number in range(12)]


def as_if_on_gpus():
    """Let accelerate divide on the CPU what it divides on GPUs alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    begin = PartialState.__init__

    def begun(self, *values, **options):
        begin(self, *values, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begun


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
        assert "Offload(existing='resume') does not go on where a Trainer of several ranks ended" in refused
        assert steps == 2
        assert all(read)
        saved = LlamaForCausalLM.from_pretrained(Path(tmp_path, "saved"))
        assert all(same_bits(one.detach(), values[name]) for name, one in saved.named_parameters())
        assert not same_bits(values["lm_head.weight"], llama().lm_head.weight.detach())
