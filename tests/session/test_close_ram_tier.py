"""Tests the end of a run of which memory has the only copy: progress, and Ctrl-C once and twice."""

import logging
import signal

import pytest
from support.bits import same_states
from support.chains import chain, offloaded, train, values

import memascend
from memascend.session import run


def begun(store, **options):
    return offloaded(store, chain(16, bias=True, width=24), durability="none", **options)


def stepped(store):
    model, optimizer = begun(store, host_memory="64MiB")
    assert len(optimizer.plan.ram_tier) == 32
    train(model, optimizer, range(2))
    return values(model), optimizer


class Interrupting(run.Progress):
    """Sends Ctrl-C the first times that it hears of something."""

    times, heard = 0, []

    def reached(self, done, nbytes):
        super().reached(done, nbytes)
        self.heard.append((done, nbytes, self._total))
        if len(self.heard) <= self.times:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def progress(monkeypatch):
    kind = type("Own", (Interrupting,), {"heard": []})
    monkeypatch.setattr(run, "Progress", kind)
    return kind


def test_close_says_how_far_it_is(tmp_path, progress):
    _, optimizer = stepped(tmp_path / "store")
    optimizer.close()
    done, totals, known = zip(*progress.heard, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == set(known)
    assert 0 < done[0] < done[-1] <= totals[0]


def test_one_interrupt_of_close_loses_nothing(tmp_path, progress, caplog):
    progress.times = 1
    saved, optimizer = stepped(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "memascend"), pytest.raises(KeyboardInterrupt):
        optimizer.close()
    assert "another Ctrl-C drops them" in caplog.text
    # It went on where it was.
    done = [one[0] for one in progress.heard]
    assert done[1] >= done[0]
    optimizer.close()
    model, optimizer = begun(tmp_path / "store", existing="resume")
    with optimizer:
        assert optimizer.steps == 2
        assert same_states(values(model), saved)


def test_two_interrupts_of_close_leave_a_store_that_is_refused_by_name(tmp_path, progress):
    progress.times = 2
    _, optimizer = stepped(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    assert len(progress.heard) == 2
    optimizer.close()
    with pytest.raises(memascend.StorageError, match="not closed"):
        begun(tmp_path / "store", existing="resume")
    _, optimizer = begun(tmp_path / "store", existing="replace")
    optimizer.close()
