"""Tests that docs/optimizers.md says what becomes of each optimizer of these libraries, in these versions."""

import pytest
from clients.optimizers import LIBRARIES, cases, heading, row, written

pytestmark = pytest.mark.timeout(300)


def name(case):
    return f"{case.library}-{case.name}"


@pytest.mark.parametrize("case", [case for library in LIBRARIES for case in cases(library)], ids=name)
def test_the_page_says_what_becomes_of_it(case):
    if case.name == "SWATS":
        pytest.skip(
            "when it turns to SGD, and keeps other state, depends on the last bits of the processor's arithmetic"
        )
    assert row(case) in written()[heading(case.library)], "make clients-table"


def test_the_page_has_no_other_libraries_versions_and_classes():
    found = written()
    assert list(found) == [heading(library) for library in LIBRARIES]
    for library in LIBRARIES:
        names = [line.split(" | ")[0].removeprefix("| ") for line in found[heading(library)]]
        assert names == [case.name for case in cases(library)]
        outcomes = [line.split(" | ")[1] for line in found[heading(library)]]
        assert all(outcome.startswith(("streams", "rejected: ", "not tried: ")) for outcome in outcomes)
