"""Tests the linter of words: it finds what it should, and documents, messages and help have none of it."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = runpy.run_path(str(ROOT / "docs/words.py"))
LONG = "A sentence of thirty-one words " + "goes to the next one " * 5 + "and then it ends."


def wrong(tmp_path, text, name="page.md"):
    path = tmp_path / name
    path.write_text(text)
    return [complaint for _, complaint in WORDS["complaints"](path)]


@pytest.mark.parametrize(
    "text",
    [
        "It trains with the bits of training in memory.",
        "Held entries are read once.",
        "Who dies in it finds the gradients in the log of gradients.",
        "Weights have fp32 masters.",
        "A parameter that is away has no memory.",
        "Others are refused by name.",
        "It poses as a GPU.",
        "The mode is learnt in the first step.",
        "Those that were found are used.",
        "The run goes on at the next batch.",
        "Bits are rounded by chance.",
        "`plan` reckons both.",
        "Ratios are to a peer in the same run.",
        "Status 1 means that it does not fit.",
        "There is no room on the disk.",
        "| cell | another rank is told of it |",
    ],
)
def test_a_word_of_our_own_is_found(tmp_path, text):
    assert wrong(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "Results are bit-identical to in-memory training.",
        "A write-ahead log of gradients keeps steps durable, with fp32 master weights.",
        "Run `memascend status 1`, or read [a page](https://masters.example/peer).",
        "```\nwhat is there goes on by chance\n```",
    ],
)
def test_the_fields_words_and_code_pass(tmp_path, text):
    assert not wrong(tmp_path, text)


def test_long_sentences_are_limited(tmp_path):
    few, many = (" ".join([LONG] * count) for count in (WORDS["LONG_MAX"], WORDS["LONG_MAX"] + 1))
    assert not wrong(tmp_path, few)
    assert len(wrong(tmp_path, many)) == WORDS["LONG_MAX"] + 1
    # A list's items and a table's cells are no sentence together.
    short = "- An item of eight words, and no more.\n" * 8
    assert not wrong(tmp_path, short + "| a cell of words |\n" * 20)


def test_of_a_changelog_the_newest_section_counts(tmp_path):
    old = "# Changelog\n\n## Unreleased\n\n- A new thing.\n\n## 0.1\n\n- It is refused by name.\n"
    assert not wrong(tmp_path, old, "CHANGELOG.md")
    assert wrong(tmp_path, old.replace("A new thing.", "It is refused by name."), "CHANGELOG.md")


def test_texts_in_code_are_read_and_docstrings_are_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Those that go on."""\n'
        "name = 'goes on'\n"
        "raise ValueError(f'the run at {name} goes on there')\n"
        "add('--all', help='of those that are given')\n"
        "add('--storage', help='run `those that go on` there')\n"
    )
    assert [number for number, _ in WORDS["complaints_of_code"](path)] == [3, 4]


def test_the_documents_have_the_fields_words(capsys):
    assert WORDS["main"]() == 0, capsys.readouterr().out


def test_there_are_few_terms_of_our_own():
    terms = (ROOT / "docs/how-it-works.md").read_text().split("## Terms")[1]
    assert len(re.findall(r"^\| (?!term |---)", terms, re.MULTILINE)) <= 15
