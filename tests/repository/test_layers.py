"""Tests that crates and Python packages import only what the map in ARCHITECTURE.md allows."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# For each crate: the crates of this repository that it may use, and the external crates that it may use. The tests and
# benches of a crate may use any crate that `RESERVED` does not name.
CRATES = {
    "memascend-mem": ({}, {"libc", "rustix", "thiserror"}),
    "memascend-math": ({}, {"thiserror"}),
    "memascend-nvme": ({"memascend-mem"}, {"io-uring", "libc", "rustix", "thiserror"}),
    "memascend-store": ({"memascend-math", "memascend-mem", "memascend-nvme"}, {"rustix", "thiserror", "twox-hash"}),
    "memascend-engine": ({"memascend-math", "memascend-mem", "memascend-store"}, {"thiserror"}),
    "memascend-py": (
        {"memascend-engine", "memascend-math", "memascend-mem", "memascend-nvme", "memascend-store"},
        {"pyo3"},
    ),
}
# External crates that only one crate may use.
RESERVED = {"pyo3": "memascend-py", "io-uring": "memascend-nvme"}

BASE = {"errors", "memory", "nvme", "tensors", "text"}


def rows():
    """Reads the map in ARCHITECTURE.md.

    Yields each package of python/memascend with the packages that it may import.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("\npython/memascend/\n")[2].partition("\n```")[0]
    for room, allowed in re.findall(r"^  (\w+)/?\s[^>]*?-> (.*)$", text, re.MULTILINE):
        named = set(re.split(r",\s*", allowed.strip()))
        assert "base" in named, room
        yield room, (named - {"base"}) | BASE


ROOMS = {**dict(rows()), "__main__": {"cli"}}
# For each module of the base: the modules that it may import. `engine` is the public name of the package `storage`.
GROUND = {
    "errors": set(),
    "text": {"errors"},
    "tensors": {"_core"},
    "memory": {"_core"},
    "nvme": {"errors", "text", "_core"},
    "engine": {"storage"},
}
# The only modules and packages that may import the extension, `_core`.
FACES = {"memory", "nvme", "tensors", "storage", "kernels"}


def crates():
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version=1", "--no-deps", "--locked"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return {package["name"]: package for package in json.loads(metadata.stdout)["packages"]}


def test_crates_depend_only_on_allowed_crates():
    found = crates()
    assert set(found) == set(CRATES)
    for name, package in found.items():
        ours, others = CRATES[name]
        used = {dependency["name"] for dependency in package["dependencies"] if dependency["kind"] is None}
        assert used <= {*ours, *others}, f"{name} may not use {used - {*ours, *others}}"
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


def nodes(tree):
    """Yields the nodes of a syntax tree, without the nodes under `if TYPE_CHECKING:`, which no program runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from nodes(node)


def imports(path):
    """Yields the modules and names of memascend that a file imports at run time, at its top or in a function."""
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports must be absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "memascend")


PYTHON = {module: path for path, module in python_files()}


def room_of(module):
    """Returns the second part of a module's name: a package such as `plan`, or a module such as `errors`.

    Returns "" for memascend/__init__.py.
    """
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("module", PYTHON)
def test_modules_import_only_packages_that_architecture_md_allows(module):
    room = room_of(module)
    if not room:
        return
    allowed = GROUND.get(room, ROOMS.get(room))
    assert allowed is not None, f"{module} is in no package of the map: add its package in ARCHITECTURE.md"
    for imported in imports(PYTHON[module]):
        other = room_of(imported)
        if other == "_core":
            assert room in FACES, f"{module} may not import the extension"
        else:
            assert other == room or other in allowed, f"{room} may not import {other}: {module} imports {imported}"
            assert other == room or not imported.split(".")[-1].startswith("_"), f"{imported} is private to {other}"


def test_imports_of_packages_and_modules_have_no_cycle():
    # If `rows` found no packages, the search for a cycle between packages would find none.
    assert len(ROOMS) > 12
    assert cycle({**ROOMS, **GROUND}) is None
    modules = {}
    for module, path in PYTHON.items():
        found = {name if name in PYTHON else name.rpartition(".")[0] for name in imports(path)}
        # An import of memascend/__init__.py does not count, because this file imports the public names only for type
        # checkers.
        modules[module] = {name for name in found if name in PYTHON and name not in {module, "memascend"}}
    assert cycle(modules) is None


def cycle(arrows):
    """Returns a cycle in the graph `arrows` as a list of names, or None if the graph has no cycle."""
    done, way = set(), []

    def visit(name):
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done or name not in arrows:
            return None
        way.append(name)
        found = next((found for other in sorted(arrows[name]) if (found := visit(other))), None)
        way.pop()
        done.add(name)
        return found

    return next((found for name in sorted(arrows) if (found := visit(name))), None)


def test_cycle_returns_the_cycle_of_a_graph_or_none():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_no_source_file_has_a_name_like_util_or_common():
    for path in [*(ROOT / "rust").rglob("*.rs"), *(ROOT / "python").rglob("*.py")]:
        assert not re.search(r"util|common|helper|misc|_v\d", path.stem), f"{path.name} must be named after its subject"
