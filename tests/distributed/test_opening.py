"""Tests the choice of the commit that all ranks open. Tests that a store opens only for its own rank, run and host."""

import json
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

import memascend
from memascend.distributed.agreement import Agreement
from memascend.distributed.control_plane import Alone, Exchange
from memascend.distributed.opening import EARLIER, Stores, choose, common_of, require_own, seen_at, superseded_by
from memascend.distributed.reshard import find_earlier
from memascend.distributed.rows import Layout, Rows
from memascend.distributed.setup import places_of_others
from memascend.engine import Engine, Record, Store, commits
from memascend.errors import ConfigError, RankError
from memascend.plan.options import Options

RUNS = {1: "0" * 32, 2: "2" * 32, 3: "3" * 32, 4: "4" * 32}


def store(count, *numbers):
    """Returns what `seen_at` returns for one store of a run with `count` ranks.

    The roots of the store name the commits with `numbers`, the newest first.
    """
    commits = [{"run": RUNS[count], "number": number, "identity": f"{number:032x}", "ranks": 0} for number in numbers]
    return {"there": True, "filled": bool(commits), "commits": commits, "damage": None, "error": None}


@pytest.mark.parametrize("last", [(3, 2), (4, 3), (9,)])
@pytest.mark.parametrize("count", [1, 3])
def test_common_of_rejects_stores_of_several_runs(last, count):
    with pytest.raises(ConfigError, match=f"several runs.*rank {count}: run 44444444"):
        common_of([*[store(2, 3, 2)] * count, store(4, *last)])


def chosen(shards, each, existing="resume"):
    """Returns the result of `choose` on rank 0, if rank N finds the store `each[N]`."""
    answer = {"a new run": ["9" * 32], "the stores": [{**one, "others": [], "pending": False} for one in each]}
    exchange = SimpleNamespace(rank=0, all_gather=lambda about, _: answer[about])
    return choose(None, exchange, existing, Layout(0, len(each) // shards, shards))


@pytest.mark.parametrize(
    ("shards", "each", "number", "lost"),
    [
        # Rank 1's store was filled from another store, but was not verified. So the commit of rank 1's store has number
        # 0.
        (1, [store(2, 3, 2), store(2, 0)], 3, {1: 0}),
        # Ranks 2 and 3, which are the second replica, took no part in the last step.
        (2, [*[store(2, 3, 2)] * 2, *[store(2, 2, 1)] * 2], 3, {2: 0, 3: 1}),
        # All ranks were killed when only ranks 0 and 3 had written the root of commit 3.
        (2, [store(2, 3, 2), store(2, 2, 1), store(2, 2, 1), store(2, 3, 2)], 2, {}),
    ],
)
def test_choose_refills_unverified_stores_and_stores_one_step_behind(shards, each, number, lost):
    opening = chosen(shards, each)
    assert (opening.number, opening.lost) == (number, lost)


def test_replicas_that_missed_more_than_one_step_are_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"no commit is on all ranks.*move away"):
        chosen(2, [*[store(2, 5, 4)] * 2, *[store(2, 3, 2)] * 2])


def test_previous_commit_needs_two_commits_that_all_ranks_have():
    assert chosen(2, [store(2, 3, 2)] * 2, "previous").number == 2
    with pytest.raises(ConfigError, match=r"commit 1 is the only commit that all ranks have.*existing='resume'"):
        chosen(2, [store(2, 1)] * 2, "previous")


def test_rows_take_the_scale_of_a_last_block_that_is_not_full():
    rows = Rows(torch.Size([5, 128]), first=2, count=3)
    assert rows.of("exp_avg_absmax", torch.arange(3)).tolist() == [1, 2]


def stores(count, *each, description=None):
    """Returns the `Stores` of a run with `count` ranks.

    For each rank, `each` has the rank's store, or None if the store is missing. All stores have the same `description`.
    """
    seen = {rank: {**one, "description": description} for rank, one in enumerate(each) if one is not None}
    return Stores(count=count, all_owners=dict.fromkeys(seen, 0), all_seen=seen)


def identity(count, number):
    return {"ranks": count, "run": "uuid" if count == 1 else RUNS[count], "number": number}


def description(*earlier, step=7):
    return {"uuid": "uuid", "step": step, EARLIER: list(earlier)}


def new(description):
    return stores(2, store(2, 1), store(2, 1), description=description)


ZEROS = {**store(4), "there": False, "filled": True}


@pytest.mark.parametrize(
    ("old", "outlived"),
    [
        (stores(4, *[store(4, 9, 8)] * 4), [4]),
        # Rank 3 had made one more commit than the other ranks.
        (stores(4, *[store(4, 9, 8)] * 3, store(4, 10, 9)), [4]),
        # Only rank 2's old store still has a commit. The old stores of the other ranks were removed, or are being
        # replaced.
        (stores(4, None, None, store(4, 9, 8), None), [4]),
        (stores(4, store(4), ZEROS, store(4, 9, 8), None), [4]),
        # The new stores name commit 9 of a run with four ranks. The first old stores have only commits 8 and 7, like an
        # older copy of the run. The second old stores belong to a different run.
        (stores(4, *[store(4, 8, 7)] * 4), []),
        (stores(4, *[store(2, 9, 8)] * 4), []),
    ],
)
def test_new_stores_supersede_the_earlier_commit_that_they_name(old, outlived):
    assert list(superseded_by([old, new(description(identity(4, 9)))])) == outlived
    # If the new stores do not name the old stores, the old stores are not superseded.
    assert not superseded_by([old, new(description())])
    assert not superseded_by([old, new(None)])


@pytest.mark.parametrize("last", [None, store(2)])
def test_incomplete_new_stores_supersede_no_earlier_store(last):
    old = stores(4, *[store(4, 9, 8)] * 4)
    assert not superseded_by([old, stores(2, store(2, 1), last, description=description(identity(4, 9)))])


def test_new_stores_supersede_stores_of_several_earlier_rank_counts():
    """The run had one process, then two ranks, then three. Of the two ranks' stores, rank 0's store is missing."""
    two = stores(2, None, store(2, 1), description=description(identity(1, 7)))
    three = stores(3, *[store(3, 1)] * 3, description=description(identity(2, 1), identity(1, 7)))
    assert sorted(superseded_by([stores(1, store(1, 0), description=description()), two, three])) == [1, 2]
    # Now the store of the single process has step 8. The stores of two and three ranks name step 7 of this store, so
    # they do not supersede step 8.
    assert list(superseded_by([stores(1, store(1, 0), description=description(step=8)), two, three])) == [2]


@pytest.mark.parametrize(
    ("each", "is_unfilled", "missing"),
    [
        ([store(2), store(2)], True, [0, 1]),
        ([store(2, 1), store(2)], True, [1]),
        # Rank 0 has the second commit, so all ranks have made the first commit. Rank 1's store has no commit, so this
        # store has lost the first commit.
        ([store(2, 2, 1), store(2)], False, [1]),
        ([store(2, 2, 1), {**store(2), "there": False, "filled": True}], False, [1]),
        ([store(2, 2, 1), None], False, [1]),
        ([store(2, 1), store(2, 1)], False, []),
        # Rank 1's file exists, but is not a store. `missing` must not list rank 1.
        ([store(2, 2, 1), {**store(2), "filled": True, "error": "no memascend store"}], False, []),
    ],
)
def test_a_store_without_a_commit_is_unfilled_or_lost(each, is_unfilled, missing):
    found = stores(2, *each)
    assert (found.is_unfilled, found.missing) == (is_unfilled, missing)


# --- stores of threads, which stand in for ranks -------------------------------------------------------

HOST = socket.gethostname()


class Talk:
    """Lets threads, which stand in for ranks, exchange values.

    Each thread has its own `Talker`, which uses this object.
    """

    def __init__(self, size):
        self.messages = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)

    def of(self, rank):
        return Talker(self, rank)


class Talker:
    """Stands in for the `Exchange` of one rank, which is a thread here."""

    broken = failure = None
    part = Exchange.part

    def __init__(self, talk, rank):
        self.talk, self.rank, self.size = talk, rank, len(talk.messages)

    def all_gather(self, about, value, **_):
        self.talk.messages[self.rank] = json.dumps([about, value])
        self.meet()
        answer = [json.loads(one) for one in self.talk.messages]
        self.meet()
        assert {one[0] for one in answer} == {about}, answer
        return [one[1] for one in answer]

    def add(self, numbers):
        # `Agreement` calls `add` to compare the rows that several replicas have. With one replica, all numbers are 0.
        assert not any(numbers)
        return numbers

    def meet(self):
        try:
            self.talk.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankError("another rank failed", ranks=()) from error

    def fail(self, _):
        self.talk.barrier.abort()


class Life:
    """Opens the stores of all ranks in a folder, commits up to step `until`, and closes the stores.

    `began[rank]` is the step at which the rank's store was opened. `errors[rank]` is the error that the rank raised, or
    None.
    """

    def __init__(self, folder, until, *, size=2, existing="resume", **given):
        self.folder, self.until, self.existing, self.given = folder, until, existing, given
        self.began = [None] * size
        self.errors = [None] * size
        talk = Talk(size)
        threads = [threading.Thread(target=self._run, args=(talk.of(rank),)) for rank in range(size)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    def _run(self, exchange):
        try:
            self.began[exchange.rank] = self._lived(exchange)
        except memascend.MemascendError as error:
            self.errors[exchange.rank] = str(error)

    def _lived(self, exchange):
        path = self.given.get("paths", {}).get(exchange.rank, self.folder / f"rank-{exchange.rank}")
        records = [Record(name="rows", values=torch.full((5,), float(exchange.rank)), state={})]
        layout = Layout(exchange.rank, 1, exchange.size)
        opening = choose(path, exchange, self.existing, layout, self.given.get("others", {}).get(exchange.rank))
        store, agreement = opening.open(lambda existing: Store.create(path, records, existing=existing))
        with store, Engine(store) as updates:
            began = -1 if store.created else store.step
            while began < 0 or store.step < self.until:
                step = 0 if began < 0 else store.step + 1
                with agreement.step():
                    updates.fill("rows", torch.full((5,), 100.0 * exchange.rank + step), step=step)
                    updates.commit(step)
                began = max(began, 0)
            values = store.read("rows")[0]
            assert bool((values == 100.0 * exchange.rank + store.step).all())
        return began


def named(folder, rank):
    """Returns the newest commit in a rank's store."""
    return commits(folder / f"rank-{rank}")[0][0]


def refused(folder, words, **options):
    """Requires that no rank can open its store, that each rank's error contains `words`, and that no file changes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    life = Life(folder, 9, **options)
    assert all(words in (error or "") for error in life.errors), life.errors
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(files)
    assert [path.read_bytes() for path in files] == before


def swap(one, other):
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


# --- the rank that owns a store ---------------------------------------------------------------


def test_store_of_another_rank_is_rejected(tmp_path):
    assert Life(tmp_path, 3).began == [0, 0]
    assert [(named(tmp_path, rank).rank, named(tmp_path, rank).ranks) for rank in range(2)] == [(0, 2), (1, 2)]
    assert named(tmp_path, 0).identity == named(tmp_path, 1).identity != bytes(16)
    assert Life(tmp_path, 5).began == [3, 3]
    first, second = tmp_path / "rank-0", tmp_path / "rank-1"
    swap(first, second)
    for existing in ("resume", "previous"):
        refused(tmp_path, f"rank 1: {second} on {HOST} is the store of rank 0 of 2", existing=existing)
    swap(first, second)
    shutil.copy(first, tmp_path / "kept")
    shutil.copy(second, first)
    refused(tmp_path, f"rank 0: {first} on {HOST} is the store of rank 1 of 2; nothing was changed: a store was copied")
    (tmp_path / "kept").rename(first)
    assert Life(tmp_path, 6).began == [5, 5]


def test_resume_rejects_another_rank_count_or_a_missing_store(tmp_path):
    Life(tmp_path, 1, size=3)
    refused(tmp_path, "is the store of rank 0 of 3", size=2)
    (tmp_path / "rank-1").unlink()
    refused(tmp_path, "rank 1: holds no store, and other ranks do", size=3)


def test_ranks_killed_between_their_first_commits_start_a_new_run(tmp_path):
    assert Life(tmp_path, 0).began == [0, 0]
    # The file of a new store has the suffix .new until the store's first commit.
    (tmp_path / "rank-1").rename(tmp_path / "rank-1.new")
    again = Life(tmp_path, 1)
    assert (again.began, again.errors) == ([0, 0], [None, None])
    assert not (tmp_path / "rank-1.new").exists()
    # Rank 0 has committed a step by now, so the unfinished store of rank 1 is rejected instead of filled.
    (tmp_path / "rank-1").rename(tmp_path / "rank-1.new")
    refused(tmp_path, "rank 1: holds no store, and other ranks do")
    # The unfinished store of rank 1 is also rejected if rank 0's store is from a run of a single process. The commits
    # of a single process have no number.
    values = torch.ones(5)
    one = Store.create(tmp_path / "rank-0", [Record(name="rows", values=values, state={})], existing="replace")
    with one as store, Engine(store) as updates:
        updates.fill("rows", values)
        updates.commit(0)
    refused(tmp_path, "rank 1: holds no store, and other ranks do")


def test_one_process_refuses_the_store_of_a_rank(tmp_path):
    def offloaded(existing):
        model = nn.Linear(4, 3, bias=False)
        return memascend.offload(
            model, torch.optim.SGD(model.parameters(), lr=0.1), storage=tmp_path / "run", existing=existing
        )[1]

    offloaded("refuse").close()
    with Store.open(tmp_path / "run") as store:
        # Commits to the store as rank 1 of two ranks would.
        Agreement(Talk(1).of(0), store, bytes(16), 4, bytes(16), bytes(16), Layout(0, 1, 2))
        store._shared.exchange.rank, store._shared.exchange.size = 1, 2
        store._shared.exchange.all_gather = lambda _, value, **__: [value]
        with Engine(store) as updates:
            updates.fill("weight", torch.zeros(3, 4), step=1)
            updates.commit(1)
    before = (tmp_path / "run").read_bytes()
    with pytest.raises(
        memascend.ConfigError,
        match="belongs to rank 1 of a run that shards the model among 2 ranks, but this run has only one process",
    ):
        offloaded("resume")
    assert (tmp_path / "run").read_bytes() == before


# --- two continuations of one run ---------------------------------------------------------------


def forked(tmp_path, steps):
    """Continues a run twice from step 3, each time by `steps` steps.

    Returns a folder with rank 0's store of the first continuation and rank 1's store of the second continuation.
    """
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    Life(one, 3)
    shutil.copytree(one, other)
    for folder in (one, other):
        assert Life(folder, 3 + steps).began == [3, 3]
    assert named(one, 0).number == named(other, 0).number
    assert named(one, 0).identity != named(other, 0).identity
    shutil.copy(other / "rank-1", one / "rank-1")
    return one


def test_stores_of_two_diverged_continuations_are_rejected(tmp_path):
    refused(forked(tmp_path, 2), "no commit is on all ranks, because the run was continued more than once")


def test_diverged_continuations_resume_at_a_commit_that_all_stores_hold(tmp_path):
    assert Life(forked(tmp_path, 1), 5).began == [3, 3]


def test_existing_previous_forks_the_run_at_the_older_commit(tmp_path):
    Life(tmp_path, 3)
    shutil.copy(tmp_path / "rank-1", tmp_path / "kept")
    # `close` did not write a second root for step 3. The other root of each store still names step 2, which "previous"
    # opens.
    assert Life(tmp_path, 3, existing="previous").began == [2, 2]
    (tmp_path / "kept").rename(tmp_path / "rank-1")
    assert Life(tmp_path, 4).began == [2, 2]


def test_damaged_root_fails_all_ranks_and_previous_opens_an_older_commit(tmp_path):
    Life(tmp_path, 3)
    content = bytearray((tmp_path / "rank-1").read_bytes())
    # Damages the newest root. The root's page has two copies of the root, in the first and in the last sector. The
    # newest root is the root of step 3 (generation 4), so its page begins at byte 4096.
    for at in (4096 + 40, 4096 + 4096 - 512 + 40):
        content[at] ^= 1
    (tmp_path / "rank-1").write_bytes(content)
    refused(tmp_path, "existing='previous' opens commit 3")
    assert Life(tmp_path, 4, existing="previous").began == [2, 2]


def test_open_rejects_a_store_that_changed_after_choose(tmp_path):
    Life(tmp_path, 1, size=1)
    path = tmp_path / "rank-0"
    opening = choose(path, Talk(1).of(0), "resume", Layout(0, 1, 1))
    Life(tmp_path, 2, size=1)
    record = Record(name="rows", values=torch.zeros(5), state={})
    with pytest.raises(memascend.StorageError, match="was changed while the ranks agreed"):
        opening.open(lambda existing: Store.create(path, [record], existing=existing))


def test_failed_root_ends_the_store_and_keeps_the_commit_number():
    ended, exchange = [], Talk(1).of(0)
    store = SimpleNamespace(share=lambda _: None, end=lambda: ended.append(True))
    agreement = Agreement(exchange, store, bytes(16), 4, bytes(16), bytes(16), Layout(0, 1, 1))

    def fails(_, agree):
        agree()
        raise RankError("another rank wrote no root", ranks=(1,))

    with pytest.raises(RankError):
        agreement.commit(fails)
    assert (ended, agreement.number) == ([True], 4)


# --- several hosts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "place"),
    [("run", "run/rank-{}-of-2"), ("run-{rank}", "run-{}"), ("{rank}/a{local_rank}/{rank}", "{}/a7/{}")],
)
def test_places_of_others_finds_the_stores_of_other_ranks(tmp_path, monkeypatch, storage, place):
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "7")
    for number in (0, 1, 5):
        (tmp_path / place.format(number, number)).mkdir(parents=True)
        (tmp_path / place.format(number, number) / "memascend.store").touch()
    (tmp_path / place.format(0, 5)).mkdir(parents=True, exist_ok=True)
    layout = Layout(1, 1, 2)
    found = places_of_others(Options(storage=str(tmp_path / storage)), layout)
    numbers = {number: [Path(one) for one in places] for number, places in found.items()}
    # The folder rank-5-of-2 is ignored, because two ranks can only have the numbers 0 and 1.
    there = {0: place.format(0, 0)} if storage == "run" else {number: place.format(number, number) for number in (0, 5)}
    assert numbers == {number: [tmp_path / one] for number, one in there.items()}
    assert places_of_others(Options(storage=str(tmp_path / "a{local_rank}")), layout) == {}
    assert places_of_others(Options(), layout) == {}


def test_swapped_rank_numbers_are_rejected_instead_of_a_new_run(tmp_path):
    """Each rank sees only the folder of its own host.

    After the first run, the two hosts exchange their rank numbers.
    """
    hosts = [tmp_path / "a", tmp_path / "b"]
    [host.mkdir() for host in hosts]
    Life(tmp_path, 2, paths={rank: hosts[rank] / f"rank-{rank}" for rank in range(2)})
    paths = {rank: hosts[1 - rank] / f"rank-{rank}" for rank in range(2)}
    others = {rank: {1 - rank: [str(hosts[1 - rank] / f"rank-{1 - rank}")]} for rank in range(2)}
    for existing in ("refuse", "resume", "previous", "replace"):
        there = f"{hosts[0] / 'rank-0'} on {HOST} is the store of rank 0 of 2"
        refused(tmp_path, there, paths=paths, others=others, existing=existing)
    # If the files at these paths are empty, and not stores of other ranks, the ranks begin a new run.
    for rank in range(2):
        file = hosts[rank] / f"rank-{rank}"
        file.unlink()
        file.touch()
    assert Life(tmp_path, 2, paths=paths, others=others).began == [0, 0]


def test_stores_with_lost_contents_are_rejected_unless_replaced(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank-{rank}").write_bytes(bytes(rank * 8192))
    for existing in ("resume", "previous"):
        refused(tmp_path, "its contents are lost", existing=existing)
    assert Life(tmp_path, 2, existing="replace").began == [0, 0]


def test_find_earlier_rejects_lost_missing_or_swapped_rank_stores(tmp_path):
    paths = [tmp_path / f"rank-{rank}-of-2" / "memascend.store" for rank in range(2)]
    [path.parent.mkdir() for path in paths]
    Life(tmp_path, 3, paths=dict(enumerate(paths)))
    earlier = find_earlier(str(tmp_path), "resume", Alone(), Layout(0, 1, 1))
    earlier.open()
    earlier.close()
    assert earlier.identity == commits(paths[0])[0][0].identity
    for existing in ("replace", "previous"):
        with pytest.raises(memascend.ConfigError, match=r"stores of 2 ranks are in .*'resume' resumes from them"):
            find_earlier(str(tmp_path), existing, Alone(), Layout(0, 1, 1))
    content = paths[1].read_bytes()
    rootless = content[:4096] + bytes(2 * 4096) + content[3 * 4096 :]
    for spoil, words in (
        (lambda: paths[1].write_bytes(bytes(len(content))), "the store of rank 1 of 2 holds no commit of the run"),
        (lambda: paths[1].write_bytes(rootless), "rank-1-of-2.*there is no commit to open"),
        (paths[1].unlink, "the store of rank 1 of 2 cannot be reached"),
    ):
        spoil()
        with pytest.raises(memascend.MemascendError, match=words):
            find_earlier(str(tmp_path), "resume", Alone(), Layout(0, 1, 1)).open()
    paths[1].write_bytes(content)
    swap(*paths)
    with pytest.raises(memascend.ConfigError, match=r"rank 0: .* is the store of rank 1 of 2"):
        find_earlier(str(tmp_path), "resume", Alone(), Layout(0, 1, 1)).open()
    # A single process also rejects a rank's store that was copied to the path of the process's own store.
    with pytest.raises(memascend.ConfigError, match=r"rank 0: .* is the store of rank 1 of 2"):
        require_own({0: seen_at(paths[0])}, 1)
