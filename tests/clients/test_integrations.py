"""Tests memascend in Axolotl, ms-swift and LLaMA-Factory: killed runs with settings of examples/ resume exactly.

`make test-axolotl`, `make test-swift` and `make test-llamafactory` each use their own environment. In each environment,
only one of the three programs is installed, and the tests of the other two programs are skipped.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.lives import life
from support.small_folder import make_model, write_rows

from memascend.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PYTHON = Path(sys.executable).parent
TEXT = "What is it? It is a test of a small model and the answer to the question is yes or no"
STEPS = 18
FAILED = {*range(-64, 256)} - {0}
LOGGED = re.compile(r"\{'loss': '(\S+)', 'grad_norm': '(\S+)', 'learning_rate': '(\S+)',.*?'epoch': '(\S+)'")

pytestmark = pytest.mark.timeout(300)


def needs(program):
    return pytest.mark.skipif(importlib.util.find_spec(program) is None, reason=f"{program} is not installed")


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with a model and conversations. Their file names are the names in the examples."""
    make_model(tmp_path / "model", torch.float32)
    turns = [(TEXT[row % 5 :][:12], TEXT[row * 3 % 7 :][:20]) for row in range(24)]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": printed}]}
        for asked, printed in turns
    ]
    write_rows(tmp_path / "data.jsonl", rows)
    return tmp_path


def example(folder, name, *replaced):
    """Copies a file of examples/ into `folder`. `replaced` has pairs of a text in the file and its replacement."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text, encoding="utf-8")


def run(folder, command, **how):
    """Runs a program once; returns its logged losses, norms and learning rates by epoch, and its output."""
    path = f"{PYTHON}:{os.environ['PATH']}"
    how = {"ends": {0}, **how}
    _, output = life(command, cwd=folder, PATH=path, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hub"), **how)
    return {found[3]: found[:3] for found in LOGGED.findall(output)}, output


def require_exact(folder, command, weights, **environment):
    """Kills a run, ends the resumed run by Ctrl-C, and resumes it again.

    Requires that these runs log and save the same bits as an uninterrupted run.
    """
    whole, _ = run(folder, command, **environment)
    expected = digest(folder, weights)
    assert len(whole) == STEPS
    shutil.rmtree(folder / "trained")
    (folder / "run.store").unlink()
    logged, count = {}, 0
    for lines, by in ((5, signal.SIGKILL), (4, signal.SIGINT), (None, None)):
        kill = {} if lines is None else {"kill": ("{'loss'", lines), "by": by, "ends": FAILED}
        more, _ = run(folder, command, **kill, **environment)
        logged |= more
        count += len(more)
    # A resumed run may log the last step of the killed run once more.
    assert STEPS <= count <= STEPS + 2
    assert logged == whole
    assert digest(folder, weights) == expected


def digest(folder, weights):
    return hashlib.sha256((folder / "trained" / weights).read_bytes()).hexdigest()


AXOLOTL = ("axolotl.yaml", ("bf16: true", "bf16: false"), ("logging_steps: 10", "logging_steps: 1"))
TRAIN_AXOLOTL = ("axolotl", "train", "axolotl.yaml", "--launcher", "python")


@needs("axolotl")
def test_axolotl_resumes_a_killed_run_exactly(folder):
    example(folder, *AXOLOTL)
    require_exact(folder, TRAIN_AXOLOTL, "model.safetensors", AXOLOTL_DO_NOT_TRACK="1")


@needs("axolotl")
def test_axolotl_rejects_an_unknown_option_before_it_loads_the_model(folder):
    example(folder, *AXOLOTL, ("host_memory:", "hostmemory:"))
    shutil.rmtree(folder / "model")
    with pytest.raises(AssertionError, match=r"memascend has no option 'hostmemory': its options are .*host_memory"):
        run(folder, TRAIN_AXOLOTL, AXOLOTL_DO_NOT_TRACK="1")


@needs("axolotl")
def test_axolotl_plugin_keeps_null_options(folder):
    """Axolotl drops settings that are null. The plugin keeps `master_dtype: null`, which turns off master weights."""
    example(folder, *AXOLOTL, ("host_memory: 8GiB", "master_dtype: null"))
    code = "from axolotl.cli.config import load_cfg; print('options', dict(load_cfg('axolotl.yaml').memascend))"
    _, output = run(folder, (sys.executable, "-c", code), AXOLOTL_DO_NOT_TRACK="1")
    assert "options {'storage': 'run.store', 'master_dtype': None}" in output


@needs("swift")
def test_swift_resumes_a_killed_run_exactly(folder):
    example(folder, "swift.sh", ("--logging_steps 10", "--logging_steps 1 --use_cpu true"))
    command = ("sh", "swift.sh")
    require_exact(folder, command, f"checkpoint-{STEPS}/model.safetensors", USE_HF="1", MODELSCOPE_CACHE=str(folder))


@needs("swift")
def test_swift_options_are_parsed_from_name_value_text():
    from memascend.integrations.ms_swift import _options

    assert _options("storage=run.store,host_memory=8GiB") == {"storage": "run.store", "host_memory": "8GiB"}
    found = _options("storage=[/a=1/x.store, /b/y.store], log_steps=8,master_dtype=null")
    assert found == {"storage": ["/a=1/x.store", "/b/y.store"], "log_steps": 8, "master_dtype": None}
    for wrong in ("storage", "storage=[", None):
        with pytest.raises(ConfigError, match=r"name=value|needs storage"):
            _options(wrong)


@needs("llamafactory")
def test_llama_factory_resumes_a_killed_run_exactly(folder):
    installed = Path(importlib.util.find_spec("llamafactory").origin).parent
    shutil.copytree(installed, folder / "site/llamafactory")
    patch = EXAMPLES / "llamafactory.patch"
    subprocess.run(["patch", "--silent", "-p1", "-d", folder / "site", "-i", patch], check=True)
    example(folder, "llamafactory.yaml", ("bf16: true", "use_cpu: true"), ("logging_steps: 10", "logging_steps: 1"))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    shape = {"file_name": "data.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    write_rows(folder / "dataset_info.json", [{"own": shape}])
    path = f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    require_exact(folder, ("llamafactory-cli", "train", "llamafactory.yaml"), "model.safetensors", PYTHONPATH=path)


def test_options_of_rejects_unknown_options_and_missing_storage():
    from memascend.integrations import options_of

    given = {"storage": "run.store", "clipping": "torch", "host_memory": "8GiB"}
    assert options_of(given) == given
    with pytest.raises(ConfigError, match=r"memascend has no option 'memory': its options are .*host_memory"):
        options_of({**given, "memory": 1})
    with pytest.raises(ConfigError, match="needs storage"):
        options_of({"host_memory": "8GiB"})
