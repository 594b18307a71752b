"""Tests Trainers whose models are made without weights: they train like loaded models, in less memory."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import peft
import pytest
import sentence_transformers.models
import torch
import transformers
import trl
from clients import test_trl
from clients.beside import results, same_results
from safetensors.torch import load_file, save_file
from sentence_transformers import losses
from support.bits import same_bits
from support.quantized import in_mxfp4, quantize
from support.small_folder import make_model, make_tokenizer

import memascend
import memascend.trainer

PROGRAM = Path(__file__).parent / "loaded_program.py"
SETTINGS = {**test_trl.SETTINGS, "bf16": False, "max_steps": 2, "gradient_accumulation_steps": 2}
ROWS = range(8)
TEXTS = datasets.Dataset.from_dict({"text": [f"What is it? {row} It is a test." for row in ROWS]})
ANSWERS = {"chosen": [f"it is a test {row}" for row in ROWS], "rejected": [f"no model {row}" for row in ROWS]}
CHOICES = datasets.Dataset.from_dict(ANSWERS)
PAIRS = datasets.Dataset.from_dict(ANSWERS | {"prompt": [f"it {row}" for row in ROWS]})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, torch.bfloat16)
    return folder


def adapters(**more):
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more)


def of_trl(name, data):
    def made(model, folder, peft_config=None, **more):
        arguments = getattr(trl, f"{name}Config")(str(folder / "output"), **SETTINGS, **more)
        trainer = getattr(trl, f"{name}Trainer")
        return trainer(str(model), args=arguments, train_dataset=data, peft_config=peft_config)

    return made


supervised, preferring, rewarding = of_trl("SFT", TEXTS), of_trl("DPO", PAIRS), of_trl("Reward", CHOICES)


def plain(model, folder, **more):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, **more)
    rows = [{"input_ids": torch.arange(4, 20) + row, "labels": torch.arange(4, 20) + row} for row in ROWS]
    return transformers.Trainer(
        loaded, transformers.TrainingArguments(str(folder / "output"), **SETTINGS), train_dataset=rows
    )


def embedding(model, folder):
    body = sentence_transformers.models.Transformer(str(model))
    made = sentence_transformers.SentenceTransformer(
        modules=[body, sentence_transformers.models.Pooling(64)], device="cpu"
    )
    settings = {name: value for name, value in SETTINGS.items() if name != "gradient_accumulation_steps"}
    return sentence_transformers.SentenceTransformerTrainer(
        made,
        sentence_transformers.SentenceTransformerTrainingArguments(str(folder / "output"), **settings),
        train_dataset=datasets.Dataset.from_dict({"anchor": ANSWERS["chosen"], "positive": ANSWERS["rejected"]}),
        loss=losses.MultipleNegativesRankingLoss(made),
    )


# TRL's other Trainers without adapters are not in this table, because test_train.py tests them.
TRAINERS = {
    "embedding": embedding,
    "plain in fp16": lambda *given: plain(*given, dtype=torch.float16),
    "supervised in the files' dtype": lambda *given: supervised(*given, model_init_kwargs={"dtype": "auto"}),
    "adapters": lambda *given: supervised(*given, adapters()),
    "adapters in bf16": lambda *given: supervised(*given, adapters(), model_init_kwargs={"dtype": "bfloat16"}),
    "adapters and a head": lambda *given: supervised(*given, adapters(modules_to_save=["lm_head"])),
    "reward by adapters": lambda *given: rewarding(*given, adapters(modules_to_save=["score"], task_type="SEQ_CLS")),
    "preferences by adapters": lambda *given: preferring(*given, adapters()),
}


def trained(make, model, folder, *, loads):
    """Trains offloaded; returns the results. If `loads` is true, the Trainer's model is made without weights."""
    folder.mkdir()
    # `make` may draw the values of adapters before the Trainer sets its random seed.
    torch.manual_seed(5)
    with memascend.trainer.loading() if loads else contextlib.nullcontext():
        trainer = make(model, folder)
    assert any(parameter.is_meta for parameter in trainer.model.parameters()) == loads
    return results(trainer, folder / "run.store")


def require_same_runs(make, model, folder):
    loaded = trained(make, model, folder / "loaded", loads=False)
    assert len(loaded[0]) == 2
    assert same_results(loaded, trained(make, model, folder / "streamed", loads=True))


@pytest.mark.parametrize("kind", TRAINERS)
def test_training_under_loading_has_the_same_bits_as_a_loaded_model(tmp_path, model, kind):
    require_same_runs(TRAINERS[kind], model, tmp_path)


def saved(config, folder, dtype=torch.float32):
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.save_pretrained(folder, max_shard_size="60MB")
    make_tokenizer().save_pretrained(folder)


SMALL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}


def tied(folder):
    saved(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True), folder)


def both_in_the_files(folder, difference=0.0):
    tied(folder)
    values = load_file(folder / "model.safetensors")
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + difference
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def untied_by_the_files(folder):
    both_in_the_files(folder, 0.01)


def with_buffers(folder):
    # Unlike Llama, GPT-2 has position embeddings, mask buffers and biases. The two models name parameters differently.
    saved(transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64), folder)


@pytest.mark.parametrize("make", [tied, both_in_the_files, untied_by_the_files, with_buffers])
def test_loading_reads_tied_and_untied_files_like_transformers(tmp_path, make):
    make(tmp_path / "model")
    require_same_runs(plain, tmp_path / "model", tmp_path)


def test_loading_keeps_a_model_that_is_passed_to_the_trainer(tmp_path, model):
    given = transformers.AutoModelForCausalLM.from_pretrained(model)
    with memascend.trainer.loading():
        arguments = transformers.TrainingArguments(str(tmp_path), **SETTINGS)
        trainer = transformers.Trainer(given, arguments, train_dataset=[{"input_ids": [1], "labels": [1]}])
    assert trainer.model is given
    assert not any(parameter.is_meta for parameter in given.parameters())


def test_loading_affects_no_other_thread_and_no_later_code(model):
    def load():
        return transformers.AutoModelForCausalLM.from_pretrained(model).to("cpu")

    before = [vars(transformers.PreTrainedModel)["from_pretrained"], vars(torch.nn.Module)["to"]]
    with memascend.trainer.loading():
        found = [ThreadPoolExecutor(1).submit(load).result()]
    found.append(load())
    assert not any(parameter.is_meta for one in found for parameter in one.parameters())
    assert before == [vars(transformers.PreTrainedModel)["from_pretrained"], vars(torch.nn.Module)["to"]]


def test_loading_sets_buffers_and_generation_settings(model):
    with memascend.trainer.loading():
        made = transformers.AutoModelForCausalLM.from_pretrained(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert all(same_bits(one, other) for one, other in zip(made.buffers(), loaded.buffers(), strict=True))
    assert made.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert made.training == loaded.training


def test_trainer_offload_can_be_repeated_after_a_budget_error(tmp_path, model):
    with memascend.trainer.loading():
        trainer = preferring(model, tmp_path, optim="adamw_8bit", max_grad_norm=0.5)
    before = dict(vars(trainer))
    with pytest.raises(
        memascend.BudgetError, match=r"The reference model also takes [\d.]+ [KM]iB of host_memory: pass"
    ) as caught:
        memascend.trainer.offload(trainer, storage=tmp_path / "run.store", host_memory="1KiB")
    assert vars(trainer) == before
    smallest = caught.value.smallest
    with memascend.trainer.offload(trainer, storage=tmp_path / "run.store", host_memory=smallest) as optimizer:
        trainer.train()
        reference = trainer.ref_model.__dict__["_memascend"]
        assert optimizer.plan.budget + reference.plan.budget == smallest
        assert "8bit" in str(optimizer.plan) or optimizer.state_of(trainer.model.lm_head.weight)
        reference.close()
    # The store of the reference model is a file without a name, so the folder has only one store.
    assert [path.name for path in tmp_path.glob("*.store")] == ["run.store"]
    assert not list(tmp_path.glob("memascend-*"))


def test_loading_rejects_truncated_and_non_safetensors_files(tmp_path):
    saved(transformers.LlamaConfig(**SMALL), tmp_path)
    file = tmp_path / "model.safetensors"

    def refused(error, message):
        with pytest.raises(error, match=message), memascend.trainer.loading():
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    os.truncate(file, 1000)
    refused(memascend.CorruptionError, "not a complete safetensors file")
    file.unlink()
    refused(memascend.ConfigError, "are not in safetensors files")


def test_loading_rejects_dora_precomputed_log_probs_and_key_mapping(tmp_path, model):
    needs = (memascend.UsageError, "needs the values of weights")
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, model)
    for (error, message), make in (
        (needs, lambda: supervised(model, tmp_path, adapters(use_dora=True))),
        (needs, lambda: preferring(model, tmp_path, precompute_ref_log_probs=True)),
        ((memascend.ConfigError, "does not support key_mapping="), lambda: load(key_mapping={"^model": "model"})),
    ):
        with pytest.raises(error, match=message), memascend.trainer.loading():
            make()


def test_trainer_offload_rejects_fsdp_and_parameters_without_values(tmp_path, model):
    with memascend.trainer.loading():
        trainer = plain(model, tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(memascend.ConfigError, match="the model outside of loading"):
        memascend.trainer.offload(trainer, storage=tmp_path / "run.store")
    trainer.is_fsdp_enabled = False
    trainer.model.resize_token_embeddings(400, mean_resizing=False)
    with pytest.raises(memascend.ConfigError, match=r"model\.embed_tokens\.weight has no values"):
        memascend.trainer.offload(trainer, storage=tmp_path / "run.store")
    assert not (tmp_path / "run.store").exists()


def program(*arguments):
    done = subprocess.run(
        [sys.executable, PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.split("found ")[1].splitlines()[0])


LIMIT = 320 << 20


def large(folder):
    """Saves a model of 500 MB in fp32; returns the size of its files in bytes."""
    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**SMALL | size, tie_word_embeddings=False, dtype=torch.float32)
    saved(config, folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def large_and_quantized(folder):
    """Saves a model of 500 MB in bf16, and quantises its files to a quarter of this size; returns the size in bf16."""
    size = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 40, "num_attention_heads": 8}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    saved(transformers.GptOssConfig(**SMALL | size, **experts), folder, torch.bfloat16)
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    quantize(folder, in_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return nbytes


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "make"), [("sft", large), ("dpo", large), ("sft", large_and_quantized)])
def test_a_model_larger_than_the_cgroups_memory_trains(tmp_path, cgroup, kind, make):
    # Without quantisation, the model's values are larger than the cgroup's limit. The kernel would kill a process that
    # loaded all these values.
    assert make(tmp_path / "model") > 1.5 * LIMIT
    (tmp_path / "run").mkdir()
    first = program(kind, tmp_path / "model", tmp_path / "run", cgroup, LIMIT)
    again = program(kind, tmp_path / "model", tmp_path / "run", cgroup, LIMIT)
    assert (first["begun"], again["begun"]) == (0, 2)
    assert first["losses"] == again["losses"]
    assert first["digest"] == again["digest"]
    (tmp_path / "free").mkdir()
    assert program(kind, tmp_path / "model", tmp_path / "free")["digest"] == first["digest"]
