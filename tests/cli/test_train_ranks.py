"""Tests `memascend train` on several ranks: the bits of one process, whatever kills a rank; refusals on all of them."""

import random
import shutil
import signal
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.bits import same_states  # noqa: E402
from support.small_folder import make_model, write_rows  # noqa: E402
from support.torchrun import Hosts, torchrun  # noqa: E402
from support.train_command import events, run_ranks, run_until  # noqa: E402

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]

ANSWERS = ["yes", "no, it is not", "the model learns", "It is a test.", "no"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and rows: two steps of four batches of two, and one of a single batch."""
    made = tmp_path_factory.mktemp("folders")
    make_model(made / "model", torch.bfloat16)
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": ANSWERS[n % 5]}]}
        for n in range(18)
    ]
    write_rows(made / "rows.jsonl", rows)
    write_rows(made / "eval.jsonl", rows[:5])
    return made


def arguments(folder, place, *more):
    return [
        "--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--output", str(place / "out"),
        "--storage", f"{place / 'store'}/", "--host-memory", "32MiB", "--device", "cpu", "--batch", "2",
        "--accumulate", "4", "--lr", "1e-3", "--warmup", "0", "--max-length", "64", "--max-grad-norm", "0", "--json",
        "--eval", str(folder / "eval.jsonl"), *map(str, more),
    ]  # fmt: skip


def weights_of(place):
    return transformers.AutoModelForCausalLM.from_pretrained(place / "out").state_dict()


def same_run(log, place, other_log, other):
    """What was told of steps, the norm of their gradients too, and the weights."""
    for name in ("step", "eval"):
        told, expected = events(log, name), events(other_log, name)
        assert told.items() <= expected.items()
        assert told
    assert same_states(weights_of(place), weights_of(other))


def rank(log, number):
    return log.with_name(f"{log.name}-{number}")


def test_two_ranks_have_the_bits_of_one_process(folder, tmp_path, monkeypatch):
    """Dropout, an evaluation and a step with fewer batches than ranks, too; only the first rank tells."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_until(monkeypatch, arguments(folder, one), tmp_path / "log") == 0
    assert run_ranks(monkeypatch, 2, arguments(folder, two), tmp_path / "log") == [0, 0], rank(
        tmp_path / "log", 0
    ).read_text()
    assert sorted(events(rank(tmp_path / "log", 0))) == [1, 2, 3]
    assert not events(rank(tmp_path / "log", 1))
    same_run(rank(tmp_path / "log", 0), two, tmp_path / "log", one)
    assert sorted(path.name for path in (two / "store").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    assert {path.name for path in (one / "out").iterdir()} == {path.name for path in (two / "out").iterdir()}


def test_what_is_refused_is_refused_on_all(folder, tmp_path, monkeypatch):
    """Nothing is there afterwards, and nobody waits for the others."""
    log = tmp_path / "log"
    for more, said in (
        (["--accumulate", 3], "--accumulate 3 is not divisible by 2 ranks"),
        (["--host-memory", "16KiB"], "too small"),
    ):
        assert run_ranks(monkeypatch, 2, arguments(folder, tmp_path / "run", *more), log) == [1, 1]
        assert all(said in rank(log, number).read_text() for number in range(2))
        assert not (tmp_path / "run/out").exists()
    assert run_ranks(monkeypatch, 2, arguments(folder, tmp_path / "dry", "--dry-run"), log) == [0, 0]
    assert "of each of 2 ranks" in rank(log, 0).read_text()
    assert "this was a dry run" not in rank(log, 1).read_text()
    assert not (tmp_path / "dry").exists()


@pytest.mark.slow
def test_kills_of_a_rank_and_other_numbers_of_ranks(folder, tmp_path, monkeypatch):
    """Killed at random moments, it goes on with 2, 4, 1 and 2 ranks, with the bits of one process."""
    more = ["--epochs", 3, "--save-every", 2]
    one, run, log = tmp_path / "one", tmp_path / "run", tmp_path / "log"
    assert run_until(monkeypatch, arguments(folder, one, *more), tmp_path / "calm") == 0
    generator = random.Random(5)
    for count in (2, 2, 4, 1, 2):
        killed = generator.randrange(count)
        if count == 1:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
            assert run_until(monkeypatch, arguments(folder, run, *more), rank(log, 0), 0) in (0, -signal.SIGKILL)
            continue
        ends = run_ranks(monkeypatch, count, arguments(folder, run, *more), log, (killed, generator.uniform(0, 0.5)))
        assert ends[killed] in (0, -signal.SIGKILL)
        assert all(end in (0, 1) for number, end in enumerate(ends) if number != killed), (count, killed, ends)
    assert run_ranks(monkeypatch, 2, arguments(folder, run, *more), log) == [0, 0]
    same_run(rank(log, 0), run, tmp_path / "calm", one)


# Rank 1 is killed after its second step, on the first attempt.
KILLED = """
import os, signal, sys
from memascend.session.optimizer import OffloadedOptimizer
own = OffloadedOptimizer.step
def step(self, *given):
    own(self, *given)
    if self.steps == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
OffloadedOptimizer.step = step
from memascend.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_torchrun_restarts_it_and_it_resumes(folder, tmp_path, monkeypatch):
    """In fresh processes, whose random numbers torch seeds differently; with the file of one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_until(monkeypatch, arguments(folder, one), tmp_path / "log") == 0
    told = torchrun(
        sys.executable, "-c", KILLED, *arguments(folder, two),
        options=("--standalone", "--max-restarts", "1", "--no-python"),
    )  # fmt: skip
    assert "resumes after step 2" in told
    assert (one / "out/model.safetensors").read_bytes() == (two / "out/model.safetensors").read_bytes()


@pytest.mark.slow
def test_torchrun_and_adapters(folder, tmp_path, monkeypatch):
    """The command as the documents have it; with adapters, which one process trains to the same bits."""
    pytest.importorskip("peft")
    for more, name in (([], "model.safetensors"), (["--lora", 4], "adapter_model.safetensors")):
        one, two = tmp_path / f"one-{name}", tmp_path / f"two-{name}"
        assert run_until(monkeypatch, arguments(folder, one, *more), tmp_path / "log") == 0
        told = torchrun("-m", "memascend", "train", *arguments(folder, two, *more))
        assert told.count('"event": "step"') == 3
        assert (one / "out" / name).read_bytes() == (two / "out" / name).read_bytes()


HOSTS = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("ip") is None, reason="no iproute2, which makes hosts of network namespaces"),
]


class TestTwoHosts:
    """Each host has a network, a name and a folder for stores of its own."""

    pytestmark = HOSTS

    def run(self, hosts, folder, *more, **how):
        return hosts.torchrun("-m", "memascend", "train", *arguments(folder, hosts.own, *more), **how)

    def test_a_loopback_address_is_named_with_the_remedy_at_once(self, folder, tmp_path):
        with Hosts(tmp_path) as hosts:
            for told in self.run(hosts, folder, status=1):
                for rank in range(2):
                    assert f"rank {rank} on {hosts.names[rank]} would give the address 127.0.1.1" in told
                    assert f"set GLOO_SOCKET_IFNAME={hosts.interfaces[rank]} there" in told

    @pytest.mark.slow
    def test_hosts_in_another_order_are_named(self, folder, tmp_path):
        """Nothing changes, and in the order of before the run goes on."""
        more = ["--epochs", 2, "--schedule", "constant"]
        with Hosts(tmp_path) as hosts:
            self.run(hosts, folder, "--schedule", "constant", named=True)
            for told in self.run(hosts, folder, *more, named=True, order=(1, 0), status=1):
                assert f"{hosts.names[0]}, which has the store of rank 0, starts rank 1 now" in told
                assert f"{hosts.names[1]}, which has the store of rank 1, starts rank 0 now" in told
                assert "without --rdzv-backend" in told
                assert "remove" not in told
            first, _ = self.run(hosts, folder, *more, named=True)
            assert "resumes after step 3" in first
