"""Tests the command line: its output and exit status, `doctor --storage`, and `train` without TRL."""

import argparse
import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.disks import command

import memascend
from memascend import nvme
from memascend.cli import _in_own_words, _ran, main, storage
from memascend.cli.demo import Settings, Side, row_shown
from memascend.cli.store import _groups
from memascend.cli.train.arguments import OFFLOAD, parse, require_model
from memascend.errors import MemascendError
from memascend.plan.options import parse_bytes
from memascend.text import (
    bytes_shown,
    counted,
    duration_shown,
    listed,
    seconds_shown,
    size_option,
    table,
    terabytes_shown,
)

ROOT = Path(__file__).resolve().parents[2]


def test_doctor_prints_one_screen(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in ("system", "processor", "memory", "memlock limit", "huge pages", "pinning", "torch", "triton"):
        assert subject in out
    assert len(out.splitlines()) < 50


def test_doctor_advises_float32_for_a_processor_without_units_for_bfloat16(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for fast, says in ((25, True), (3, False)):
        speeds = {"bfloat16": 2e9, "float32": fast * 2e9}
        monkeypatch.setattr("memascend.plan.hardware.product_flops", speeds.__getitem__)
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert f"products take {fast} times as long as in float32" in out
        assert ("`--dtype float32`" in out) == says


class SlowVolume:
    """A volume of 64 MiB whose writes take 10 ms. Records the offsets of its transfers."""

    size = 64 << 20

    def __init__(self):
        self.written, self.read_at = set(), set()

    def write(self, _tensor, offset):
        self.written.add(offset)
        return SimpleNamespace(wait=lambda: time.sleep(0.01))

    def read(self, _tensor, offset):
        self.read_at.add(offset)
        return SimpleNamespace(wait=lambda: None)

    def flush(self):
        """Does nothing."""


def test_doctor_reads_only_the_bytes_that_it_wrote_to_a_slow_disk(monkeypatch):
    monkeypatch.setattr(storage, "_TRIAL_SECONDS", 0.1)
    volume = SlowVolume()
    assert set(storage._measured(volume, ("write", "read"))) == {"write", "read"}
    assert volume.read_at == volume.written
    assert len(volume.written) < 64


@pytest.mark.timeout(300)
def test_demo_resumes_a_killed_run_with_the_same_bits(capsys, tmp_path):
    small = ["--steps", "3", "--layers", "2", "--width", "64"]
    assert main(["demo", *small, "--storage", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "kill -9" in out
    assert "resumed from" in out
    assert "3 of 3 losses have the same bits" in out
    assert not list(tmp_path.iterdir())


def test_demo_marks_rows_whose_bits_differ():
    side = {"loss": 1.0, "seconds": 1.0, "held": 1 << 20}
    first, second = row_shown(1, side, side), row_shown(2, side, {**side, "loss": 1.0000001})
    assert ("yes" in first, "NO" in first, "NO" in second) == (True, False, True)


@pytest.mark.timeout(300)
def test_demo_raises_the_error_of_a_side():
    settings = Settings(layers=1, width=64, storage="/proc/none")
    with Side(settings) as side, pytest.raises(MemascendError, match="/proc/none"):
        side.answer()


@pytest.mark.timeout(300)
def test_demo_raises_an_error_if_a_side_was_killed_between_steps():
    with Side(Settings(layers=1, width=64, storage=None)) as side:
        side.answer()
        side._process.kill()
        side._process.wait()
        with pytest.raises(MemascendError, match="ended with exit code -9"):
            side.ask("step")


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["nonsense"], "memascend "),
        (["bench"], "memascend "),
        (["store"], "memascend store "),
        (["doctor", "--nonsense"], "memascend doctor "),
        (["store", "verify", "x", "--nonsense"], "memascend store verify "),
    ],
)
def test_wrong_usage_exits_with_2_and_shows_the_usage_of_its_command(capsys, arguments, usage):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert f"usage: {usage}" in err
    assert ("unrecognized arguments: --nonsense" in err) == ("--nonsense" in arguments)


def test_misspelt_option_error_proposes_the_correct_option(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--stpes", "3"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --stpes 3; did you mean --steps?\n")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("host_memory 2 KiB is too small", "--host-memory 2 KiB is too small"),
        ("no CUDA device for device='cuda': pass device='cpu'", "no CUDA device for --device cuda: pass --device cpu"),
        ("state='8bit' is for torch's Adam", "--state 8bit is for torch's Adam"),
        ("pass a smaller device_memory=, or free", "pass a smaller --device-memory, or free"),
        ("the device of the state is a file", "the device of the state is a file"),
    ],
)
def test_train_errors_name_options_instead_of_offload_arguments(theirs, ours):
    assert _in_own_words(theirs) == ours


def test_help_loads_nothing_large(python):
    python(
        """
import sys
from memascend.cli import main
for words in ([], ["doctor"], ["demo"], ["train"], ["plan"], ["store"], ["store", "verify"]):
    try:
        main([*words, "--help"])
    except SystemExit as ended:
        assert not ended.code, words
    loaded = {"torch", "transformers", "numpy", "yaml", "safetensors"} & sys.modules.keys()
    assert not loaded, (words, loaded)
"""
    )


def test_store_errors_name_train_options_instead_of_existing(capsys):
    """If an error of the store names an argument of offload(), `train` prints the name of its own option instead."""
    found = 0
    for path in sorted((ROOT / "rust/store/src").glob("*.rs")):
        code = re.sub(r"\\\n\s*", "", path.read_text().partition("#[cfg(test)]")[0]).replace('\\"', '"')
        for line in code.splitlines():
            if 'existing="' in line and not line.lstrip().startswith("//"):
                found += 1
                assert "existing=" not in _in_own_words(line), line
                assert "--" in _in_own_words(line)
    assert found > 8
    text = 'the commit before is whole, which existing="previous" opens'

    def run(_):
        raise MemascendError(text)

    assert _ran(argparse.Namespace(command="train", run=run)) == 1
    assert "which --existing previous opens" in capsys.readouterr().err
    assert _ran(argparse.Namespace(command="store", run=run)) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("after", [[], ["doctor"]])
def test_version_option_prints_the_version(capsys, after):
    assert main(["--version", *after]) == 0
    assert capsys.readouterr().out == f"memascend {memascend.__version__}\n"


def test_doctor_does_not_load_the_store_command(loaded):
    loaded(
        "import sys; from memascend.cli import main; main(['doctor']); assert 'memascend.cli.store' not in sys.modules"
    )


def test_demo_error_names_storage_that_is_not_a_folder(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main(["demo", "--storage", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_memascend_without_a_command_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "memascend"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: memascend ")
    for name in ("doctor", "demo", "plan", "store", "train"):
        assert name in done.stdout


def test_closed_output_pipe_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m memascend doctor | head -c 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1535, "1.5 KiB"),
        ((1000 << 10) - 100, "1000 KiB"),
        (1023 << 10, "1023 KiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(nbytes, shown):
    assert bytes_shown(nbytes) == shown


def test_size_option_rounds_up_or_down_by_at_most_1_percent():
    assert (size_option(2_927_455), size_option(2_927_455, up=False)) == ("2.8MiB", "2.79MiB")
    assert (size_option(48 << 30), size_option(48 << 30, up=False)) == ("48GiB", "48GiB")
    for exponent in range(60):
        for nbytes in (2**exponent, 2**exponent + 1, 2 ** (exponent + 1) - 1, 3 * 2**exponent // 2):
            assert nbytes <= parse_bytes(size_option(nbytes)) <= 1.01 * nbytes + 1
            assert 0.99 * nbytes - 1 <= parse_bytes(size_option(nbytes, up=False)) <= nbytes


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (12_345.6, "12,346 s"),
        (999.7, "1000 s"),
        (2, "2 s"),
        (0.9997, "1000 ms"),
        (0.0015, "1.5 ms"),
        (3.25e-6, "3.25 us"),
        (4e-8, "40 ns"),
    ],
)
def test_seconds_shown_picks_the_unit_that_fits(seconds, shown):
    assert seconds_shown(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (59, "59 s"),
        (61, "1 minute"),
        (90, "1.5 minutes"),
        (3_600, "1 hour"),
        (8_000, "2.2 hours"),
        (50_000, "14 hours"),
        (900_000, "10 days"),
    ],
)
def test_durations_are_shown_roughly(seconds, shown):
    assert duration_shown(seconds) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(241 * 10**12, "241 TB"), (int(1.5e12), "1.5 TB"), (int(999.7e9), "1000 GB"), (25 * 10**6, "25 MB")],
)
def test_sizes_of_drives_are_shown_in_decimal_units(nbytes, shown):
    assert terabytes_shown(nbytes) == shown


def test_table_aligns_numbers_to_the_right():
    assert table(("a", "size"), [("x", "1"), ("long", "12")]) == "a     size\n----  ----\nx        1\nlong    12"


def test_listed_shows_ten_names_and_counts_the_others():
    assert listed([*map(str, range(12))]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_counted_uses_the_singular_only_for_1():
    assert (counted(1, "row"), counted(0, "row"), counted(2000, "row")) == ("1 row", "0 rows", "2,000 rows")


# --- doctor on storage: the verdicts "fine", "slower" and "fails" ------------------------


def report(capsys, path, status=0):
    assert main(["doctor", "--json", f"--storage={path}"]) == status
    output = json.loads(capsys.readouterr().out)
    assert output["ok"] is (status == 0)
    assert all(finding.keys() == {"subject", "found", "verdict", "advice"} for finding in output["findings"])
    assert {finding["verdict"] for finding in output["findings"]} <= {"fine", "slower", "fails"}
    return {finding["subject"]: finding for finding in output["findings"]}


def test_doctor_measures_a_folder_and_leaves_no_files(capsys, tmp_path):
    found = report(capsys, tmp_path)
    assert found["io_uring"]["found"] == "available"
    assert found["direct I/O"]["found"].startswith("yes, aligned to ")
    assert found["sequential write"]["found"].endswith("GB/s")
    assert found["sequential read"]["found"].endswith("GB/s")
    assert list(tmp_path.iterdir()) == []


def test_doctor_tests_a_nearly_full_disk_with_a_small_file(capsys, tmp_path, monkeypatch):
    own, sizes = nvme.open, []
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=8192, f_frsize=4096, f_flag=0))
    monkeypatch.setattr(nvme, "open", lambda path, size: sizes.append(size) or own(path, size=size))
    report(capsys, tmp_path)
    assert sizes == [8 << 20]


@pytest.mark.parametrize(
    ("path", "says"),
    [("/proc", "holds no files"), ("/no/such", "does not exist"), ("~/no/such", f"{Path.home()}/no does not exist")],
)
def test_doctor_fails_where_no_file_can_be_created(capsys, path, says):
    assert says in report(capsys, path, 1)["storage"]["advice"]


def test_doctor_does_not_change_an_existing_file(capsys, path):
    path.write_bytes(b"mine")
    report(capsys, path)
    assert path.read_bytes() == b"mine"


@pytest.mark.root
def test_doctor_reads_but_does_not_write_a_raw_device(capsys, loop):
    device = loop(16 << 20)
    with open(device, "r+b") as file:
        file.write(b"mine" * 1000)
    found = report(capsys, device)
    assert "free to use" in found["storage"]["found"]
    assert "not tried" in found["sequential write"]["found"]
    with open(device, "rb") as file:
        assert file.read(4000) == b"mine" * 1000


@pytest.mark.root
def test_doctor_fails_on_mounted_devices_read_only_disks_and_tmpfs(capsys, small_ext4, tmp_path):
    device = command("findmnt", "-no", "SOURCE", small_ext4)
    assert "mounted at" in report(capsys, device, 1)["storage"]["advice"]
    command("mount", "-o", "remount,ro", small_ext4)
    assert "read-only" in report(capsys, small_ext4, 1)["storage"]["advice"]
    memory = tmp_path / "memory"
    memory.mkdir()
    command("mount", "-t", "tmpfs", "none", memory)
    try:
        assert "tmpfs" in report(capsys, memory, 1)["storage"]["advice"]
    finally:
        command("umount", memory)


@pytest.mark.root
def test_doctor_reports_the_errno_of_a_faulty_disk(capsys, faulty, loop):
    faulty.set(read={"errno": errno.EIO})
    device = loop(0, over=faulty.path)
    assert "errno 5" in report(capsys, device, 1)["storage"]["advice"]
    assert os.path.exists(device)


# --- train without TRL -------------------------------------------------------------------

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
    assert line.startswith(f"memascend train: error: {words[0].partition('=')[0]} no longer exists: use ")
    assert successor in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stf", *PLACES], "one of sft, dpo, reward, kto, not 'stf'"),
        (["sft", "dpo", *PLACES], "unrecognized arguments: dpo"),
    ],
)
def test_train_names_a_wrong_method_or_extra_argument(words, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        parse(words)


@pytest.mark.parametrize("words", [["--help"], ["dpo", "-h"]])
def test_train_help_lists_the_options_that_are_not_of_trl(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    assert not caught.value.code
    out = capsys.readouterr().out
    assert all(f"--{name}" in out for name in (*OFFLOAD, "eval", "columns", "dry_run"))
    assert "`trl sft --help`" in out


def test_store_table_groups_tensors_whose_names_differ_only_in_numbers():
    def record(name, shape=(2, 3), state="exp_avg", step=4):
        return {"name": name, "dtype": "float32", "shape": shape, "step": step, "state": [(state, "float32", 1)]}

    layers = [record(f"layers.{layer}.experts.{expert}.weight") for layer in range(3) for expert in range(2)]
    head, _, *rows, _, state = _groups([*layers, record("layers.0.norm"), record("out.1", ())]).splitlines()
    assert head.split() == ["tensors", "count", "dtype", "shape", "updates"]
    assert [row.split()[:2] for row in rows] == [
        ["layers.*.experts.*.weight", "6"],
        ["layers.*.norm", "1"],
        ["out.*", "1"],
    ]
    assert state == "state of each: exp_avg (float32)"
    # Tensors whose shape, number of updates or state differs get separate rows.
    others = [record("a.1"), record("a.2", (3,)), record("a.3", step=5), record("a.4", state="momentum")]
    head, _, *rows = _groups(others).splitlines()
    assert head.endswith("state")
    assert len(rows) == 4
    assert _groups([]).splitlines()[0].startswith("tensors")


def test_mistyped_model_folder_is_rejected_without_a_hub_request(tmp_path, monkeypatch):
    """`require_model` rejects a mistyped folder without a request to the hub.

    If the hub cannot be reached, the error says so.
    """
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    looked: list[str] = []

    def without_network(host, *_):
        looked.append(host)
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", without_network)
    for name in ("small/model", "models/qwen-0.5b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        require_model(name)
    for wrong, says in (
        ("small/mode", r"--model small/mode does not exist: did you mean small/model\? \(.*hf download small/mode"),
        ("models/qwen-0.6b", "did you mean models/qwen-0.5b"),
        ("./models/qwen", "--model ./models/qwen does not exist"),
        ("./nothing", "--model ./nothing does not exist: give the folder"),
        ("a/b/c", "--model a/b/c does not exist: give the folder"),
        ("small", "--model small has no config.json"),
        ("small/model/config.json", "is a file"),
    ):
        with pytest.raises(MemascendError, match=says):
            require_model(wrong)
    assert looked == []
    with pytest.raises(MemascendError, match=r"not in the cache of the hub, and huggingface.co cannot be reached"):
        require_model("owner/another-name")
    assert looked == ["huggingface.co"]
    # A name that only resembles the name of a folder is still looked up on the hub.
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner/model-7b").mkdir()
    (tmp_path / "owner/model-7b/config.json").write_text("{}")
    with pytest.raises(MemascendError, match="cannot be reached"):
        require_model("owner/model-7b-instruct")
    cached = {("adapter_config.json", "abc")}
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda _, file, revision: "there" if (file, revision) in cached else None
    )
    require_model("owner/another-name", "abc")
    with pytest.raises(MemascendError, match="not in the cache"):
        require_model("owner/another-name")


def test_train_without_trl_names_the_packages_to_install():
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
