"""Tests that each fault of `tests/mutants` can be applied to the code, and that the tests of the fault exist."""

import ast
import re

import pytest
from mutants.faults import ROOT, faults, problems

FAULTS = faults()


def test_every_fault_applies_to_the_code():
    assert list(problems(FAULTS, ROOT)) == []
    assert len(FAULTS) > 150


def functions(paths):
    return {name for path in paths for name in re.findall(r"\b(?:def|fn) (\w+)", path.read_text())}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_leaves_python_parsable_and_its_tests_exist(fault):
    source = ROOT / fault.file
    if source.suffix == ".py":
        ast.parse(fault.applied(source.read_text()))
    found = functions(fault.sources(ROOT))
    for test in fault.tests:
        named = re.search(r"\w*$", re.sub(r"\[.*\]$|^--lib$|^--test \w+$|^[\w/.]+$", "", test))[0]
        assert any(name.startswith(named) for name in found), test
