"""Tests whole runs of which one rank is killed at any moment, each resumed on another number of ranks."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from memascend.checkpoint.reader import identity_of

TESTS = Path(__file__).resolve().parents[1]
# A handful by default: `MEMASCEND_KILLS=30` takes some minutes.
KILLS = int(os.environ.get("MEMASCEND_KILLS", "5"))
TIMEOUT = 10.0
# Micro-batches of a step, which each of these numbers of ranks divides.
MICRO, WORLDS = 6, (2, 3)
LAST_WORDS_SECONDS = 5.0
UNFILLED = "its first write did not finish"

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from support import rank_runs
print(json.dumps(rank_runs.run(sys.argv[2], **json.loads(sys.argv[3]))))
"""


@pytest.fixture
def train(loaded, tmp_path):
    def run(folder="run", **options):
        options = {"whole": True, "micro": MICRO, "timeout": TIMEOUT, **options}
        said = loaded(PROGRAM, TESTS, tmp_path / folder, json.dumps(options))
        return json.loads(next(line for line in said.splitlines() if line.startswith("[{"))), said

    return run


def ended_well(ranks, said):
    assert [(rank["status"], rank["error"]) for rank in ranks] == [(0, None)] * len(ranks), said
    return ranks


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("given", "begun"), [({"gradients": "ssd"}, 1), ({"host_memory": "1GiB", "log_steps": 3}, 0)], ids=["disk", "held"]
)
def test_kills_at_random_moments_and_other_numbers_of_ranks(train, tmp_path, given, begun):
    """While stores are made, filled from others, opened, while all train, save and close: the run's bits at the end."""
    draw = random.Random(begun)
    # Of a life without a kill: moments are drawn from all of it.
    seconds = ended_well(*train("timed", world=2, steps=2, save="saved", given=given))[0]["life"]
    world, done, killed, lives, moments, existing = 2, begun, 0, 0, [], "resume"
    if begun:
        ended_well(*train(world=world, steps=begun, given=given))
    while killed < KILLS:
        lives += 1
        assert lives < 4 * KILLS, "most lives end before they are killed"
        world = draw.choice([other for other in WORLDS if other != world])
        faulty = draw.randrange(world)
        # Most of a life is its opening: every other kill falls between the first step and the end.
        moment = ("begun", "committed")[lives % 2]
        after = draw.uniform(0, seconds if moment == "begun" else seconds / 4)
        ranks, said = train(
            world=world, steps=done + 2, save="saved", given=given, faulty=faulty, kill_after=after, kill_from=moment,
            existing=existing,
        )  # fmt: skip
        killed += ranks[faulty]["status"] == -signal.SIGKILL
        opened = {rank.get("opened") for rank in ranks} - {None}
        assert len(opened) <= 1, said
        committed = max(rank.get("committed") or 0 for rank in ranks)
        # What all have is never lost, and nobody has more than one step that others have not.
        assert opened <= {done, done + 1}, (done, said)
        moments.append((world, moment, round(after, 2), min(opened, default=None), committed))
        for number, rank in enumerate(ranks):
            if number != faulty and ranks[faulty]["status"]:
                assert rank["status"] == 0, said
                if rank["error"] is not None and UNFILLED not in rank["error"]:
                    assert rank["ranks"] == [faulty], said
                    # Of a life that ended while it was opened these are all of its seconds.
                    assert rank["seconds"] < 2 * TIMEOUT + LAST_WORDS_SECONDS, said
        done = max(done, committed, *opened)
        # A run that never began begins anew where the user says so, with one process, too.
        existing = "replace" if any(UNFILLED in (rank.get("error") or "") for rank in ranks) else "resume"
    print(f"{killed} kills in {lives} lives: ranks, moment, opened at, committed {moments}")
    steps = done + 1
    world = 5 - world
    ended_well(*train(world=world, steps=steps, save="last", given=given, existing=existing))
    ended_well(*train("whole", world=2, steps=steps, save="last", given=given))
    run, whole = tmp_path / "run" / "last", tmp_path / "whole" / "last"
    assert identity_of(run)["step"] == steps
    assert_same_files(run, whole)


def assert_same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        if name.endswith(".safetensors"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
