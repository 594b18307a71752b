"""Tests the conclusions, the stored results and the searches of the training benchmark; no test depends on timings."""

import stat
import subprocess
import sys

import pytest

from benchmarks.train.__main__ import main
from benchmarks.train.cell.record import Record
from benchmarks.train.cell.workload import WORKLOADS, adapted
from benchmarks.train.code import code_hash
from benchmarks.train.judge import bound, judged, loss_difference
from benchmarks.train.launch import Launcher
from benchmarks.train.measure import Bench
from benchmarks.train.results import Results
from benchmarks.train.search import least, most
from benchmarks.train.tuning import tuned
from memascend.errors import ConfigError

WORK = WORKLOADS["4M-1x128"]
FALLING = [8.0, 7.5, 7.0]


def cell(losses=FALLING, step=1.0, added=100, **more):
    seconds = {"step": [step, step], "forward": [step / 4] * 2, "backward": [step / 2] * 2, "update": [step / 4] * 2}
    figures = {"read_per_parameter": 1.0, "written_per_parameter": 2.0, "counted_per_parameter": None}
    peaks = {"peak_bytes": 1000, "set_up_peak_bytes": 2000, "cgroup_peak_bytes": None}
    return {"losses": losses, "seconds": seconds, "mean": {}, "added_bytes": added} | figures | peaks | more


def test_adapted_workload_is_named_by_what_differs():
    assert adapted(WORK, "cpu", "bfloat16") == WORK
    assert [adapted(WORK, "cuda", kind).name for kind in ("bfloat16", "float32")] == [
        "4M-1x128-cuda",
        "4M-1x128-cuda-float32",
    ]
    assert adapted(WORK, "cpu", "float32").dtype == "float32"
    assert adapted(WORKLOADS["4M-fp16"], "cpu", "float32") == WORKLOADS["4M-fp16"]


def test_processor_without_units_for_bfloat16_measures_no_cell_in_bfloat16(tmp_path, monkeypatch, capsys):
    """Otherwise each cell would take hours, and `Launcher` would end it without figures."""
    monkeypatch.setattr("benchmarks.train.__main__.product_flops", lambda _: 2e9)
    monkeypatch.setattr("memascend.plan.hardware.product_flops", lambda _: 50e9)
    words = ["--storage", str(tmp_path), "--results", str(tmp_path / "results")]
    assert main(words) == 1
    assert "computes bfloat16 25 times slower than float32" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*words, "--parts", "kept-curves", "--json"]) == 0
    assert main([*words, "--parts", "curves", "--dtype", "float32"]) == 1
    assert "work only for the part cells" in capsys.readouterr().err


def test_system_whose_losses_differ_gets_an_error_instead_of_figures():
    cells = judged(
        {
            "torch": cell(),
            "memascend": cell([8.0, 7.5, 7.01]),
            "zero-offload": cell([8.0, 8.0, 8.0]),
            "zero-infinity": {"error": "AssertionError"},
        }
    )
    assert cells["memascend"]["loss_difference"] == pytest.approx(0.01 / 7)
    assert set(cells["zero-offload"]) == {"error"}
    assert "differ by 14" in cells["zero-offload"]["error"]
    assert cells["zero-infinity"] == {"error": "AssertionError"}


def test_loss_difference_is_infinite_for_nan_or_losses_that_do_not_fall():
    assert loss_difference([8.0, 8.0], [8.0, 8.0]) == float("inf")
    assert loss_difference([8.0], [8.0]) == float("inf")
    assert loss_difference([8.0, float("nan")], [8.0, 7.0]) == float("inf")
    assert loss_difference(FALLING, FALLING) == 0


def test_ratios_compare_each_memascend_system_with_its_peer():
    cells = judged(
        {
            "torch": cell(step=1, added=100),
            "memascend": cell(step=3, added=10),
            "memascend-held": cell(step=2, added=50),
            "zero-infinity": cell(step=6, added=100),
            "zero-offload": cell(step=12),
        }
    )
    assert cells["memascend"]["of_memory_seconds"] == 3
    assert cells["memascend"]["of_memory_bytes"] == pytest.approx(0.1)
    assert (cells["memascend"]["ours_faster"], cells["memascend-held"]["ours_faster"]) == (2, 3)
    assert cells["memascend-held"]["ours_of_memory"] == pytest.approx(0.5)
    assert cells["zero-offload"]["ours_faster"] == 4
    assert cells["zero-offload"]["ours_of_memory"] == pytest.approx(0.1)
    assert "ours_faster" not in judged({"torch": cell(), "memascend": cell(), "zero-offload": cell()})["memascend"]
    assert cells["torch"]["peak_bytes"] == 2000


def test_losses_without_a_torch_reference_are_not_compared():
    cells = judged({"memascend": cell()})
    assert cells["memascend"]["losses"].startswith("not compared")
    assert "loss_difference" not in cells["memascend"]


def test_a_step_without_parts_has_only_its_whole_time(tmp_path):
    class Whole:
        def counted(self):
            return None

    record = Record({"warm": 0, "steps": 2}, tmp_path, Whole())
    for loss in FALLING[:2]:
        record.add(loss, [record.now(), record.now()])
    found = judged({"torch": cell(), "memascend-trainer": cell(FALLING[:2], seconds=record.values(10)["seconds"])})
    assert set(found["memascend-trainer"]["seconds"]) == {"step"}
    assert found["memascend-trainer"]["of_memory_seconds"] > 0


def test_the_bound_is_the_longer_of_computing_and_moving():
    compute = {"forward": 1.0, "backward": 2.0}
    speeds = {"read": 1.0, "mixed": 1.0}
    read = {"values, forward": 3 * 10**9, "values, backward": 10**9, "state": 4 * 10**9}
    fused = bound(compute, read, {"state": 10**9}, speeds)
    assert fused == {"forward": 3.0, "backward": 6.0, "update": 0.0, "step": 9.0}
    kept = bound(compute, read, {"state": 10**9, "gradients": 10**9}, speeds)
    assert kept == {"forward": 3.0, "backward": 2.0, "update": 5.0, "step": 10.0}


def test_least_finds_the_smallest_working_size_to_its_precision():
    tried = []

    def works(size):
        tried.append(size)
        return size >= 777

    found = least(works, 100, precision=0.04)
    assert 777 <= found <= 777 * 1.05
    assert len(tried) < 12
    assert least(lambda _: False, 100) is None


def test_most_stops_at_the_first_size_that_does_not_work():
    assert most(lambda size: size < 10, (1, 2, 4, 8, 16, 32)) == 8
    assert most(lambda _: False, (1, 2)) is None


def test_results_reuse_the_figures_of_the_same_question(tmp_path):
    answers = iter(range(10))
    results = Results(tmp_path)

    def ask(asked, results=results):
        return results.get("a/b c", asked, lambda: {"value": next(answers)})["value"]

    assert [ask({"steps": 1}), ask({"steps": 1}), ask({"steps": 2}), ask({"steps": 2})] == [0, 0, 1, 1]
    assert ask({"steps": 2}, Results(tmp_path, again=True)) == 2


class Trials:
    """Simulates a `Bench`. Its peer needs five parameter buffers and seven state buffers."""

    def __init__(self):
        self.launcher = self

    def get(self, _name, _asked, measure):
        return measure()

    def print_line(self, text):
        pass

    def run(self, _work, _system, *, settings, **_):
        works = settings["state_buffers"] >= 7 and settings.get("parameter_buffers", 5) >= 5
        return {} if works else {"error": "AssertionError"}


def test_the_fewest_buffers_are_found_by_trying():
    assert tuned(Trials(), WORK, "zero-infinity") == {"parameter_buffers": 5, "state_buffers": 7}
    assert tuned(Trials(), WORK, "zero-infinity-params-in-ram") == {"state_buffers": 7}
    assert tuned(Trials(), WORK, "zero-offload") == {}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Returns a function `made(run)` that makes a `Bench`. The launcher of this bench returns the result of `run()`."""
    monkeypatch.setattr("benchmarks.train.measure.disk_speeds", lambda _: {})
    launcher = Launcher(tmp_path, None)

    def made(run):
        launcher.run = lambda *_, **__: run()
        return Bench(launcher, Results(tmp_path / "cells"), 8, print)

    return made


def test_figures_of_other_code_are_measured_again(bench, monkeypatch):
    runs = []

    def measured():
        bench(lambda: runs.append(1) or cell()).cell(WORK, "memascend")
        return len(runs)

    assert measured() == 1
    assert measured() == 1
    monkeypatch.setattr("benchmarks.train.measure.code_hash", lambda: "other")
    assert measured() == 2


def test_figures_are_rejected_if_the_sources_change_during_the_run(bench, tmp_path, monkeypatch):
    code = ["before"]
    monkeypatch.setattr("benchmarks.train.measure.code_hash", lambda: code[-1])
    with pytest.raises(ConfigError, match="sources changed while"):
        bench(lambda: code.append("after") or cell()).cell(WORK, "memascend")
    assert not list((tmp_path / "cells").iterdir())


def test_code_hash_changes_with_each_source_that_decides_a_figure(tmp_path):
    sources = ("python/memascend/one.py", "rust/mem/src/lib.rs", "triton_kernels/one.py", "benchmarks/train/one.py")
    locks = ("Cargo.toml", "Cargo.lock", "requirements/deepspeed.lock")
    for name in (*sources, *locks, "benchmarks/peers/one.py", "benchmarks/reservation.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    before = code_hash(tmp_path)
    (tmp_path / "benchmarks/results").mkdir()
    (tmp_path / "benchmarks/results/cell.json").write_text("{}")
    (tmp_path / "benchmarks/train/tables.py").write_text("what a table looks like decides no figure")
    (tmp_path / "python/memascend/_core.abi3.so").write_bytes(b"built")
    assert code_hash(tmp_path) == before
    seen = {before}
    for path in sorted(tmp_path.rglob("*")):
        if path.suffix in {".py", ".rs", ".lock", ".toml"} and path.name != "tables.py":
            path.write_text("other")
            seen.add(code_hash(tmp_path))
    assert len(seen) == 10


def test_parameters_are_counted_from_the_shape():
    millions = {"4M": 4, "25M": 25, "125M": 125, "500M": 504, "1.5B": 1482}
    assert {name: round(WORKLOADS[f"{name}-1x128"].parameters / 1e6) for name in millions} == millions


def test_launcher_sets_the_environment_of_a_peer_and_reads_its_result(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\n"
        'test -f "$PYTHONPATH/benchmarks/train/cell/__main__.py" && test "$DS_ACCELERATOR" = cpu || exit 1\n'
        'echo "noise"; echo \'cell: {"value": 1}\'; echo "more noise"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    assert Launcher(tmp_path, python).run(WORK, "zero-offload", steps=1) == {"value": 1}


def test_programs_run_by_a_peer_load_few_memascend_modules_and_no_torch():
    program = (
        "import sys, benchmarks.train.cell.__main__, benchmarks.train.cell.systems.zero\n"
        "import benchmarks.peers.nvme_update\n"
        "print(*(name for name in sys.modules if name.startswith('memascend')), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    *names, torch = done.stdout.split()
    assert torch == "False"
    allowed = {"memascend", *(f"memascend.{name}" for name in ("errors", "text", "cli", "cli.process"))}
    assert set(names) <= allowed
