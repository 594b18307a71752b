"""Tests the file of a store: owner, permissions, path, loss of the file, and opening a file that a run has open."""

import errno
import gc
import os
import stat
import tempfile

import pytest
import torch
from support.bits import same_states
from support.chains import chain, offloaded, step, train, values
from support.stores import filled
from torch import nn

from memascend import engine, nvme
from memascend.errors import ConfigError, CorruptionError, StorageError, UsageError


def records(value=7.0):
    return [engine.Record(name="weight", values=torch.full((64,), value), state={})]


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


# --- empty files, and places without files ------------------------------------------------------------------


def test_resume_rejects_an_empty_or_zeroed_store_file(tmp_path):
    """Also tests that offload() raises in file systems of the kernel, such as /proc, where no store can be created."""
    path = tmp_path / "run.store"
    model, optimizer = offloaded(path)
    step(model, optimizer)
    optimizer.close()
    for length, found in ((0, "has no bytes"), (path.stat().st_size, "begin and end in zeros")):
        os.truncate(path, 0)
        os.truncate(path, length)
        for existing in ("resume", "previous"):
            with pytest.raises(CorruptionError, match=rf'^{path}: the store is damaged.*{found}.*existing="replace"'):
                offloaded(path, existing=existing)
            assert path.stat().st_size == length
    with offloaded(path, existing="replace")[1] as optimizer:
        assert optimizer.steps == 0
    path.unlink()
    with offloaded(path, existing="resume")[1] as optimizer:
        assert optimizer.steps == 0
    for place in ("/proc/run.store", "/proc/runs/", "/sys/run.store"):
        with pytest.raises(StorageError, match=r"shows the state of the kernel.*choose a folder on a disk"):
            offloaded(place)


# --- a store before its first commit -----------------------------------------------------------------------


def test_failed_offload_deletes_the_unfinished_store_and_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "runs"

    def failing(*_, **__):
        assert [path.name for path in folder.iterdir()] == ["memascend.store.new"]
        raise StorageError("as if the disk were full")

    monkeypatch.setattr(engine.Engine, "fill", failing)
    with pytest.raises(StorageError, match="as if"):
        offloaded(f"{folder}/")
    assert not folder.exists()


# --- owner and permissions -------------------------------------------------------------------------------


def test_create_and_open_set_the_mode_of_a_store_file_to_0600(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch()
    link.symlink_to(target)
    for mode, existing in ((0o666, "refuse"), (0o664, "resume"), (0o604, "replace")):
        target.chmod(mode)
        with filled(link, records(), existing=existing):
            assert mode_of(target) == 0o600
            assert link.is_symlink()
    target.chmod(0o604)
    with engine.Store.open(target):
        assert mode_of(target) == 0o600
    # If the owner of a store has set narrower permissions, opening the store keeps these permissions. A volume is not a
    # store, so opening a volume changes no permissions.
    target.chmod(0o400)
    engine.Store.open(target).close() if os.geteuid() == 0 else None
    assert mode_of(target) == 0o400
    (tmp_path / "volume").touch(0o664)
    (tmp_path / "volume").chmod(0o664)
    nvme.open(tmp_path / "volume", size=1 << 16).close()
    assert mode_of(tmp_path / "volume") == 0o664


@pytest.mark.root
def test_replacing_a_store_file_of_another_user_is_rejected(tmp_path):
    path = tmp_path / "store"
    filled(path, records()).close()
    os.chown(path, 1000, 1000)
    # root may read a store of another user. root may not replace such a store.
    with engine.Store.open(path) as store:
        content = store.read("weight")[0].clone()
    for length in (path.stat().st_size, 0):
        os.truncate(path, length)
        path.chmod(0o666)
        with pytest.raises(StorageError, match="belongs to user 1000") as error:
            engine.Store.create(path, records(8.0), existing="replace")
        assert error.value.path == str(path)
        assert (mode_of(path), path.stat().st_size) == (0o666, length)
        if length:
            with engine.Store.open(path) as store:
                assert torch.equal(store.read("weight")[0], content)


@pytest.mark.timeout(60)
def test_store_path_to_a_pipe_or_a_dangling_link_is_rejected(tmp_path):
    # A usual open() of this pipe would block forever, because no process opens the other end of the pipe.
    os.mkfifo(tmp_path / "pipe")
    for opening in (
        lambda: engine.Store.create(tmp_path / "pipe", records()),
        lambda: engine.Store.open(tmp_path / "pipe"),
    ):
        with pytest.raises(StorageError, match="neither a file nor a block device"):
            opening()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"it is a link to .*elsewhere, which does not exist"):
        engine.Store.create(tmp_path / "link", records())
    assert not (tmp_path / "elsewhere").exists()


# --- the meaning of a path ---------------------------------------------------------------------------------


def test_offload_makes_the_folder_of_a_path_that_ends_in_a_slash(tmp_path):
    model, optimizer = offloaded(f"{tmp_path}/new/")
    step(model, optimizer)
    optimizer.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["memascend.store"]
    model, optimizer = offloaded(f"{tmp_path}/new", existing="resume")
    assert optimizer.steps == 1
    optimizer.close()
    with pytest.raises(StorageError, match="does not exist"):
        engine.Store.create(f"{tmp_path}/no/where/", records())
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        nvme.open(f"{tmp_path}/other/", size=1 << 16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]


def test_tilde_in_a_path_expands_to_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    nvme.open("~/volume", size=1 << 16).close()
    filled("~/store", records()).close()
    engine.Store.open(["~/store"]).close()
    model, optimizer = offloaded("~/run", scratch="~")
    step(model, optimizer)
    optimizer.save("~/saved")
    model.state_dict()
    optimizer.close()
    _, optimizer = offloaded(["~/again"], checkpoint="~/saved")
    optimizer.close()
    with torch.device("meta"):
        model = chain(bias=True)
    offloaded("~/third", model, weights="~/saved")[1].close()
    assert sorted(os.listdir(tmp_path)) == ["again", "run", "saved", "store", "third", "volume"]


# --- files that are deleted, moved, replaced or truncated -----------------------------------------------------


def open_files():
    return len(os.listdir("/proc/self/fd"))


def delete(path):
    path.unlink()
    return "was deleted"


def move(path):
    path.rename(path.with_name("elsewhere"))
    return "was moved"


def replace(path):
    path.unlink()
    path.write_bytes(b"somebody else's")
    return "was replaced by another file"


@pytest.mark.parametrize(
    ("happen", "durability"), [(delete, "step"), (delete, "none"), (move, "step"), (replace, "step")]
)
def test_deleted_moved_or_replaced_store_file_warns_once_and_fails_close(tmp_path, monkeypatch, happen, durability):
    monkeypatch.chdir(tmp_path)
    before = open_files()
    model, optimizer = offloaded("run", durability=durability)
    # A warning would fail the test.
    step(model, optimizer)
    # Changes the working directory. step() must still find the file of the store.
    os.chdir("/")
    step(model, optimizer)
    what = happen(tmp_path / "run")
    with pytest.warns(UserWarning, match=what) as answer:
        train(model, optimizer, range(2))
    assert len(answer) == 1
    optimizer.save(tmp_path / "saved")
    trained = values(model)
    with pytest.raises(StorageError, match=what) as error:
        optimizer.close()
    assert error.value.path == "run"
    assert open_files() <= before, "close() left a file open"
    optimizer.close()
    if happen is replace:
        assert (tmp_path / "run").read_bytes() == b"somebody else's"
    model, optimizer = offloaded(tmp_path / "again", checkpoint=tmp_path / "saved")
    assert optimizer.steps == 4
    assert same_states(values(model), trained)
    optimizer.close()
    if happen is move:
        model, optimizer = offloaded(tmp_path / "elsewhere", existing="resume")
        assert optimizer.steps == 4
        optimizer.close()


def test_close_raises_if_the_store_file_was_truncated(tmp_path):
    before = open_files()
    model, optimizer = offloaded(tmp_path / "run")
    step(model, optimizer)
    os.truncate(tmp_path / "run", 4096)
    with pytest.raises(StorageError, match="was truncated while its store was in use"):
        optimizer.close()
    assert open_files() <= before, "close() left a file open"
    optimizer.close()


def test_deleted_second_store_file_warns_but_a_temporary_store_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, optimizer = offloaded(None)
    step(model, optimizer)
    model.state_dict()
    optimizer.close()
    assert not list(tmp_path.iterdir())
    paths = [tmp_path / "one", tmp_path / "two"]
    model, optimizer = offloaded(paths)
    step(model, optimizer)
    paths[1].unlink()
    with pytest.warns(UserWarning, match=f"{paths[1]} was deleted"):
        step(model, optimizer)
    with pytest.raises(StorageError, match="was deleted"):
        optimizer.close()


# --- a store that another run of this process has open, as when a notebook cell runs twice -------------------


@pytest.mark.parametrize(
    ("existing", "steps", "begins", "at"), [("resume", 2, 2, ""), ("resume", 0, 0, "run.store"), ("replace", 2, 0, "")]
)
def test_offload_on_an_open_store_closes_the_earlier_run_with_a_warning(tmp_path, existing, steps, begins, at):
    model, optimizer = offloaded(tmp_path / at)
    train(model, optimizer, range(steps))
    with pytest.warns(UserWarning, match=rf"had this store open and was closed at step {steps}.*optimizer\.close\(\)"):
        again, other = offloaded(tmp_path / at, existing=existing)
    with other:
        assert other.steps == begins
        step(again, other)
        assert other.steps == begins + 1
    with pytest.raises(UsageError, match="has been closed"):
        step(model, optimizer)
    optimizer.close()


def test_resume_of_an_open_run_warns_of_a_written_weight_copy(tmp_path):
    model, optimizer = offloaded(tmp_path)
    step(model, optimizer)
    copy = model[0].weight.data
    copy.add_(1)
    with pytest.warns(UserWarning, match=r"was closed at step 1.*0\.weight .* was written to"):
        again, other = offloaded(tmp_path, existing="resume")
    with other:
        assert other.steps == 1
        step(again, other)
    optimizer.close()


OTHERS = {
    "shape": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 5)),
        torch.optim.AdamW,
        r"does not fit: .*1\.weight.*the run .* continues",
    ),
    "optimizer": (lambda: chain(bias=True), torch.optim.SGD, r"does not fit: .*SGD.*the run .* continues"),
}


@pytest.mark.parametrize(("other", "steps"), [("shape", 0), ("shape", 2), ("optimizer", 1)])
def test_offload_that_does_not_fit_leaves_the_open_run_unchanged(tmp_path, other, steps):
    make, kind, words = OTHERS[other]
    model, optimizer = offloaded(tmp_path / "run.store")
    train(model, optimizer, range(steps))
    before = values(model)
    with pytest.raises(ConfigError, match=words):
        offloaded(tmp_path / "run.store", make(), kind, existing="resume")
    with pytest.raises(ConfigError, match=rf"run\.store.*open at step {steps} .*optimizer\.close\(\)"):
        offloaded(tmp_path / "run.store", make(), kind, existing="replace")
    # The error for existing="previous" must also advise optimizer.close().
    with pytest.raises(StorageError, match=r"optimizer\.close\(\)") as refused:
        offloaded(tmp_path / "run.store", existing="previous")
    assert refused.value.errno == errno.EBUSY
    assert same_states(values(model), before)
    step(model, optimizer)
    optimizer.close()
    with offloaded(tmp_path / "run.store", existing="resume")[1] as optimizer:
        assert optimizer.steps == steps + 1
    with offloaded(tmp_path / "run.store", make(), kind, existing="replace")[1] as replaced:
        assert replaced.steps == 0


def test_unreferenced_run_is_collected_without_a_warning(tmp_path):
    gc.collect()
    gc.disable()
    try:
        model, optimizer = offloaded(tmp_path)
        step(model, optimizer)
        del model, optimizer
        # A warning would fail the test.
        _, optimizer = offloaded(tmp_path, existing="resume")
    finally:
        gc.enable()
    with optimizer:
        assert optimizer.steps == 1
