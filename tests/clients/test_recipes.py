"""Tests that the recipes of docs/recipes.md run against the libraries that they are for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python client\n(.*?)^```",
    (ROOT / "docs/recipes.md").read_text(),
    re.DOTALL | re.MULTILINE,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where small/model is, which the recipes name in place of the reader's own."""
    folder = tmp_path_factory.mktemp("recipes")
    subprocess.run([sys.executable, ROOT / "examples/small_model.py", "small", "--layers", "2", "--width", "64"],
                   cwd=folder, check=True)  # fmt: skip
    return folder


@pytest.mark.parametrize(("title", "recipe"), RECIPES, ids=[title for title, _ in RECIPES])
def test_a_recipe_runs(title, recipe, folder):
    assert title
    subprocess.run([sys.executable, "-c", recipe], cwd=folder, check=True, env={**os.environ, "WANDB_MODE": "disabled"})


def test_each_library_has_one():
    assert len(RECIPES) == 4
