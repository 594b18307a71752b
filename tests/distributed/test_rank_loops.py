"""Tests loops of torch, of accelerate and of the Trainer on two ranks, started by the commands of the documents."""

import json
import subprocess
import sys

import pytest
import torch
from support import launched
from support.bits import same_bits
from support.launched import llama, rows
from support.torchrun import environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif("not __import__('importlib.util').util.find_spec('accelerate')")]

# As docs/hosts.md has it.
CONFIG = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launch(loop, folder, *module):
    """What two ranks saved, and what they said."""
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", *module, launched.__file__, loop, str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    from transformers import LlamaForCausalLM

    saved = LlamaForCausalLM.from_pretrained(folder / "saved")
    return {name: one.detach() for name, one in saved.named_parameters()}, ran.stdout


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
def test_torchrun_and_accelerate_launch_have_the_bits_of_one_process(tmp_path):
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    accelerate = ("accelerate.commands.accelerate_cli", "launch", "--config_file", str(config), "--num_processes", "2")
    alone = by_one_process()
    for loop, module in (("torchrun", TORCHRUN), ("accelerate", accelerate)):
        saved, _ = launch(loop, tmp_path / loop, *module)
        assert all(same_bits(one, alone[name]) for name, one in saved.items()), loop


def trained(folder, ranks=2, *, kill=0, accumulate=1):
    """The weights and the log of a Trainer under torchrun, or the words of one that failed."""
    folder.mkdir(exist_ok=True)
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    ran = subprocess.run(
        [sys.executable, "-m", *start, launched.__file__, "trainer", str(folder), str(kill), str(accumulate)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        return ran.stderr
    return torch.load(folder / "values", weights_only=True), json.loads((folder / "log.json").read_text())


def same_weights(one, other):
    return all(same_bits(values, other[name]) for name, values in one.items())


@pytest.mark.timeout(900)
def test_a_trainer_of_two_ranks_goes_on_after_a_rank_was_killed(tmp_path):
    values, log = trained(tmp_path / "whole")
    assert not same_weights(values, dict(llama().named_parameters()))
    for kill in (3, 6):
        assert isinstance(trained(tmp_path / str(kill), kill=kill), str)
        resumed, its_log = trained(tmp_path / str(kill))
        assert same_weights(resumed, values)
        assert its_log == log
    again, its_log = trained(tmp_path / "whole")
    assert same_weights(again, values)
    assert its_log == log


@pytest.mark.timeout(900)
def test_another_number_of_ranks_goes_on_where_a_step_has_the_same_examples(tmp_path):
    folder = tmp_path / "killed"
    trained(folder, kill=6)
    words = trained(folder, 1)
    assert "ranks 2 -> 1, where a step has other examples" in words
    assert "1 with 2, 2 with 1" in words
    values, log = trained(folder, 1, accumulate=2)
    whole, its_log = trained(tmp_path / "whole")
    assert [(said["epoch"], said.get("learning_rate")) for said in log] == [
        (said["epoch"], said.get("learning_rate")) for said in its_log
    ]
    assert all(torch.allclose(one, whole[name], atol=1e-4) for name, one in values.items())
