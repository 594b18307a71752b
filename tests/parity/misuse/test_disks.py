"""Tests disks that fail in any phase: the call that uses the failing disk raises, and the last commit stays valid."""

import contextlib
import errno
import os
import signal

import pytest
import torch
from parity.harness import adamw
from parity.zoo_plain import Stack
from support.bits import same_states

import memascend
from memascend import StorageError, engine

pytestmark = pytest.mark.root
EIO = {"errno": errno.EIO}


@pytest.fixture
def on_it(offloaded, faulty, tmp_path):
    """Returns a function that offloads a model to the faulty disk.

    The function uses the smallest budget, so that each phase of a step reads or writes the disk.
    """
    # The first call must create the store, so the call uses existing="refuse". The disk is a file of zeros, and
    # "resume" creates no store in such a file.
    existing = iter(["refuse"])

    def make(**options):
        options = {"storage": faulty.path, "scratch": tmp_path, "existing": next(existing, "resume"), **options}
        return offloaded(Stack(depth=6), host_memory="smallest", **options)

    return make


def fails_in_forward(training, faulty):
    faulty.set(read=EIO)
    training.loss(1)


def fails_in_backward(training, faulty):
    loss = training.loss(1)
    faulty.set(read=EIO)
    loss.backward()


def fails_to_write(training, faulty):
    loss = training.loss(1)
    faulty.set(write=EIO)
    loss.backward()
    training.optimizer.step()


def fails_to_flush(training, faulty):
    training.loss(1).backward()
    faulty.set(fsync=EIO)
    training.optimizer.step()


def fails_to_save(training, faulty):
    faulty.set(read=EIO)
    training.optimizer.save(faulty.folder.parent / "saved")


@pytest.mark.parametrize(("gradients", "durability"), [("fused", "step"), ("ssd", "step"), ("fused", "none")])
@pytest.mark.parametrize("phase", [fails_in_forward, fails_in_backward, fails_to_write, fails_to_flush, fails_to_save])
def test_disk_error_in_any_phase_keeps_the_last_commit(on_it, faulty, phase, gradients, durability):
    training = on_it(gradients=gradients)
    training.step(0)
    before = training.weights()
    if durability == "none":
        # Opens the store again, so that the next commit is the first commit with durability="none". This commit flushes
        # a root that marks the store as unclosed, because later commits overwrite data that the previous root names.
        training.optimizer.close()
        training = on_it(gradients=gradients, durability=durability)
    with pytest.raises(StorageError) as error:
        phase(training, faulty)
    assert error.value.errno == errno.EIO
    assert str(faulty.path) in str(error.value)
    assert training.optimizer.steps == 1
    faulty.set()
    with contextlib.suppress(StorageError):  # after a failed flush, the store must be opened again
        training.optimizer.zero_grad()
    training.optimizer.close()
    training.optimizer.close()
    again = on_it()
    assert again.optimizer.steps == 1
    assert same_states(before, again.weights())
    again.step(1)
    assert again.optimizer.steps == 2


def test_close_raises_a_disk_error_and_the_unclosed_store_is_rejected(on_it, faulty):
    training = on_it(durability="none")
    training.step(0)
    faulty.set(write=EIO)
    with pytest.raises(StorageError):
        training.optimizer.close()
    training.optimizer.close()
    faulty.set()
    with pytest.raises(StorageError, match="closed"):
        on_it()


def test_interrupted_open_of_the_previous_commit_changes_no_byte(on_it, faulty):
    training = on_it()
    training.step(0)
    training.step(1)
    training.optimizer.close()
    bytes_before = faulty.path.read_bytes()
    # With this delay, the eighty reads of the verification take 16 seconds. SIGALRM interrupts the verification after 3
    # seconds.
    faulty.set(delay=0.2)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 3)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.Store.open(faulty.path, existing="previous")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    faulty.set()
    assert faulty.path.read_bytes() == bytes_before
    assert on_it(existing="previous").optimizer.steps == 1


def test_a_disk_that_fails_at_offload_changes_nothing(faulty, tmp_path, unchanged):
    model = Stack()
    optimizer = adamw(model)
    check = unchanged(model, optimizer)
    for faults in ({"write": EIO}, {"fsync": EIO}):
        faulty.set(**faults)
        with pytest.raises(StorageError):
            memascend.offload(model, optimizer, storage=faulty.path, scratch=tmp_path, existing="replace")
        check()
    faulty.set()
    with memascend.offload(model, optimizer, storage=faulty.path, scratch=tmp_path, existing="replace")[1] as optimizer:
        assert optimizer.steps == 0


# --- a full disk ---------------------------------------------------------------------------


def fill(folder):
    with open(folder / "rest", "wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    left = os.statvfs(folder)
    assert left.f_bavail * left.f_frsize < 1 << 17


def test_offload_to_a_too_small_disk_raises_and_changes_nothing(small_disk, unchanged):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = adamw(model)
    check = unchanged(model, optimizer)
    with pytest.raises(StorageError) as error:
        memascend.offload(model, optimizer, storage=small_disk / "run.store")
    assert error.value.errno == errno.ENOSPC
    check()
    assert not (small_disk / "run.store").exists()


def test_steps_continue_on_a_full_disk_while_weight_copies_raise(offloaded, small_disk):
    """Once other files have filled the disk, copying the weights raises, but steps still work."""
    wide = torch.nn.Sequential(torch.nn.Embedding(64, 512), torch.nn.Linear(512, 64))
    training = offloaded(wide, storage=small_disk / "run.store", steps=1)
    fill(small_disk)
    for index in range(3):
        training.step(index)
    with pytest.raises(StorageError, match="scratch") as error:
        training.model.state_dict()
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(StorageError, match="scratch"):
        training.weights()
    (small_disk / "rest").unlink()
    before = training.weights()
    training.step(1)
    assert training.optimizer.steps == 5
    assert not torch.equal(before["1.weight"], training.weights()["1.weight"])
    # Closes the run here, because the fixture `small_disk` then unmounts the disk.
    training.optimizer.close()
