"""Runs `memascend plan` on the config of a small Llama model; finds the peak of allocated bytes in a profile."""

import json

import pytest

from memascend.cli import main

LAYERS, HIDDEN, WIDE, VOCABULARY = 2, 64, 160, 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def answer(capsys, *words, status=0):
    """Runs `memascend plan --json`; returns the parsed output."""
    assert main(["plan", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def shown(capsys, *words, status=0):
    """Runs `memascend plan --verbose`; returns its output and errors."""
    assert main(["plan", *map(str, words), "--verbose"]) == status
    return "".join(capsys.readouterr())


def peak_of(profile):
    """Returns the largest number of bytes that were allocated on the CPU at once during a profile.

    Allocations before the profile do not count.
    """
    events = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
