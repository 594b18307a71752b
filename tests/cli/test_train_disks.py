"""Tests `memascend train` on an output disk without space: before the run, at a save, and once there is space again."""

import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.bits import same_states  # noqa: E402
from support.small_folder import make_model, write_rows  # noqa: E402

from memascend.checkpoint.files import file_errors  # noqa: E402
from memascend.cli import main  # noqa: E402
from memascend.cli.train.output import Output, Ranks, Record  # noqa: E402
from memascend.errors import StorageError  # noqa: E402

STEPS = 30


@pytest.fixture
def folder(tmp_path):
    """A model, and rows."""
    make_model(tmp_path / "model", torch.float32)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "What is it?", "completion": f"It is {n}."} for n in range(10)])
    return tmp_path


def command(folder, output, *more):
    words = ("--model", folder / "model", "--data", folder / "rows.jsonl", "--output", output, "--storage",
             folder / f"{output.name}.store", "--max-steps", STEPS, "--batch", 1, "--accumulate", 1, *more)  # fmt: skip
    return ["train", *map(str, words)]


def fill(folder, left):
    """Take all space of a disk but for so many bytes."""
    with (folder / "filler").open("wb") as file:
        file.write(bytes(shutil.disk_usage(folder).free - left))
    return folder / "filler"


def run_and_fill(words, disk, left):
    """Run the command in a process of its own, and fill the disk after its first step: status and standard error."""
    program = [sys.executable, "-m", "memascend", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        late = threading.Timer(240, child.kill)
        late.start()
        for line in child.stdout:
            if line.startswith("step 1/"):
                fill(disk, left)
        err = child.stderr.read()
        late.cancel()
    return child.returncode, err


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_save_without_space_loses_nothing_and_the_same_command_saves(folder, small_disk, capfd):
    weights = (folder / "model" / "model.safetensors").stat().st_size
    words = command(folder, small_disk / "out")
    status, err = run_and_fill(words, small_disk, weights // 2)
    assert status == 1
    said = [line for line in err.splitlines() if line.startswith("memascend train: ")][-1]
    assert "No space left on device" in said
    assert f"no step is lost: all {STEPS} steps are in the store" in said
    assert "Free disk space, and the same command saves the model" in said
    assert "Traceback" not in err
    # Neither half a model nor a temporary folder is left.
    assert {path.name for path in small_disk.iterdir()} - {"lost+found"} == {"out", "filler"}
    assert not list((small_disk / "out").glob("*.safetensors"))
    # Before there is space, the same command says so before it changes anything.
    assert main(words) == 1
    assert "are free: free disk space, or name another --output; nothing was changed" in capfd.readouterr().err
    (small_disk / "filler").unlink()
    done = subprocess.run([sys.executable, "-m", "memascend", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert main(command(folder, folder / "elsewhere")) == 0
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(place).state_dict()
        for place in (small_disk / "out", folder / "elsewhere")
    )
    assert same_states(one, other)


@pytest.mark.root
@pytest.mark.timeout(600)
def test_an_output_without_space_is_refused_before_anything_changes(folder, small_disk, capfd):
    weights = (folder / "model" / "model.safetensors").stat().st_size
    filler = fill(small_disk, weights // 2)
    before = {*folder.iterdir(), *small_disk.iterdir()}
    for more in ((), ("--dry-run",)):
        assert main(command(folder, small_disk / "out", *more)) == 1
        out, err = capfd.readouterr()
        # Whoever looks for a disk sees the plan, too.
        assert ("host memory" in out.lower()) == bool(more)
        assert f"--output {small_disk / 'out'} needs " in err
        assert re.search(r"needs \d\d\d KiB for .* and 2\d\d KiB are free: free disk space", err)
        assert {*folder.iterdir(), *small_disk.iterdir()} == before
    # A store there takes of the same space, and several saves at once take more.
    filler.unlink()
    fill(small_disk, 3 * weights)
    for more in (("--storage", small_disk / "store"), ("--save-every", 5, "--keep", 4)):
        assert main(command(folder, small_disk / "out", *more)) == 1
        assert "nothing was changed" in capfd.readouterr().err
        assert {*folder.iterdir(), *small_disk.iterdir()} == before


def test_models_that_are_there_at_once(tmp_path):
    output = Output(tmp_path / "out", Ranks())
    assert [output.copies(left, 0, finds_best=False) for left in (0, 1, 2, 9)] == [0, 1, 2, 2]
    assert [output.copies(left, 3, finds_best=True) for left in (1, 3, 5, 9)] == [1, 3, 5, 5]
    facts = {"began": "2026-01-01T00:00:00+00:00", "steps": 9, "options": {}, "digests": {}, "warmup_steps": 0}
    output.record = Record(**facts, saved=4)
    assert [output.copies(left, 0, finds_best=False) for left in (0, 1, 5)] == [0, 1, 1]
    output.record = Record(**facts, saved=4, kept=(2, 3, 4), best=1.0)
    assert [output.copies(left, 3, finds_best=True) for left in (1, 5)] == [1, 1]


def test_errors_of_safetensors_have_the_systems_number(tmp_path):
    from safetensors import SafetensorError

    with pytest.raises(StorageError, match="cannot be written: No space left on device") as raised:  # noqa: SIM117
        with file_errors(tmp_path, "cannot be written"):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert raised.value.errno == 28
    with pytest.raises(SafetensorError), file_errors(tmp_path, "cannot be written"):
        raise SafetensorError("invalid header")
