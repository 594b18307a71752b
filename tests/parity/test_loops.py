"""Tests models, loops, optimizers and formats of state: the same code gives the same bits in RAM and offloaded."""

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from parity.harness import check, combined, differences, reference
from parity.zoo_loops import BY_LAYER, COMPILED, FORMATS, LOOPS, OPTIMIZERS, OTHERS_BY_LAYER
from parity.zoo_plain import PLAIN, Stack, next_token, tokens
from parity.zoo_transformers import TRANSFORMERS
from support.bits import same_states
from support.chains import offloaded, train

from memascend.engine import Store


@combined([*PLAIN, *TRANSFORMERS])
def test_offloaded_model_equals_torch_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


@combined([*LOOPS, *OPTIMIZERS, *FORMATS])
def test_offloaded_training_loop_equals_torch_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


# torch.compile() gives different warnings in different versions of torch.
@pytest.mark.filterwarnings("ignore")
@combined(COMPILED)
def test_offloaded_compiled_blocks_equal_torch_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


@pytest.mark.filterwarnings("ignore")
@combined([*BY_LAYER, *OTHERS_BY_LAYER])
def test_micro_batches_by_layer_equal_one_after_the_other_in_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


def test_differences_reports_each_kind_of_changed_result():
    case = next(case for case in PLAIN if case.name == "rooted")
    expected = reference(case, 1)
    assert differences(expected, expected) == []

    def changed(**fields):
        return differences(expected, dataclasses.replace(expected, **fields))

    weights = {**expected.weights, "shift": torch.nextafter(expected.weights["shift"], torch.tensor(9.0))}
    assert changed(weights=weights)[0].startswith("parameter shift: 32 of 32 elements")
    assert "buffer seen" in changed(buffers={"seen": expected.buffers["seen"] + 1})[0]
    assert changed(buffers={}) == ["missing: buffer seen"]
    assert changed(records=[*expected.records[:-1], expected.records[-1] + 1e-6])[0].startswith("record 3")
    state = {**expected.state, "unused": {"exp_avg": torch.zeros(5)}}
    assert changed(state=state) == ["not in the reference: state of unused: exp_avg"]
    assert changed(random=expected.random + 1)[0].startswith("random numbers drawn")


@pytest.mark.parametrize("durability", ["step", "none"])
def test_ram_tier_records_keep_their_address_and_are_never_read(durability, tmp_path):
    model, optimizer = offloaded(tmp_path / "run.store", Stack(), host_memory="64MiB", durability=durability)
    seen = set()

    def note(module, _):
        seen.update(parameter.data_ptr() for parameter in module.parameters(recurse=False))

    with optimizer:
        for module in model.modules():
            module.register_forward_pre_hook(note)
        train(model, optimizer, tokens(torch.Generator().manual_seed(2), 3), next_token)
        report = optimizer.report()
    assert len(seen) == len(list(model.parameters())), "each parameter must have one address for the whole run"
    assert report.units["fetches"] == 0
    assert report.owners["records in RAM"].bytes > 0
    assert report.owners["gradients in RAM"].peak > 0
    # The run reads no values and no state, because all records stay in RAM after they were first written.
    assert {report.read[kind] for kind in ("values", "values, update", "state")} == {0}
    if durability == "none":
        assert report.written["values"] == report.written["state"] == 0


# --- the loops with schedulers in docs/resume.md ---------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume.md"
PAGE_LOOPS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def life(loop, lines=None):
    """Runs the code `loop` in the current folder, and returns the lines that the code prints.

    Stops the code after `lines` lines. None: runs the code to its end.
    """
    printed = []

    def note(*words, flush):
        del flush
        printed.append(words)
        if len(printed) == lines:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    with contextlib.suppress(KeyboardInterrupt):
        exec(loop, {"print": note})  # noqa: S102 - the page's code
    return printed


def committed(folder):
    """Returns the step, options and user state of the store in `folder`, and a dictionary of all stored values."""
    (path,) = folder.glob("*.store")
    with Store.open(path) as store:
        values = {}
        for record in store.each_record():
            value, state = store.read(record["name"])
            values |= {f"{record['name']} {of}": tensor for of, tensor in {"": value, **state}.items()}
        return (store.step, store.hyperparameters, store.user_state), values


@pytest.mark.filterwarnings("ignore:the stored options are used:UserWarning")
@pytest.mark.parametrize("loop", PAGE_LOOPS, ids=["cosine", "by-metric"])
def test_stopped_loop_of_the_docs_equals_an_uninterrupted_loop(tmp_path, monkeypatch, loop):
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
