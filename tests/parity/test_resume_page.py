"""Tests the loops with schedulers that docs/resume.md shows: stopped in the midst, they go on as one that was not."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from support.bits import same_states

from memascend.engine import Store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume.md"
LOOPS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def life(loop, lines=None):
    """Runs a loop in the present folder until it printed so many lines; all that it printed."""
    printed = []

    def note(*words, flush):
        del flush
        printed.append(words)
        if len(printed) == lines:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    with contextlib.suppress(KeyboardInterrupt):
        exec(loop, {"print": note})  # noqa: S102 - it is the page's
    return printed


def committed(folder):
    """The options and values that the store of a folder holds."""
    (path,) = folder.glob("*.store")
    with Store.open(path) as store:
        values = {}
        for record in store.each_record():
            value, state = store.read(record["name"])
            values |= {f"{record['name']} {of}": tensor for of, tensor in {"": value, **state}.items()}
        return (store.step, store.hyperparameters, store.user_state), values


@pytest.mark.filterwarnings("ignore:the stored options stand:UserWarning")
@pytest.mark.parametrize("loop", LOOPS, ids=["cosine", "by-metric"])
def test_loops_that_were_stopped_have_the_rates_and_weights_of_one_that_was_not(tmp_path, monkeypatch, loop):
    printed = {}
    for name, lives in (("whole", [None]), ("stopped", [4, 3, None])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        printed[name] = [line for lines in lives for line in life(loop, lines)]
    assert len(printed["whole"]) == 12
    assert printed["stopped"] == printed["whole"]
    (options, values), (wanted_options, wanted) = committed(tmp_path / "stopped"), committed(tmp_path / "whole")
    assert options == wanted_options
    assert same_states(values, wanted)
