"""Lists the messages of all errors that the package raises: `python docs/messages.py` writes them into refused.md.

Names and numbers that a message fills in are "...". Messages that are put together from parts elsewhere are not listed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/refused.md"
PLACES = ("python/memascend", "triton_kernels")
BEGIN = "<!-- made by `make refused`; what stands below is written anew -->"
# A text of Rust's, its lines joined by backslashes.
_TEXT = r'"((?:[^"\\]|\\.)*)"'
# The text of an error of Rust's, and the name of its variant.
_RUST = re.compile(rf"#\[error\(\s*{_TEXT}.*?\)\]\s*(\w+)", re.DOTALL)
# Errors whose texts are formatted where they are made, in closures too: wrong arguments, and calls that cannot be made.
_MADE = re.compile(rf"\b(?:Error|Self)::(Invalid|Usage)\(\s*(?:format!\(\s*)?{_TEXT}")
# What the extension raises by itself, likewise.
_ARGUMENT = re.compile(
    r'(?<!new_err\()(?:format!|refused|config_error)\((?:\s*py,)?\s*"((?:[^"\\(]|\\.)(?:[^"\\]|\\.)*)"'
)
_CALL = re.compile(rf"usage_error\(\s*[\w.()]+,\s*(?:{_TEXT}|([A-Z_]+)\))")
_NAMED = r"const {}: &str = " + _TEXT
# The exception of Python that a variant becomes (rust/py/src/errors.rs); all others are a ConfigError.
_PYTHON = {
    "BudgetError": ("RegionTooSmall",),
    "CorruptionError": ("Corrupt",),
    "MemascendError": ("Panicked",),
    "MemoryLimitError": ("OutOfMemory", "System", "Memory"),
    "StorageError": ("Broken", "Device", "Ended", "Refused", "Unfilled"),
    "TimeoutExpired": ("TimedOut",),
    "UsageError": ("Closed", "Forked", "Function", "Interrupted", "RegionTaken", "TooMany", "Usage"),
}


def messages() -> Iterator[tuple[Path, str, str]]:
    """Each as (file, error, message)."""
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    message = said(node.exc.args[0])
                    if message.strip(". "):
                        yield path.relative_to(ROOT), ast.unparse(node.exc.func), message


def said(node: ast.expr) -> str:
    """The words of an expression that makes a message."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return said(node.left) + said(node.right)
    return "..."


def messages_of_rust() -> Iterator[tuple[Path, str, str]]:
    """Those of the crates, likewise."""
    exceptions = {variant: error for error, variants in _PYTHON.items() for variant in variants}
    for path in sorted((ROOT / "rust").glob("*/src/*.rs")):
        # Tests of a file stand at its end.
        code = path.read_text(encoding="utf-8").partition("#[cfg(test)]")[0]
        found = _RUST.findall(code) + [(text, variant) for variant, text in _MADE.findall(code)]
        for text, constant in _CALL.findall(code):
            named = re.search(_NAMED.format(constant), code) if constant else None
            found.append((named[1] if named else text, "Usage"))
        if path.is_relative_to(ROOT / "rust/py"):
            found += [(text, "Invalid") for text in _ARGUMENT.findall(code) if not re.match(r"\w+\(", text)]
        for text, variant in found:
            joined = re.sub(r"\\\n\s*", "", text).replace('\\"', '"')
            yield path.relative_to(ROOT), exceptions.get(variant, "ConfigError"), re.sub(r"\{[^}]*\}+", "...", joined)


def section() -> str:
    """The part of the page that is made from the code: a table for each package and crate."""
    ours = {node.name for node in ast.parse((ROOT / "python/memascend/errors.py").read_text()).body
            if isinstance(node, ast.ClassDef)}  # fmt: skip
    tables: dict[str, list[str]] = {}
    for path, error, message in [*messages(), *messages_of_rust()]:
        words = re.sub(r"\.{4,}", "...", " ".join(message.split())).replace("`", "'").replace("|", "/")
        if (error in ours or path.suffix == ".rs") and len(re.findall(r"[a-z]+", words)) > 2:
            package = "/".join(path.with_suffix("").parts[: 2 if path.suffix == ".rs" else 3])
            row = f"| `{error}` | `{words}` |"
            rows = tables.setdefault(package, [])
            if row not in rows:
                rows.append(row)
    return "\n\n".join(
        f"### {name}\n\n| error | message |\n|---|---|\n" + "\n".join(rows) for name, rows in tables.items()
    )


def main() -> None:
    """Write them."""
    kept, _, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{kept}{BEGIN}\n\n{section()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
