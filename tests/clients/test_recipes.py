"""Tests that the recipes of the documentation run with the libraries that they use."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = re.compile(r"^#+ ([^\n]+)\n(?:(?!^#+ ).)*?^```py\n(.*?)^```", re.DOTALL | re.MULTILINE)
# `RECIPES` has a pair of title and code for the recipe of AGENTS.md and for each recipe of docs/trainers.md.
PAGE = (ROOT / "docs/trainers.md").read_text()
AGENTS = (ROOT / "AGENTS.md").read_text()
RECIPES = RECIPE.findall(AGENTS) + RECIPE.findall(PAGE)
# The diff in README.md. It adds offloading to a training script.
DIFFERENCE = re.search(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with small/model, the model that the recipes name."""
    folder = tmp_path_factory.mktemp("recipes")
    subprocess.run([sys.executable, ROOT / "examples/small_model.py", "small", "--layers", "2", "--width", "64"],
                   cwd=folder, check=True)  # fmt: skip
    return folder


@pytest.fixture
def server():
    """Yields the address of a server that generates the rollouts of GRPO."""
    with subprocess.Popen(
        [sys.executable, ROOT / "tests/clients/rollout_server.py"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def run(recipe, folder, **environment):
    reply = {**os.environ, "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false", **environment}
    subprocess.run([sys.executable, "-c", recipe], cwd=folder, check=True, env=reply)


@pytest.mark.parametrize("recipe", [pytest.param(code, id=title) for title, code in RECIPES if "GRPO" not in title])
def test_a_recipe_runs(recipe, folder):
    run(recipe, folder)


@pytest.mark.parametrize("kept", ["+ ", "- "], ids=["offloaded", "in memory"])
def test_scripts_before_and_after_the_readme_diff_train(folder, kept):
    (folder / "chats.jsonl").write_text((folder / "small/data/messages_eval.jsonl").read_text())
    script = "".join(line[1:] for line in DIFFERENCE.splitlines(keepends=True) if line[:1] in kept or line == "\n")
    for theirs, ours in (
        ("Qwen/Qwen2.5-7B-Instruct", "small/model"), ("/mnt/nvme/", "readme-"), ("per_device_train_batch_size=32",
        "per_device_train_batch_size=2, max_steps=3, use_cpu=True, report_to='none'"),
    ):  # fmt: skip
        assert theirs in script or (theirs == "/mnt/nvme/" and kept == "- ")
        script = script.replace(theirs, ours)
    run(script, folder)
    assert (folder / "readme-sft.store").exists() or kept == "- "


def test_grpo_recipe_loads_new_weights_into_the_rollout_server_each_step(folder, server):
    (recipe,) = (recipe for title, recipe in RECIPES if "GRPO" in title)
    run(recipe, folder, ROLLOUTS=server)
    asked = urllib.request.Request(server + "/count", b"{}", {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
        # The server loaded weights twice: before the first step, and before the second step.
        assert json.load(answer) == {"loaded": 2}


def test_each_kind_of_training_in_the_docs_has_a_recipe():
    titles = re.findall(r"^##+ (.*)", PAGE, re.MULTILINE)
    of_programs = titles.index("Axolotl, ms-swift, LLaMA-Factory")
    # The section at index `of_programs` has no recipes, but settings files. test_integrations.py tests these files.
    kinds = titles[titles.index("Preferences (DPO)") : of_programs]
    kinds += titles[titles.index("Loops of other libraries") + 1 : titles.index("What can go wrong")]
    assert [title for title, _ in RECIPE.findall(PAGE)] == ["Trainers", *kinds]
    assert all(len(RECIPE.findall(text)) == text.count("\n```py\n") > 0 for text in (AGENTS, PAGE))
