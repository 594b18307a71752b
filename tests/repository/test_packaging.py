"""Tests the contents of wheel and sdist, the wheel in a bare environment, and the version and notes of a release."""

import fcntl
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {f"memascend/kernels/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}

pytestmark = pytest.mark.timeout(600)


def run(*words, **options):
    """Runs a program, requires that it succeeds, and returns its output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def maturin(*arguments):
    scripts = sysconfig.get_path("scripts")
    # maturin looks for zig with the first Python on PATH, so PATH begins with the folder of this environment's
    # programs.
    environment = {**os.environ, "PYO3_PYTHON": sys.executable, "PATH": f"{scripts}:{os.environ['PATH']}"}
    run(Path(scripts) / "maturin", *arguments, cwd=ROOT, env=environment)


def built(tmp_path_factory, pattern, *arguments):
    """Returns a file that maturin built.

    One test process builds the file under a lock, and all test processes use this file.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / arguments[0]
    with open(root / "maturin.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob(pattern)):
            maturin(*arguments, "--out", folder)
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # The wheel contains the extension that the set-up has compiled, so cargo compiles nothing here.
    return built(tmp_path_factory, "*.whl", "build", "--profile", "release", "--compatibility", "linux")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return built(tmp_path_factory, "*.tar.gz", "sdist")


@pytest.mark.slow
def test_zig_wheel_is_manylinux_abi3_and_links_the_system_unwinder(tmp_path):
    """Builds the wheel as `make wheel` does, with zig as the compiler."""
    maturin("build", "--zig", "--compatibility", "manylinux_2_28", "--out", tmp_path)
    (wheel,) = tmp_path.iterdir()
    assert re.fullmatch(r"memascend-[\d.]+-cp311-abi3-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        # The extension must use the system's unwinder. With a different unwinder, a thread that waits while Python
        # exits would crash.
        assert b"libgcc_s.so.1\0" in archive.read("memascend/_core.abi3.so")


def test_wheel_contains_exactly_the_package_kernels_and_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    package = ROOT / "python/memascend"
    sources = {f"memascend/{path.relative_to(package)}" for path in package.rglob("*.py")} | KERNELS
    data = {"memascend/py.typed", "memascend/_core.pyi", "memascend/_core.abi3.so"}
    assert KERNELS, "no kernels found"
    assert sources | data <= names, sources | data - names
    rest = {name for name in names - sources - data if ".dist-info/" not in name}
    assert not rest, "the wheel contains files that do not belong in it"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert sizes["memascend/_core.abi3.so"] < 8 << 20


def test_sdist_contains_build_inputs_and_no_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    crates = {str(path.relative_to(ROOT)) for path in (ROOT / "rust").rglob("src/*.rs") if "fuzz" not in path.parts}
    needed = {"Cargo.toml", "Cargo.lock", "pyproject.toml", "LICENSE", "README.md"} | crates
    needed |= {f"python/{name}" for name in KERNELS}
    assert needed <= names, needed - names
    assert not {name for name in names if name.startswith(("target/", ".venv", "tests/"))}


@pytest.mark.slow
def test_wheel_built_from_the_sdist_has_the_same_files(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    maturin("build", "--manifest-path", source / "rust/py/Cargo.toml", "--out", tmp_path / "out")
    (built,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(wheel) as other:
        assert set(one.namelist()) == set(other.namelist())


def requirements(text, seen):
    """Adds the distribution of a requirement to `seen`, and all distributions that it needs in this environment."""
    wanted = Requirement(text)
    if wanted.name in seen and not wanted.extras:
        return
    seen.add(wanted.name)
    for line in metadata.requires(wanted.name) or []:
        needed = Requirement(line)
        contexts = [{"extra": extra} for extra in ("", *wanted.extras)]
        if needed.marker is None or any(needed.marker.evaluate(context) for context in contexts):
            requirements(line, seen)


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Makes an environment with the wheel, and returns the new interpreter.

    The environment has links to torch, safetensors and their requirements in this environment.
    """
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    names = set()
    for wanted in ("torch", "safetensors"):
        requirements(wanted, names)
    linked = folder / "linked"
    linked.mkdir()
    for name in names:
        for file in metadata.distribution(name).files or []:
            top = file.parts[0]
            if top not in {"..", "__pycache__"} and not (linked / top).exists():
                (linked / top).symlink_to(metadata.distribution(name).locate_file(top))
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(site.strip()) / "linked.pth").write_text(f"{linked}\n")
    # pip has no index, so a requirement of the wheel beyond torch and safetensors would fail here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", wheel, env=environment)
    return python


BARE = """
import torch, memascend
print(memascend.__file__)
ring = memascend.memory.ChunkRing(4096, 2)
assert ring.lease().tensor(1024, torch.float32).fill_(2).sum() == 2048
assert memascend.kernels.__file__
model = torch.nn.Linear(4, 4)
model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=".")
with optimizer:
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
"""


def test_wheel_trains_in_a_bare_environment(bare, tmp_path):
    assert str(bare.parent.parent) in run(bare, "-c", BARE, cwd=tmp_path)


@pytest.mark.slow
def test_wheel_commands_doctor_and_demo_run_in_a_bare_environment(bare, tmp_path):
    report = json.loads(run(bare.parent / "memascend", "doctor", "--json", cwd=tmp_path))
    assert report["ok"] is True
    run(bare, "-m", "memascend", "demo", "--steps", "6", cwd=tmp_path)


def test_make_wheel_installs_only_maturin_and_ziglang():
    printed = run("make", "-n", "-B", "wheel", cwd=ROOT, timeout=60)
    assert ".venv-wheel/bin/maturin build --zig" in printed
    assert "uv pip" not in printed
    assert ".venv/" not in printed.replace(".venv-wheel/", "")
    chosen = next(line for line in printed.splitlines() if line.startswith("awk "))
    tools = run("bash", "-c", chosen.partition(" > ")[0], cwd=ROOT)
    pinned = [line.split()[0] for line in tools.splitlines() if not line.startswith(" ")]
    assert [name.partition("==")[0] for name in pinned] == ["maturin", "ziglang"]
    assert tools.count("--hash=") > 2


def test_make_version_and_notes_print_wheel_version_and_newest_notes():
    """`make version` prints the version of the wheel. `make notes` prints the newest section of the changelog."""
    version, notes = (run("make", "--silent", word, cwd=ROOT, timeout=60) for word in ("version", "notes"))
    version = version.strip()
    assert version == metadata.version("memascend")
    _, newest, *_ = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    heading, _, section = newest.partition("\n")
    assert heading.startswith(version)
    assert notes.split() == section.split()


def test_github_files_are_yaml_and_name_executable_ci_scripts():
    """Parses the YAML files without a schema. In `make lint`, zizmor checks the schemas of workflows."""
    yaml = pytest.importorskip("yaml")
    files = sorted((ROOT / ".github").rglob("*.yml"))
    scripts = set()
    for file in files:
        assert yaml.safe_load(file.read_text()), file
        scripts |= set(re.findall(r"\.ci/\w+", file.read_text()))
    assert scripts == {".ci/run", ".ci/runner"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
