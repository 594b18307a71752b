"""Who may know whom: the crates, the crates of others, and the Python modules, as ARCHITECTURE.md draws them."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each crate of ours may use: crates of ours, then crates of others. Tests and benches may use more.
CRATES = {
    "memascend-mem": ({}, {"libc", "thiserror", "loom"}),
    "memascend-math": ({}, {"thiserror"}),
    "memascend-nvme": ({"memascend-mem"}, {"io-uring", "libc", "thiserror"}),
    "memascend-store": ({"memascend-mem", "memascend-nvme"}, {"libc", "thiserror", "twox-hash"}),
    "memascend-engine": ({"memascend-math", "memascend-mem", "memascend-store"}, {"thiserror"}),
    "memascend-py": (
        {"memascend-engine", "memascend-math", "memascend-mem", "memascend-nvme", "memascend-store"},
        {"pyo3"},
    ),
}
# Crates of others that belong to one layer alone.
RESERVED = {"pyo3": "memascend-py", "io-uring": "memascend-nvme"}

# Each module and the modules of ours that it may import; a package stands for everything in it.
MODULES = {
    "memascend": {
        "engine",
        "errors",
        "kernels",
        "memory",
        "nvme",
        "offload",
        "optimizer",
        "plan",
        "report",
        "surgery",
        "trainer",
    },
    "memascend.__main__": {"cli"},
    "memascend.errors": set(),
    "memascend.config": {"errors", "paths"},
    "memascend.pages": set(),
    "memascend.paths": set(),
    "memascend.units": {"errors", "pages"},
    "memascend.schedule": {"units"},
    "memascend.planned": {"units"},
    "memascend.choosing": set(),
    "memascend.classes": {"errors", "memory"},
    "memascend.plan": {"choosing", "classes", "errors", "pages", "planned", "schedule", "units"},
    "memascend.recorded": set(),
    "memascend.kept": {"errors", "recorded"},
    "memascend.handles": {"kept", "recorded"},
    "memascend.scaling": {"errors"},
    "memascend.shown": set(),
    "memascend.progress": {"shown"},
    "memascend.meter": set(),
    "memascend.report": {"errors", "meter", "session", "shown"},
    "memascend.placeholder": {"errors"},
    "memascend.saved": set(),
    "memascend.scratch": {"errors", "nvme"},
    "memascend.activation_memory": {"device", "errors", "memory", "scratch"},
    "memascend.activation_chunks": {"activation_memory", "checksum", "device", "errors", "pages", "scratch"},
    "memascend.activations": {"activation_chunks", "activation_memory", "device", "errors", "scratch"},
    "memascend.order": set(),
    "memascend.graphs": {"errors"},
    "memascend.recurrent": set(),
    "memascend.device": {"dlpack", "errors", "memory"},
    "memascend.device_arena": {"device", "errors", "pages"},
    "memascend.staging": {"device", "errors"},
    "memascend.lending": {"chunk", "device", "engine", "errors", "handed"},
    "memascend.unit_memory": {"device", "device_arena", "engine", "lending", "memory", "rows", "staging"},
    "memascend.threads": set(),
    "memascend.autocast": set(),
    "memascend.turns": {"threads"},
    "memascend.home": {"placeholder"},
    "memascend.leaving": {"home", "order"},
    "memascend.embeddings": {"units"},
    "memascend.row_gradient": {"errors"},
    "memascend.row_lending": {"chunk", "engine", "handed", "row_gradient"},
    "memascend.rows": {"engine", "placeholder", "row_gradient"},
    "memascend.sums": {"home"},
    "memascend.residency": {
        "errors",
        "home",
        "leaving",
        "memory",
        "order",
        "placeholder",
        "rows",
        "saved",
        "sums",
        "threads",
        "turns",
    },
    "memascend.leftovers": set(),
    "memascend.gates": {"errors", "home", "leftovers", "residency"},
    "memascend.buffers": {"engine"},
    "memascend.names": set(),
    "memascend.tensorfile": {"engine", "errors"},
    "memascend.converted": {"errors"},
    "memascend.weights": {"converted", "errors", "names", "paths", "tensorfile"},
    "memascend.initialising": {"errors", "units"},
    "memascend.bodiless": {"errors", "initialising", "weights"},
    "memascend.beginning": {"initialising", "names", "placeholder", "units", "updates", "weights"},
    "memascend.checkpoint": {"beginning", "engine", "errors", "names", "progress", "units", "updates", "weights"},
    "memascend.saving": {"checkpoint", "converted", "engine", "errors", "names", "paths", "progress", "tensorfile"},
    "memascend.arrival": {"handles", "placeholder"},
    "memascend.backwards": {"errors", "leftovers", "threads"},
    "memascend.measures": set(),
    "memascend.gradients": {"arrival", "backwards", "errors", "handles", "measures", "placeholder", "row_gradient"},
    "memascend.updates": {"arrival", "engine", "errors", "generic", "pages", "placeholder", "solitary"},
    "memascend.surgery": {"engine", "errors", "gates", "home", "placeholder", "residency", "session"},
    "memascend.groups": {"errors"},
    "memascend.session": {
        "unit_memory",
        "activations",
        "arrival",
        "buffers",
        "checkpoint",
        "engine",
        "errors",
        "gates",
        "gradients",
        "heap",
        "groups",
        "leftovers",
        "meter",
        "plan",
        "report",
        "residency",
        "scaling",
        "surgery",
        "saving",
    },
    "memascend.optimizer": {"errors", "plan", "report", "session"},
    "memascend.trainer": {"checkpoint", "errors", "optimizer", "session"},
    "memascend.ownership": {"errors", "gates", "optimizer", "surgery"},
    "memascend.places": {"config", "engine", "errors", "paths"},
    "memascend.holes": set(),
    "memascend.heap": {"holes"},
    "memascend.wiring": {
        "arrival",
        "autocast",
        "bodiless",
        "buffers",
        "config",
        "engine",
        "gates",
        "gradients",
        "graphs",
        "heap",
        "home",
        "kernels",
        "optimizer",
        "ownership",
        "placeholder",
        "plan",
        "recurrent",
        "residency",
        "row_lending",
        "scaling",
        "session",
        "sums",
        "surgery",
        "units",
        "updates",
    },
    "memascend.offload": {
        "device",
        "lending",
        "staging",
        "unit_memory",
        "activations",
        "beginning",
        "bodiless",
        "buffers",
        "checkpoint",
        "classes",
        "config",
        "embeddings",
        "engine",
        "errors",
        "groups",
        "heap",
        "optimizer",
        "ownership",
        "paths",
        "placeholder",
        "places",
        "plan",
        "progress",
        "recurrent",
        "rows",
        "session",
        "units",
        "updates",
        "weights",
        "wiring",
    },
    "memascend.memory": {"errors", "_core"},
    "memascend.nvme": {"errors", "paths", "_core"},
    "memascend.chunk": set(),
    "memascend.compact": {"errors", "_core"},
    "memascend.handed": {"errors"},
    "memascend.checksum": {"_core"},
    "memascend.dlpack": {"_core"},
    "memascend.description": {"compact", "errors", "pages", "_core"},
    "memascend.fetch": {"handed", "_core"},
    "memascend.store": {"compact", "description", "errors", "fetch", "handed", "pages", "paths", "_core"},
    "memascend.examined": {"paths", "store", "_core"},
    "memascend.engine": {
        "checksum",
        "chunk",
        "compact",
        "description",
        "errors",
        "examined",
        "handed",
        "pages",
        "store",
        "_core",
    },
    "memascend.solitary": set(),
    "memascend.streamable": {"errors", "solitary"},
    "memascend.probing": {"errors", "solitary", "streamable"},
    "memascend.generic": {"chunk", "errors", "probing", "solitary", "streamable"},
    "memascend.kernels": {"errors", "_core"},
    "memascend.cli": {
        "config",
        "engine",
        "errors",
        "memory",
        "nvme",
        "paths",
        "plan",
        "kernels",
        "shown",
        "offload",
        "optimizer",
        "weights",
    },
}
# The only modules that may import the extension.
FACES = {
    "memascend.memory",
    "memascend.nvme",
    "memascend.compact",
    "memascend.checksum",
    "memascend.dlpack",
    "memascend.description",
    "memascend.fetch",
    "memascend.store",
    "memascend.examined",
    "memascend.engine",
    "memascend.kernels",
}


def crates():
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version=1", "--no-deps", "--locked"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return {package["name"]: package for package in json.loads(metadata.stdout)["packages"]}


def test_crates_depend_on_what_their_layer_may_know():
    found = crates()
    assert set(found) == set(CRATES)
    for name, package in found.items():
        ours, others = CRATES[name]
        used = {dependency["name"] for dependency in package["dependencies"] if dependency["kind"] is None}
        assert used <= {*ours, *others}, f"{name} may not use {used - {*ours, *others}}"


def test_crates_of_others_stay_in_their_layer():
    for name, package in crates().items():
        for dependency in package["dependencies"]:
            owner = RESERVED.get(dependency["name"], name)
            assert owner == name, f"only {owner} may use {dependency['name']}"


@pytest.mark.parametrize("library", ["libcuda", "dlopen"])
def test_only_one_file_opens_the_cuda_driver(library):
    users = [path for path in (ROOT / "rust").rglob("src/*.rs") if library in path.read_text()]
    assert users == [ROOT / "rust/mem/src/cuda.rs"]


def python_files():
    package = ROOT / "python/memascend"
    for path in sorted(package.rglob("*.py")):
        parts = ["memascend", *path.relative_to(package).with_suffix("").parts]
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """The modules of ours that a file imports, also inside functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [
                f"{node.module}.{alias.name}" if node.module == "memascend" else node.module for alias in node.names
            ]
        else:
            continue
        yield from (name for name in names if name and name.split(".")[0] == "memascend")


def layer_of(module):
    """The longest name in MODULES that the module is or lies in."""
    names = [name for name in MODULES if module == name or (module.startswith(f"{name}.") and name != "memascend")]
    assert names, f"{module} stands in no layer: enter it in this test and in ARCHITECTURE.md"
    return max(names, key=len)


@pytest.mark.parametrize(("path", "module"), [pytest.param(*found, id=found[1]) for found in python_files()])
def test_modules_import_what_their_layer_may_know(path, module):
    layer = layer_of(module)
    for imported in imports(path):
        inside = imported.startswith(layer) and layer != "memascend"
        first = imported.split(".")[1] if "." in imported else ""
        assert inside or first in MODULES[layer], f"{module} may not import {imported}"
        if first == "_core":
            assert layer in FACES, f"{module} may not import the extension"


def test_no_rust_file_is_a_drawer():
    for path in [*(ROOT / "rust").rglob("*.rs"), *(ROOT / "python").rglob("*.py")]:
        assert not re.search(r"util|common|helper|misc|_v\d", path.stem), f"{path.name} says nothing of its subject"
