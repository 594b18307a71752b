"""Tests README and docs: snippets run, commands and examples work, links have targets, and drawings are up to date."""

import ast
import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import torch

from memascend.cli import main

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/memascend/memascend/blob/main/"
PICTURES = "https://raw.githubusercontent.com/memascend/memascend/main/"
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "llms.txt", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [
    *PAGES,
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/NOTES.md")),
]
# The words that may follow the opening fence of a code block, with the use of each word. GitHub and the site's renderer
# know these words. A second word after a fence would break the block.
KINDS = {
    "python": "run by this file; README's block has a test of its own",
    "diff": "changes of a program, run by the tests of RUN_ELSEWHERE",
    "py": "run by the tests of RUN_ELSEWHERE",
    "console": "commands that a reader types, run by this file",
    "bash": "run by tests/distributed/test_hosts_page.py",
    "": "commands and code that tests cannot run",
    "text": "output of a program",
    "yaml": "settings of a program",
}
RUN_ELSEWHERE = {
    "README.md": "clients/test_recipes.py",
    "AGENTS.md": "clients/test_recipes.py",
    "docs/trainers.md": "clients/test_recipes.py",
    "docs/gpus.md": "distributed/test_hosts_page.py",
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name(path):
    return str(path.relative_to(ROOT))


def blocks(path, kind):
    """Returns the contents of a page's code blocks of one kind: `kind` is the word after the opening fence."""
    return [body for found, body in BLOCK.findall(path.read_text()) if found == kind]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_code_fences_use_known_words_and_are_closed(document):
    fences = re.findall(r"^ *(?:```|~~~)(.*)$", document.read_text(), re.MULTILINE)
    assert set(fences) <= KINDS.keys()
    assert len(fences) % 2 == 0


def test_pages_with_py_or_diff_blocks_have_a_test_in_run_elsewhere():
    assert {name(path) for path in PAGES if blocks(path, "py") or blocks(path, "diff")} == RUN_ELSEWHERE.keys()
    assert all((ROOT / "tests" / test).exists() for test in RUN_ELSEWHERE.values())


# Leaves out README, because test_readme_loop_trains_and_its_second_run_takes_no_step tests its snippet.
SNIPPETS = [
    pytest.param(body, id=f"{name(path)}-{number}")
    for path in PAGES[1:]
    for number, body in enumerate(blocks(path, "python"))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs(snippet, loaded, tmp_path, monkeypatch):
    if "transformers.Trainer" in snippet:
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    loaded(snippet)


def test_readme_loop_trains_and_its_second_run_takes_no_step(loaded, tmp_path):
    """Runs README's loop twice with a small model. The second run finds that all steps are done, and takes no step."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(vocab_size=1000, num_hidden_layers=2, **shape)
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (snippet,) = blocks(ROOT / "README.md", "python")
    for theirs, ours in (
        ('"Qwen/Qwen2.5-7B-Instruct"', f'"{tmp_path / "model"}"'),
        ('"/mnt/nvme/', f'"{tmp_path}/'),
        (", 100):", ", 3):"),
        ("(8, 512)", "(2, 8)"),
    ):
        assert theirs in snippet
        snippet = snippet.replace(theirs, ours)
    for steps in ("0 1 2", ""):
        printed = loaded(snippet.replace("    tokens =", "    print('step', step)\n    tokens ="))
        assert re.findall(r"step (\d)", printed) == steps.split()


def lines(path):
    """Yields commands of a page, each as one line.

    These are the commands in "console" blocks and in blocks of no kind, and `memascend` commands in sentences. Of the
    commands in sentences, yields only those that have an option with a word after it.
    """
    for span in re.findall(r"`(memascend [^`]* --\w[^`]* [^`]+)`", BLOCK.sub("", path.read_text())):
        yield " ".join(span.split())
    for kind in ("console", ""):
        for body in blocks(path, kind):
            for line in body.replace("\\\n", " ").splitlines():
                if line.startswith(("memascend ", "python examples/", "make ", "pip ")):
                    yield line


COMMANDS = [
    pytest.param(shlex.split(line)[1:], id=f"{name(path)}-{number}")
    for path in PAGES
    for number, line in enumerate(line for line in lines(path) if line.startswith("memascend "))
]


@pytest.mark.parametrize("words", COMMANDS)
def test_documented_command_exists_and_accepts_its_options(words, monkeypatch):
    command = importlib.import_module(f"memascend.cli.{words[0]}")
    taken = []
    monkeypatch.setattr(command, "run", lambda options: taken.append(options) or 0)
    assert main(words) == 0
    assert len(taken) == 1


def typed(path):
    """Returns the commands of a page's "console" blocks, without the commands that begin with `make` or `pip`."""
    console = [line for body in blocks(path, "console") for line in body.replace("\\\n", " ").splitlines()]
    return [line for line in console if not line.startswith(("make ", "pip "))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", [page for page in PAGES if typed(page)], ids=name)
def test_every_command_runs_in_a_fresh_folder(path, tmp_path):
    """Runs a page's commands in order, in a folder that contains only a copy of examples/.

    No command downloads a file.
    """
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for line in typed(path):
        program, *words = shlex.split(line, comments=True)
        module = ["-m", "memascend"] if program == "memascend" else []
        subprocess.run([sys.executable, *module, *words], cwd=tmp_path, check=True, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs_with_the_commands_of_its_docstring(example, tmp_path):
    """Runs the commands of an example's docstring in a fresh folder.

    The test fails if the example itself warns.
    """
    if example == "lora.py":
        pytest.importorskip("peft")
    printed = ast.get_docstring(ast.parse((ROOT / "examples" / example).read_text()))
    lines = re.findall(r"^ +(python|torchrun) (.*\bexamples/.*)", printed, re.MULTILINE)
    assert lines
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for program, line in lines:
        words = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        words += shlex.split(line, comments=True)
        words += {"hf_trainer.py": ["--steps", "4"], "finetune.py": ["--steps", "8"]}.get(Path(words[0]).name, [])
        done = subprocess.run([sys.executable, "-W", "default", *words], cwd=tmp_path, check=False, timeout=900,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        answer = [line for line in done.stderr.splitlines() if "Warning: " in line]
        # Warnings from other packages are allowed.
        assert all("/site-packages/" in line for line in answer), done.stderr


CALLERS = ["README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", ".ci/run", ".github/workflows/release.yml"]


@pytest.mark.parametrize("document", CALLERS)
def test_every_make_command_exists(document):
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", (ROOT / document).read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets, named - targets


def anchors(path):
    """Returns the anchors of a page's headings, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_link_targets_and_headings_exist(document):
    for link in re.findall(r"\]\(([^)\s]+)", document.read_text()):
        place, _, anchor = link.partition("#")
        if place.startswith((REPOSITORY, PICTURES)):
            target = ROOT / place.removeprefix(REPOSITORY).removeprefix(PICTURES)
        elif place.startswith("http"):
            continue
        else:
            target = document.parent / place if place else document
        assert target.exists(), f"{name(document)} links to {link}: no such file"
        assert not anchor or anchor in anchors(target), f"{name(document)} links to {link}: no such heading"


def test_readme_links_are_absolute_https_urls():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert all(link.startswith("https://") for link in links)


def test_no_two_pages_name_the_same_storage():
    """Each page must name its own storage paths.

    A reader may try several pages in one folder. If two pages used the same path, the second page would find the store
    of a different model, and memascend would reject this store.
    """
    path = re.compile(r"""(?:\bstorage(?:=|: )|--storage |Store\.create\()["']?([\w/{][\w./{}-]*[a-z}/])\b""")
    pages = {}
    for page in PAGES:
        for storage in set(path.findall(page.read_text())) - {"options.storage"}:
            assert storage not in pages, f"{name(page)} and {pages[storage]} both use {storage}: change one path"
            pages[storage] = name(page)
    assert len(pages) > 20


def test_the_site_has_every_page():
    listed = re.findall(r"([\w-]+\.md)", (ROOT / "zensical.toml").read_text())
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_drawings_equal_the_output_of_draw_py(tmp_path):
    drawn = runpy.run_path(str(ROOT / "docs/drawings/draw.py"))
    for which in ("places", "step", "commit"):
        drawn[which]().save(tmp_path / f"{which}.svg")
        assert (tmp_path / f"{which}.svg").read_bytes() == (ROOT / f"docs/drawings/{which}.svg").read_bytes()


def test_recorded_terminal_shows_the_commands_of_terminal_py():
    """If you change the commands in docs/drawings/terminal.py, record the terminal again."""
    script = runpy.run_path(str(ROOT / "docs/drawings/terminal.py"))
    drawing = (ROOT / "docs/drawings/terminal.svg").read_text()
    shown = [unescape(re.sub("<.*?>", "", text)) for text in re.findall("<text.*?</text>", drawing)]
    assert f"<title>{script['TITLE']}</title>" in drawing
    first, second = (at for at, line in enumerate(shown) if line == "$ " + script["COMMAND"])
    assert shown[1:first] == script["SETTINGS"].splitlines()
    resumed = f"memascend: resuming at step {script['KILLED_AFTER'] + 1} of {script['STEPS']}"
    assert (shown[first + 1], shown[second - 1], shown[second + 1]) == (
        f"memascend: a new run of {script['STEPS']} steps", "Killed", resumed
    )  # fmt: skip
