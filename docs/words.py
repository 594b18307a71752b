"""Checks the words of documents, messages and help: terms of our own that the field has words for, and long sentences.

`python docs/words.py` prints each place as file:line and what to say instead; the exit code is 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]

PACKAGE = ROOT / "python/memascend"
# What is not said, and what is said instead. Patterns ignore case and see neither code nor links' targets.
RULES = {
    r"\bbits of training in memory|the bits of (?:that|a|the) (?:process|run|training)": "bit-identical to",
    r"\bheld (?:entr|parameter|record)|\b(?:are|is) held in memory\b": "kept in RAM (the RAM tier)",
    r"\bwhat is held\b|\ball held\b": "kept in RAM (the RAM tier)",
    r"(?<!write-ahead )\blog of gradients": "write-ahead log of gradients, or gradient log",
    r"\bmasters\b": "fp32 master weights",
    r"\b(?:is|are|was|were) away\b": "offloaded",
    r"\bgates?\b": "module hook",
    r"\brows? of data\b|\brows share\b": "example",
    r"\b(?:a|the) head\b(?! of a step| of the log| that| says)": "LM head",
    r"\bdivided by (?:`?fully_shard|torch)": "sharded",
    r"\bbrings? (?:them |all )?together\b|\bhears? (?:of|from)\b": "rendezvous, is notified",
    r"\btold\b|\btells?\b": "report, print, log",
    r"\blet go\b": "release",
    r"\b(?:is|are) given up\b|\bgives? up\b": "abandon, drop",
    r"\brefused? by (?:its |the )?name": "rejected with an error that names it",
    r"\bposes? as\b|\bposing as\b": "simulated or mock device",
    r"\blearns? in\b|\blearnt\b": "detected in",
    r"\b(?:what|that which) (?:is|was|lies) there\b": "name the subject",
    r"\bthose (?:that|who|which)\b|\bwhoever\b|\bwho (?:dies|kills|waits|asks)\b": "name the subject",
    r"(?:^|[.;:] |, (?:and )?)what (?!(?:it|to|you|they|happens|happened)\b)[a-z-]+ "
    r"(?:is|are|was|were|has|have|does|do)\b": "name the subject",
    r"\bgo(?:es|ing)? on\b|\bwent on\b": "resume, continue",
    r"\bby chance\b": "stochastically",
    r"\breckon(?:s|ed|ing)?\b": "estimate",
    r"\bpeers?\b": "baseline",
    r"\bstatus (?:is )?[0-9]\b|\bexit status\b": "exit code",
    r"\broom\b": "space, disk space; for a directory: package",
    r"\brecomputed\b": "activation checkpointing",
    r"\bnow and then\b": "occasionally",
    r"\bas ever\b": "as before",
    r"\bnobody knows\b|\bnothing was left to find\b": "is not known",
    r"\bpays? for nothing\b": "incurs no overhead",
    r"\bit is memory itself\b": "tmpfs lives in RAM",
}
WORDS_MAX = 30
# Sentences above that which a file may have: enough for the few that are meant.
LONG_MAX = 3
_RULES = [(re.compile(pattern, re.IGNORECASE), say) for pattern, say in RULES.items()]
_CODE = re.compile(r"``.*?``|`[^`]*`")
_TARGET = re.compile(r"\]\([^)]*\)|https?://\S+")
_END = re.compile(r"(?<=[.?!])[)\"*_]*\s+(?=[\"(*_`A-Z0-9])|(?<=:)\s+(?=[A-Z0-9])")


def documents() -> list[Path]:
    """The files that are checked."""
    names = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").glob("*.md"))]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without code and targets of links; of a changelog its newest section alone."""
    code, sections = False, 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        sections += line.startswith("## ")
        if path.name == "CHANGELOG.md" and sections > 1:
            return
        fence = line.lstrip().startswith("```")
        code ^= fence
        if fence or code or line.startswith(("    ", ":::")):
            yield number, ""
        else:
            # A name in code counts as one word.
            yield number, _TARGET.sub("]", _CODE.sub("CODE", line))


def sentences(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Sentences of paragraphs and list items, with the line that each begins in; tables have none."""
    gathered: list[tuple[int, str]] = []

    def ended() -> Iterator[tuple[int, str]]:
        text, starts = "", []
        for number, line in gathered:
            starts.append((len(text), number))
            text += line.strip() + " "
        begin = 0
        for end in [*(match.end() for match in _END.finditer(text)), len(text)]:
            if text[begin:end].strip():
                yield max(number for at, number in starts if at <= begin), text[begin:end].strip()
            begin = end
        gathered.clear()

    for number, line in lines:
        if not line.strip() or line.lstrip().startswith(("|", "#")):
            yield from ended()
        else:
            if re.match(r"\s*(?:[-*]|\d+\.) ", line):
                yield from ended()
            gathered.append((number, line))
    yield from ended()


def complaints(path: Path) -> Iterator[tuple[int, str]]:
    """Each as (line, what is wrong)."""
    for number, line in prose(path):
        for rule, say in _RULES:
            for found in rule.finditer(line):
                yield number, f'"{found[0].strip()}": say {say}'
    long = [
        (number, text) for number, text in sentences(prose(path)) if len(re.findall(r"\w[\w'.,/-]*", text)) > WORDS_MAX
    ]
    if len(long) > LONG_MAX:
        for number, text in long:
            yield number, f"more than {WORDS_MAX} words, and {len(long)} such sentences in this file: {text[:60]}..."


def shown(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a module that somebody may read, with their lines: messages, help, the log, tables; no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Docstrings, and those of attributes, are expressions by themselves; parts of an f-string belong to it.
    other = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    other |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in other:
            continue
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
        # Fewer words are a name.
        if len(re.findall(r"[a-z]{2,}", text)) >= 3:
            yield node.lineno, _CODE.sub("CODE", text)


def complaints_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """Each as (line, what is wrong)."""
    for number, text in shown(path):
        for rule, say in _RULES:
            for found in rule.finditer(text):
                yield number, f'"{found[0].strip()}" in "{text[:40]}...": say {say}'


def main() -> int:
    """Print all complaints."""
    failed = False
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, wrong in complaints_of_code(path):
            failed = True
            print(f"{path.relative_to(ROOT)}:{number}: {wrong}")
    for path in documents():
        for number, wrong in complaints(path):
            failed = True
            print(f"{path.relative_to(ROOT)}:{number}: {wrong}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
