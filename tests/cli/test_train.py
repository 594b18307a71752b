"""Tests what `memascend train` says without TRL: its help, options of earlier versions, and what to install."""

import subprocess
import sys
from argparse import ArgumentError

import pytest

from memascend.cli import main
from memascend.cli.train.arguments import OFFLOAD, parse

PLACES = ["--model", "m", "--data", "d", "--output", "o", "--storage", "s"]


@pytest.mark.parametrize(
    ("words", "successor"),
    [
        (["--batch", "4"], "--per_device_train_batch_size"),
        (["--accumulate=8"], "--gradient_accumulation_steps"),
        (["--merge"], "merge_and_unload"),
        (["--eval_every", "5"], "--eval_steps"),
        (["--previous"], "--existing previous"),
    ],
)
def test_an_option_of_an_earlier_version_names_its_successor(capsys, words, successor):
    with pytest.raises(SystemExit) as caught:
        main(["train", *PLACES, *words])
    assert caught.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: memascend train [sft|dpo|reward|kto] --model")
    assert line.startswith(f"memascend train: error: {words[0].partition('=')[0]} is gone: give ")
    assert successor in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stf", *PLACES], "one of sft, dpo, reward, kto, not 'stf'"),
        (["sft", "dpo", *PLACES], "unrecognized arguments: dpo"),
    ],
)
def test_wrong_usage_is_named(words, message):
    with pytest.raises(ArgumentError, match=message):
        parse(words)


@pytest.mark.parametrize("words", [["--help"], ["dpo", "-h"]])
def test_help_lists_what_is_not_trls(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    assert not caught.value.code
    out = capsys.readouterr().out
    assert all(f"--{name}" in out for name in (*OFFLOAD, "eval", "columns", "dry_run"))
    assert "`trl sft --help`" in out


def test_without_trl_it_says_what_to_install():
    program = (
        "import sys; sys.modules.update(datasets=None, trl=None); from memascend.cli import main; "
        f"sys.exit(main(['train', *{PLACES!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 1
    assert done.stderr == (
        'memascend train: datasets is not installed: pip install ".[train]" in a clone of memascend, or '
        '"dist/NAME.whl[train]" with a wheel\'s name\n'
    )
