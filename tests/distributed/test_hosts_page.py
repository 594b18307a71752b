"""Runs every command of docs/hosts.md unchanged, and the program of docs/gpus.md, on simulated hosts."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.bits import files
from support.lives import SECONDS_MAX, environment
from support.torchrun import Hosts

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

DOCS = Path(__file__).resolve().parents[2] / "docs"
GPUS, PAGE = ((DOCS / name).read_text() for name in ("gpus.md", "hosts.md"))
(PROGRAM,) = re.findall(r"^```py\n(.*?)^```", GPUS, re.DOTALL | re.MULTILINE)
# The command blocks of docs/hosts.md, in the order of the page.
NAMES = ("start", "train", "addresses", "slurm", "drives", "replicas", "restarts", "fewer", "checkpoint")
COMMANDS = dict(zip(NAMES, re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE), strict=True))

# A `sitecustomize` for hosts without a GPU, where accelerate needs the option --use_cpu. The command on the page is for
# GPUs, and does not have this option.
AS_IF_ON_GPUS = """
import os
if "LOCAL_RANK" in os.environ:
    from accelerate.state import PartialState
    from support.torchrun import as_if_on_gpus
    as_if_on_gpus()
    begin = PartialState.__init__
    PartialState.__init__ = lambda self, cpu=False, **options: begin(self, cpu=True, **options)
"""


def lines(name):
    """Returns the commands of a block, each with the name of its host, such as "host0", or "each host"."""
    found = re.findall(r"(.*?)  # on (host\d|each host)\n", COMMANDS[name], re.DOTALL)
    assert "".join(f"{line}  # on {host}\n" for line, host in found) == COMMANDS[name]
    return found


def start(hosts, name, **more):
    """Starts the commands of a block, each on its host; returns the running commands."""
    return [hosts.start(int(host[-1]), line, **more) for line, host in lines(name)]


def end(running, status=0):
    """Waits until the commands end; requires that each exit status is `status`; returns all outputs as one string."""
    ends = [one.ended() for one in running]
    output = "\n".join(output for _, output in ends)
    assert [found for found, _ in ends] == [status] * len(ends), output
    return output


@contextlib.contextmanager
def made(folder, count=2):
    """Makes simulated hosts, and puts the program of docs/gpus.md into the folder that the hosts share."""
    folder.mkdir(exist_ok=True)
    with Hosts(folder, count) as hosts:
        (folder / "shared/train.py").write_text(PROGRAM)
        yield hosts


@pytest.fixture
def hosts(tmp_path):
    with made(tmp_path / "hosts") as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs the program of docs/gpus.md in one process; returns the files of its last checkpoint."""
    folder = tmp_path_factory.mktemp("alone")
    with made(folder, count=1) as host:
        end([host.start(0, "torchrun --nproc-per-node 1 train.py --storage run")])
    return files(folder / "shared/checkpoint")


def saved(hosts):
    """Returns the files of the last checkpoint."""
    return files(hosts.folder_of(0, "shared") / "checkpoint")


def begun_at(output):
    """Returns the step at which the program's last start began, as printed in `output`."""
    return int(re.findall(r"begins at step (\d+)", output)[-1])


def test_one_host_with_several_ranks_has_the_bits_of_one_process(hosts, alone):
    (line,) = re.findall(r"^```bash\n(.*)\n```$", GPUS, re.MULTILINE)
    end([hosts.start(0, line)])
    assert saved(hosts) == alone
    assert len(list((hosts.folder_of(0, "nvme0") / "gpus").iterdir())) == 4


def test_a_run_that_lost_a_rank_continues_on_fewer_hosts(hosts, alone):
    running = start(hosts, "start")
    running[0].wait_for("step 7\n")
    os.kill(hosts.ranks(1)[3], signal.SIGKILL)
    # torchrun then also ends rank 2, which is on the same host. If rank 2 had not answered by then, the error also
    # names rank 2.
    assert re.search("RankError: (rank 2, )?rank 3 ", end(running, 1))
    assert begun_at(end(start(hosts, "fewer"))) >= 7
    assert saved(hosts) == alone


def test_train_on_two_hosts_has_the_bits_of_one_process(hosts, tmp_path):
    """Accelerate shards a model only on GPUs, so each rank first calls `as_if_on_gpus()`."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from support.small_folder import make_model, write_rows

    folder = hosts.folder_of(0, "shared")
    make_model(folder / "llama", "float32")
    config = json.loads((folder / "llama/config.json").read_text())
    (folder / "llama/config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    # In each step, each of the four ranks takes a batch of 8 examples. The single process accumulates four batches of 8
    # examples, so its steps have the same examples.
    rows = [{"prompt": "What is it?", "completion": f"It is {number}."} for number in range(32)]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "fsdp.json").write_text(re.search(r"`([^`]*)` into `fsdp\.json`", GPUS)[1])
    (tmp_path / "sitecustomize.py").write_text(AS_IF_ON_GPUS)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    end(start(hosts, "train", PYTHONPATH=path))
    line, _ = lines("train")[0]
    command = line[line.index("-m memascend") :].split(" --fsdp ")[0].replace("--output trained", "--output alone")
    # Several ranks clip by the exact norm by default. A single process needs the option `--clipping exact` for this.
    command = command.replace("llama.run/", "alone.run") + " --gradient_accumulation_steps 4 --clipping exact"
    end([hosts.start(0, f"python {command}")])
    found, expected = (load_file(folder / name / "model.safetensors") for name in ("trained", "alone"))
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_host_whose_name_is_a_loopback_address_needs_the_interface(hosts, alone):
    for host in range(2):
        hosts.name_hosts(host, as_debian=True)
    running = start(hosts, "start")
    # The addresses decide which of two ranks connects, so the ranks of one host may all wait instead of failing.
    until = time.monotonic() + SECONDS_MAX
    while not any("remote=[127.0.1.1]" in one.output() for one in running):
        assert time.monotonic() < until, [one.output() for one in running]
        time.sleep(0.1)
    for host in range(2):
        hosts.kill(host)
    for one in running:
        one.ended()
    end(start(hosts, "addresses"))
    assert saved(hosts) == alone


@pytest.mark.parametrize("dead", [0, 1])
def test_a_run_that_lost_a_host_continues_when_it_is_back(hosts, alone, dead):
    running = start(hosts, "drives")
    running[0].wait_for("step 7\n")
    began = time.monotonic()
    hosts.connect(dead, "down")
    hosts.kill(dead)
    _, output = running[1 - dead].ended()
    # The program of docs/gpus.md sets `timeout=20`. The processes may take 30 s more to end.
    assert time.monotonic() - began < 20 + 30
    # torch's store is on host0. If host0 is down, the other ranks cannot look up why a rank left.
    named = "every other rank is gone" if dead == 0 else "rank 2, rank 3 did not"
    assert re.search(f"RankError: (rank {2 * dead}, rank {2 * dead + 1} did not|{named})", output), output
    hosts.connect(dead, "up")
    swapped = [line.replace("host0", "host1") for line, _ in reversed(lines("drives"))]
    answer = end([hosts.start(host, line) for host, line in enumerate(swapped)], 1)
    assert "number the hosts as before" in answer
    assert "on host0 is the store of rank 0 of 4" in answer, answer
    assert begun_at(end(start(hosts, "drives"))) >= 7
    assert saved(hosts) == alone
    assert all((hosts.folder_of(host, drive) / "run").is_file() for host in range(2) for drive in hosts.DRIVES)


def lose_drive(hosts, name):
    """Starts the commands of block `name`, kills host1, and then removes the store on the second drive of host1."""
    running = start(hosts, name)
    running[0].wait_for("step 7\n")
    hosts.kill(1)
    running[0].ended()
    (hosts.folder_of(1, "nvme1") / "run").unlink()


def test_a_run_that_lost_a_drive_begins_at_its_checkpoint(hosts, alone):
    lose_drive(hosts, "drives")
    answer = end(start(hosts, "drives"), 1)
    assert "rank 3: holds no store, and other ranks do" in answer
    assert "existing='replace' on all ranks to begin a new run; give also checkpoint=FOLDER" in answer
    assert begun_at(end(start(hosts, "checkpoint"))) == 5
    assert saved(hosts) == alone


def test_a_drive_that_a_replica_lost_is_filled_from_another_host(hosts, alone):
    lose_drive(hosts, "replicas")
    output = end(start(hosts, "replicas"))
    assert begun_at(output) >= 7
    assert "the new store of rank 3 was filled from the store of rank 1" in output
    assert saved(hosts) == alone


def test_torchrun_restarts_ranks_that_are_lost(hosts, alone):
    running = start(hosts, "restarts")
    for step, rank in ((3, 3), (9, 0)):
        running[0].wait_for(f"step {step}\n")
        os.kill(hosts.ranks(rank // 2)[rank], signal.SIGKILL)
    output = end(running)
    assert output.count("begins at step") == 3
    assert begun_at(output) >= 9
    assert saved(hosts) == alone


def test_slurm_command_starts_a_run_on_two_hosts(hosts, alone, tmp_path):
    """Replaces Slurm's programs. `srun` runs its command on the host that calls `srun`. `scontrol` lists both hosts."""
    programs = {
        "srun": 'test "$1 $2 $3 $4" = "--nodes 2 --ntasks-per-node 1" && shift 4 && exec "$@"',
        "scontrol": 'test "$*" = "show hostnames host[0-1]" && echo host0 && echo host1',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    ((line, _),) = lines("slurm")
    variables = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "host[0-1]"}
    path = f"export PATH={tmp_path}:$PATH; "
    end([hosts.start(host, path + line, SLURM_NODEID=str(host), **variables) for host in range(2)])
    assert saved(hosts) == alone
