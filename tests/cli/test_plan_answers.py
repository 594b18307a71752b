"""Tests what `memascend plan` predicts: torch's memory, the seconds of a step, and the largest batch that fits."""

import contextlib
import json
import re

import pytest
import torch
from support.planned import CONFIG, HIDDEN, LAYERS, VOCABULARY, WIDE, answer, peak_of, shown

from memascend.cli import main
from memascend.cli.plan.machine import parse_gpu
from memascend.cli.plan.model import describe, trace
from memascend.cli.plan.subject import Batch
from memascend.errors import ConfigError
from memascend.plan.cost import Drive
from memascend.text import bytes_shown

DEFAULT = ("--host-memory", "default")
MACHINE = ("--drive", "5,4", "--gpu", "4090", *DEFAULT)


def traced(config, sequences=1, length=128, loss="full", **options):
    batch = Batch(sequences=sequences, length=length, loss=loss)
    return trace(describe(config, None)[0], batch, **{"recomputes": True, **options})


def products(tokens, length):
    """Returns two numbers of operations of a forward: in products with weights, and in causal attention."""
    kv = HIDDEN // 2
    block = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 3 * HIDDEN * WIDE
    weights = 2 * tokens * (LAYERS * block + VOCABULARY * HIDDEN)
    # In each head, attention has two products: queries by keys, and attention weights by values. The causal mask halves
    # the operations.
    return weights, LAYERS * 2 * (2 * tokens * length * HIDDEN) // 2


@pytest.mark.parametrize("recomputes", [False, True])
def test_traced_operations_equal_a_count_by_hand(config, recomputes):
    found = traced(config, 2, 128, recomputes=recomputes)
    weights, attention = products(256, 128)
    # The recomputation skips the LM head. It also skips the last product of each block, because autograd does not save
    # the result of this product.
    last = 2 * 256 * HIDDEN * (VOCABULARY + LAYERS * WIDE)
    # The trace also counts the product that makes the table of rotary positions: a few thousand operations.
    assert found.forward == pytest.approx(weights + attention, rel=0.01)
    again = weights - last + attention if recomputes else 0
    assert found.backward == pytest.approx(2 * weights + 2.5 * attention + again, rel=0.01)


def test_traced_peak_memory_equals_the_allocations_of_a_run(config):
    """The profiler counts bytes that are allocated after its start. Both the profiler and the trace omit parameters."""
    import transformers

    for recomputes in (False, True):
        found = traced(config, 2, 128, recomputes=recomputes)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config.parent))
        model = model.bfloat16().train()
        model.config.use_cache = False
        if recomputes:
            model.activation_checkpointing_enable()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        tokens = torch.zeros(2, 128, dtype=torch.long)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(profile_memory=True, activities=cpu, acc_events=True) as profile:
            model(input_ids=tokens, labels=tokens).loss.backward()
        assert found.peak == pytest.approx(peak_of(profile), rel=0.1), recomputes
        assert sum(found.held.values()) == found.peak


def test_trace_counts_logits_and_activations_separately(config):
    held = traced(config, 1, 256).held
    # The log-probabilities and the gradients of the logits are fp32 tensors. Each has a number for each token and each
    # entry of the vocabulary. At least two tensors of this size are in memory at once.
    assert held["logits and their gradients"] >= 2 * 4 * 256 * VOCABULARY
    assert held["activations"] < held["logits and their gradients"]


def test_step_seconds_are_bound_by_disk_or_compute(capsys, config):
    found = answer(capsys, config, *MACHINE, "--tokens", 256)
    step, plan = found["step"], found["plan"]
    assert step["bound"] == "disk"
    written = sum(plan["written_bytes"].values()) / 4e9
    assert step["seconds_per_step"] == pytest.approx(sum(plan["read_bytes"].values()) / 5e9 + written)
    assert step["tokens_per_second"] == pytest.approx(256 / step["seconds_per_step"])
    assert found["disk_seconds_per_step"] == pytest.approx(step["seconds_per_step"])
    assert found["device_bytes"] == plan["device_peak"] + found["torch"]["peak_bytes"]
    # On a card of 0.001 TFLOPS, compute bounds the step. `plan` assumes that a step reaches half of the card's speed.
    slow = answer(capsys, config, "--drive", "5,4", "--gpu", "0.001,24,25", "--tokens", 256)["step"]
    assert slow["bound"] == "compute"
    assert slow["seconds_per_step"] == pytest.approx(found["torch"]["flops"] / (0.5 * 0.001e12), rel=0.01)


def test_plan_predicts_micro_batches_by_layer_and_one_after_the_other(capsys, config):
    one, four = (answer(capsys, config, *MACHINE, "--tokens", 256, "--accumulation-steps", n) for n in (1, 4))
    turns = four["one_after_the_other"]
    assert one["one_after_the_other"] is None
    # The disk bounds these steps. By layer, four micro-batches move as many bytes as one micro-batch. One after the
    # other, four micro-batches move more bytes, and updates wait until the gradients are summed.
    assert four["plan"] == one["plan"]
    assert four["step"]["seconds_per_step"] == pytest.approx(one["step"]["seconds_per_step"])
    assert four["step"]["tokens_per_second"] == pytest.approx(4 * one["step"]["tokens_per_second"])
    assert (four["step"]["updates"], turns["updates"]) == ("fused", "next forward")
    assert turns["seconds_per_step"] > 1.5 * four["step"]["seconds_per_step"]
    # If micro-batches are computed one after the other, each micro-batch after the first reads values, reads gradient
    # sums, and writes gradient sums. Each of these three transfers moves 2 bytes for every streamed element.
    clipped = (*MACHINE, "--tokens", 256, "--max-grad-norm", 1, "--one-after-the-other")
    moved = [answer(capsys, config, *clipped, "--accumulation-steps", n) for n in (1, 4)]
    sums = moved[0]["plan"]["written_bytes"]["gradients"]
    assert moved[1]["written_bytes_per_step"] - moved[0]["written_bytes_per_step"] == 3 * sums
    assert moved[1]["read_bytes_per_step"] - moved[0]["read_bytes_per_step"] >= 3 * 2 * sums
    # By layer, each micro-batch keeps the inputs of all blocks. `one` already counts the inputs of one micro-batch.
    kept = traced(config, 1, 256, "chunked").kept
    assert kept >= LAYERS * 256 * HIDDEN * 2
    assert four["device_bytes"] == one["device_bytes"] + 3 * kept
    # If compute bounds the step, micro-batches by layer take as long as micro-batches one after the other.
    slow = answer(
        capsys, config, "--drive", "500,400", "--gpu", "0.001,24,25", "--tokens", 256, "--accumulation-steps", 4
    )
    assert slow["step"]["seconds_per_step"] == pytest.approx(slow["one_after_the_other"]["seconds_per_step"], rel=0.01)
    assert "4 micro-batches one after the other" in shown(
        capsys, config, *MACHINE, "--tokens", 256, "--accumulation-steps", 4
    )


def test_clipped_updates_wait_for_the_next_step(capsys):
    asked = (*EIGHT, "--accumulation-steps", 32, "--activations", "ssd")
    plain, clipped = answer(capsys, *asked), answer(capsys, *asked, "--max-grad-norm", 1)
    assert plain["step"]["updates_seconds"].keys() == {"fused"}
    step, plan = clipped["step"], clipped["plan"]
    assert step["updates"] == "next backward"
    took = step["updates_seconds"]
    assert took.keys() == {"next forward", "next backward", "early"}
    assert plain["step"]["seconds_per_step"] <= took["early"] < took["next backward"] < took["next forward"]
    assert step["seconds_per_step"] == took["next backward"]
    # `read_bytes` and `disk_seconds_per_step` count the bytes of updates that run in the next backward.
    read = sum(plan["read_bytes"].values())
    assert "last step's update, forward" in plan["read_bytes"]
    stored = clipped["read_bytes_per_step"] - read
    moved = read / 5e9 + sum(plan["written_bytes"].values()) / 4e9 + stored / 5e9 + stored / 4e9
    assert clipped["disk_seconds_per_step"] == pytest.approx(moved)
    out = shown(capsys, *asked, "--max-grad-norm", 1)
    for words in (
        "  forward and last step's values ", "  updates in the next backward ", "a step while no step is clipped",
        "read: last step's update, forward",
    ):  # fmt: skip
        assert words in out, words
    assert "updates in the" not in shown(capsys, *asked)


def test_early_updates_are_predicted_only_where_a_run_tries_them(capsys, config):
    def ways(*words):
        step = answer(capsys, config, *MACHINE, "--tokens", 256, *words)["step"]
        assert step["updates"] in step["updates_seconds"]
        return step["updates_seconds"].keys()

    clip = ("--max-grad-norm", 1)
    deferred = {"next forward", "next backward"}
    assert ways(*clip) == deferred | {"early"}
    assert ways(*clip, "--optimizer", "SGD") == deferred | {"early"}
    assert ways(*clip, "--gradients", "ssd") == ways(*clip, "--ranks", 2) == deferred
    # With RMSprop, torch's code computes the updates instead of the engine. With gradients="ram", all gradients stay in
    # memory. In both cases, `step()` makes the updates at once.
    assert ways(*clip, "--optimizer", "RMSprop") == ways(*clip, "--gradients", "ram") == {"at once"}


def test_disk_seconds_without_a_named_gpu_are_reads_plus_writes(capsys, config):
    clip = ("--device", "cuda", "--drive", "5,4", "--max-grad-norm", 1)
    found = answer(capsys, config, *clip)
    read, written = (sum(found["plan"][f"{what}_bytes"].values()) for what in ("read", "written"))
    assert "values, forward" not in found["plan"]["read_bytes"]
    assert found["disk_seconds_per_step"] == pytest.approx(read / 5e9 + written / 4e9)


def test_tied_weights_have_a_gradient_for_each_micro_batch(capsys, config):
    config.write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    one, four = (answer(capsys, config, *MACHINE, "--tokens", 256, "--accumulation-steps", n) for n in (1, 4))
    shared = VOCABULARY * HIDDEN * 2
    assert four["device_bytes"] == one["device_bytes"] + 3 * (traced(config, 1, 256, "chunked").kept + shared)


def test_drive_life_is_in_days_or_in_steps_without_a_named_gpu(capsys, config):
    found = answer(capsys, config, *MACHINE, "--tokens", 256, "--endurance", 1200)
    days = 1200e12 / found["written_bytes_per_step"] * found["step"]["seconds_per_step"] / 86400
    assert found["drive"] == {"endurance_bytes": 1200 * 10**12, "days": pytest.approx(days)}
    assert answer(capsys, config, *MACHINE, "--tokens", 256)["drive"]["endurance_bytes"] == 600 * 10**12
    # The first row of the table is the life of the drive. The unit is days if `plan` knows the seconds of a step, and
    # otherwise steps.
    rows = shown(capsys, config, *MACHINE, "--length", 128).partition("what   ")[2].splitlines()
    assert re.match(r"the drive lasts +[\d,.]+ days  +.*until 600 TB are written", rows[2])
    assert re.search(r"the drive lasts +[\d,]+ steps", shown(capsys, config, "--device", "cuda"))


def test_disk_space_includes_the_gradient_log_of_the_ram_tier(capsys, config):
    asked = (*MACHINE, "--tokens", 256, "--host-memory", "64MiB")
    found = answer(capsys, config, *asked)
    log = found["disk"]["log_bytes"]
    # The log has room for 16 steps of 2-byte gradients, and for the step that is being written.
    assert 17 * 2 * found["model"]["parameters"] <= log == found["plan"]["log_bytes"]
    (row,) = [line for line in shown(capsys, config, *asked).splitlines() if line.startswith("disk space")]
    whole = bytes_shown(found["disk"]["bytes"] + log)
    assert row.split("  ")[1:]
    assert whole in row
    assert f"{bytes_shown(log)} of it a gradient log of 16 steps" in row
    assert answer(capsys, config, *MACHINE, "--tokens", 256)["disk"]["log_bytes"] == 0


def test_too_small_card_exits_with_1_and_fit_finds_a_batch(capsys, config):
    small = ("--drive", "5,4", "--gpu", "165,1.09,25", "--loss", "full")
    found = answer(capsys, config, *small, "--tokens", 65536, status=1)
    assert not found["fits"]
    assert "--fit" in found["problems"][0]
    fitting = answer(capsys, config, *small, "--fit")
    found = [(one["fits"], one["length"], one["state"]) for one in fitting]
    assert found == [(True, 256, None), (True, 256, "bf16"), (True, 256, "8bit")]
    assert fitting[0]["seconds_per_step"] > fitting[1]["seconds_per_step"] > fitting[2]["seconds_per_step"]
    assert answer(capsys, config, *small, "--fit", "--state", "8bit") == fitting[2:]
    batch = fitting[0]["batch"]
    assert answer(capsys, config, *small, "--tokens", batch * 256, "--length", 256)["fits"]
    assert not answer(capsys, config, *small, "--tokens", 2 * batch * 256, "--length", 256, status=1)["fits"]
    assert f"{batch} x 256" in shown(capsys, config, *small, "--fit")
    # With --fit, too, `tokens_per_second` counts the tokens of all ranks and micro-batches.
    ranks = ("--ranks", 2, "--network", 5, "--accumulation-steps", 3, "--length", 256)
    one = answer(capsys, config, *small, *ranks, "--fit")[0]
    step = answer(capsys, config, *small, *ranks, "--tokens", one["batch"] * 256)["step"]
    assert one["tokens_per_second"] == pytest.approx(step["tokens_per_second"])


@pytest.mark.parametrize(
    ("option", "says"), [("--ranks", "a whole number of at least 1"), ("--network", "give a number of GB/s above 0")]
)
def test_ranks_and_network_reject_0_with_the_valid_values(capsys, config, option, says):
    with pytest.raises(SystemExit):
        main(["plan", str(config), option, "0"])
    assert f"argument {option}: '0' is not " in (wrong := capsys.readouterr().err)
    assert says in wrong


def test_heap_gaps_are_a_row_only_where_the_host_computes(config, capsys):
    assert "  gaps between torch's" in shown(capsys, config, "--tokens", "2048")
    assert "  gaps between torch's" not in shown(capsys, config, *MACHINE, "--tokens", "2048")


def test_table_shows_the_offload_call_the_bound_and_the_drive_life(capsys, config):
    # 26 MiB is only a little more than the smallest budget, so no record is kept in RAM, and a step waits for the disk.
    out = shown(capsys, config, *MACHINE, "--host-memory", "26MiB", "--tokens", "256")
    for words in (
        "memascend.offload(model, optimizer, storage=", 'host_memory="26MiB"', "ion_checkpointing_enable()",
        "mostly disk", "of it not overlapped, for the last gradient",
        "tokens a second", "the drive lasts", "TB are written (assumed", "RTX 4090 reaches 50%",
        f"model.layers.0 .. model.layers.{LAYERS - 1} ({LAYERS})",
    ):  # fmt: skip
        assert words in out, words
    assert "assumed; --storage P measures the disk of P, --drive READ,WRITE" in shown(capsys, config, "--gpu", "4090")


def test_unknown_gpu_or_drive_is_rejected(capsys, config):
    assert parse_gpu("RTX4090").tflops == 165
    assert parse_gpu("AMD Instinct MI300X").name == "MI300X"
    assert parse_gpu("100,10,5").link == 5e9
    for words in ("4091", "165,24", "165,24,-1", "nan,1,1"):
        with pytest.raises(ConfigError, match=r"one of .*, 3080, 3080ti, 3090,"):
            parse_gpu(words)
    # For a mistyped name, the error proposes similar names.
    for words, near in (("4091", "4090"), ("rtx 5091", "5090"), ("h1000", "h100")):
        with pytest.raises(ConfigError, match=f"did you mean .*{near}.* one of"):
            parse_gpu(words)
    with pytest.raises(ConfigError, match="that memascend knows: pass one of"):
        parse_gpu("voodoo 2")
    assert "READ,WRITE" in shown(capsys, config, "--drive", "5", status=1)
    assert "--gpu" in shown(capsys, config, "--fit", status=1)
    assert main(["plan", str(config), "--gpu", "4090", "--device", "cpu"]) == 1


def test_untraceable_model_gets_a_reason_instead_of_seconds(capsys, config):
    found = answer(capsys, config, *MACHINE)
    assert found["torch"]["tokens"] == 8192
    vision = {"architectures": ["ViTModel"], "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 128}  # fmt: skip
    config.write_text(json.dumps(vision))
    found = answer(capsys, config, *MACHINE)
    assert "language models" in found["torch"]["why_not"]
    assert found["step"]["seconds_per_step"] is None


def test_drive_option_accepts_the_name_of_a_pcie_generation(capsys, config):
    named, output = (answer(capsys, config, "--gpu", "4090", "--drive", drive) for drive in ("gen4", "5,4"))
    assert named["step"] == output["step"]
    assert "pass one of gen3, gen4, gen5, or READ,WRITE" in shown(capsys, config, "--drive", "gen9", status=1)


# --- the short answer, without --verbose ------------------------------------------------

EIGHT = ("llama-8b", "--gpu", "4090", "--drive", "5,4", "--host-memory", "48GiB", "--tokens", 2048)


def five(capsys, *words, status=0):
    """Returns the lines of the short answer: a dict from the title of a line to its text."""
    assert main(["plan", *map(str, words)]) == status
    return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())


def test_short_answer_shows_cost_memory_and_commands(capsys):
    asked = (*EIGHT, "--length", 1024, "--accumulation-steps", 8, "--max-grad-norm", 1, "--examples", 10_000)
    lines = five(capsys, *asked)
    title, step, memory, run, larger, command, trainer, loop = lines
    assert (title, lines[title]) == ("llama-8b, 8.03 B parameters, on RTX 4090", "fits")
    assert (step, memory, run, larger) == ("a step", "memory", "10,000 examples", "a larger step")
    assert command == "write, on the command line"
    assert (trainer, loop) == ("write, for a Trainer", "write, in a loop")
    found = answer(capsys, *asked)
    seconds, turns = (f"{found[what]['seconds_per_step']:.3g} s" for what in ("step", "one_after_the_other"))
    assert lines[step].startswith(
        f"{seconds} for 16,384 tokens in 8 micro-batches by layer ({turns} one after the other), "
    )
    assert "bound by the drive" in lines[step]
    assert lines[memory].startswith("49.4 GiB of RAM, 10.8 GiB of 23 GiB on the GPU (chunked loss; ")
    assert lines[run] == "625 steps, 6.5 hours, 44.4 TB written"
    assert found["run"]["written"] == 625 * found["written_bytes_per_step"]
    assert found["run"]["seconds"] == pytest.approx(625 * found["step"]["seconds_per_step"])
    assert lines[larger].startswith("--tokens 32768 --accumulation-steps 4 --one-after-the-other: 79 steps, ")
    # `words` repeats options of `asked`. If an option is given twice, the command uses the last value.
    words, cost = lines[larger].split(": ", 1)
    there = five(capsys, *asked, *words.split())
    assert there[title] == "fits"
    assert there[run] == cost
    assert "in 4 micro-batches one after the other, " in there[step]
    by_layer = 'host_memory="48GiB"), with activations="ssd" if the Trainer computes by layer (SFT, Reward)'
    assert there[trainer].endswith(by_layer)
    assert lines[trainer].startswith(
        "per_device_train_batch_size=2, gradient_accumulation_steps=8, max_grad_norm=1.0, gradient_checkpointing=True, "
        'model_init_kwargs={"dtype": "auto"}, bf16=False; '
        'memascend.trainer.offload(trainer, storage="/mnt/nvme/run", host_memory="48GiB")'
    )
    assert 'host_memory="48GiB", max_grad_norm=1.0' in lines[loop]
    assert lines[command] == (
        "memascend train --model path/to/llama-8b --data data.jsonl --output tuned --storage /mnt/nvme/run "
        "--max_length 1024 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_grad_norm 1 "
        "--gradient_checkpointing True --host_memory 48GiB"
    )
    assert "linear_cross_entropy" in lines[loop]
    assert "linear_cross_entropy" not in five(capsys, *asked, "--loss", "full")[loop]


def test_trainer_line_turns_on_checkpointing_before_activations_on_storage(capsys):
    asked = ["llama-8b", "--gpu", "RTX 4090", "--ram", "128GB", "--tokens", "1024", "--length", "1024",
             "--accumulation-steps", "64", "--one-after-the-other"]  # fmt: skip
    hint = 'activations="ssd" if the Trainer computes by layer (SFT, Reward)'
    assert five(capsys, *asked)["write, for a Trainer"].endswith(f", with {hint}")
    kept = five(capsys, *asked, "--keep-activations")["write, for a Trainer"]
    assert kept.endswith(f", with gradient_checkpointing=True and {hint}")


def test_the_proposal_has_the_largest_micro_batch_that_fits(capsys):
    words = (*EIGHT, "--length", 1024)
    proposal = answer(capsys, *words)["proposal"]
    asked = ("--tokens", proposal["tokens"], "--accumulation-steps", proposal["micro_batches"])
    assert proposal["bound"] == "compute"
    assert proposal["activations"] == "device"
    assert answer(capsys, *words, "--tokens", proposal["tokens"])["fits"]
    assert not answer(capsys, *words, "--tokens", 2 * proposal["tokens"], status=1)["fits"]
    turns = answer(capsys, *words, *asked, "--one-after-the-other")["step"]
    assert turns["seconds_per_step"] == pytest.approx(proposal["seconds_per_step"])


def test_by_layer_is_proposed_where_it_is_much_faster(capsys):
    words = ("qwen3-30b-a3b", *EIGHT[1:], "--length", 1024)
    proposal = answer(capsys, *words)["proposal"]
    layered = proposal["by_layer"]
    assert layered["run"]["seconds"] < 0.9 * proposal["run"]["seconds"]
    asked = ("--accumulation-steps", layered["micro_batches"], "--activations", layered["activations"])
    found = answer(capsys, *words, *asked)
    assert found["step"]["seconds_per_step"] == pytest.approx(layered["seconds_per_step"])
    assert found["run"]["written"] == layered["run"]["written"]
    line = five(capsys, *words)["a larger step"]
    assert f"; by layer with --accumulation-steps {layered['micro_batches']} --activations ssd: " in line


def test_nothing_is_proposed_to_several_ranks(capsys):
    # Several ranks compute micro-batches one after the other, so a step with more micro-batches moves more bytes.
    assert answer(capsys, *EIGHT, "--ranks", 2)["proposal"] is None


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("llama-8b --gpu 3060 --host-memory 48GiB --tokens 32768 --length 2048", "--tokens 8192"),
        # Only files have room for the checkpointed activations of 64 micro-batches. The next case also needs smaller
        # micro-batches.
        ("llama-8b --gpu 4090 --host-memory 48GiB --tokens 4096 --accumulation-steps 64", "--activations ssd"),
        (
            "llama-8b --gpu 4090 --host-memory 48GiB --tokens 65536 --length 2048 --accumulation-steps 64",
            "--tokens 32768 --activations ssd",
        ),
        # With `--keep-activations`, activations are not checkpointed, so `--activations ssd` would move 0 bytes. `plan`
        # proposes fewer micro-batches instead.
        pytest.param(
            "qwen-1.5b --gpu 3060 --tokens 2048 --keep-activations --accumulation-steps 8",
            "--accumulation-steps 1",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_plan_proposes_options_that_fit_if_the_asked_batch_does_not(capsys, words, option):
    lines = five(capsys, *words.split(), status=1)
    title = next(iter(lines))
    assert lines[title].startswith("does not fit: the RTX ")
    assert lines["what fits"].startswith(f"{option}: ")
    assert not any(line.startswith("write") for line in lines)
    # `option` may repeat options of `words`. If an option is given twice, the command uses the last value.
    assert five(capsys, *words.split(), *option.split())[title] == "fits"


def test_proposed_options_do_not_enlarge_the_asked_batch(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("memascend.plan.decision.free_space_beside", lambda *_: 30 << 30)
    monkeypatch.setattr("memascend.cli.plan.machine.drive_at", lambda _: (Drive(read=5e9, write=4e9), {}))
    lines = five(capsys, "qwen-1.5b", "--gpu", "4090", "--tokens", 2048, "--storage", tmp_path / "run", status=1)
    assert lines["what fits"].startswith("--state bf16: ")


def test_plan_reports_that_not_even_one_sequence_fits(capsys):
    assert "not one sequence of this length" in five(capsys, "llama-70b", "--gpu", "10,4,10", status=1)["what fits"]


def test_plan_at_the_smallest_budget_fits_without_room_for_a_proposal(capsys):
    # If activations are stored in files, the budget needs room for chunks of activations. The smallest budget has no
    # such room, so `plan` cannot propose to store activations in files.
    smallest = ("llama-8b", "--gpu", "4090", "--drive", "5,4", "--tokens", 2048, "--accumulation-steps", 8)
    with contextlib.suppress(SystemExit):
        main(["plan", *map(str, smallest), "--host-memory", "1MiB"])
    budget = re.search(r"smallest budget that works is ([\d.]+\w+)", capsys.readouterr().err)[1]
    assert next(iter(five(capsys, *smallest, "--host-memory", budget).values())) == "fits"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--tokens 3000", "is not a multiple of 2048, the tokens of a sequence: pass --tokens 2048"),
        ("--tokens 1024 --length 4096", "--tokens 1024 is not a multiple of 4096, the tokens"),
        ("--length 8192 --tokens 8192", "more than the model's maximum of 4096 tokens"),
        ("--keep-activations --activations ssd", "leave one of the two options out"),
        ("--gpu 1,1e300,25", "TFLOPS,GB,PCIE_GB_S"),
    ],
)
def test_plan_rejects_contradictory_or_invalid_options(capsys, words, says):
    assert main(["plan", "olmo2-7b", "--gpu", "4090", *words.split()]) == 1
    assert says in capsys.readouterr().err


def test_unnamed_gpu_has_memory_separate_from_the_host(capsys):
    found = answer(capsys, "qwen-1.5b", "--device", "cuda", *DEFAULT)
    assert found["host_bytes"] < 2 << 30 < found["device_bytes"]
    lines = five(capsys, "qwen-1.5b", "--device", "cuda")
    title = "qwen-1.5b, 1.54 B parameters, on a GPU that is not named"
    assert lines[title] == "fits the drive; pass --gpu to check whether it fits the GPU"


def test_plan_marks_a_drive_that_is_assumed(capsys):
    assert "assumed: a drive of 5 and 4 GB/s (--drive)" in five(capsys, "llama-8b", "--gpu", "4090")["a step"]
    assert "(--drive)" not in five(capsys, "llama-8b", "--gpu", "4090", "--drive", "gen4")["a step"]
