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
# The text of an error of Rust's, and the name that it has there.
_RUST = re.compile(r'#\[error\(\s*"((?:[^"\\]|\\.)*)".*?\)\]\s*(\w+)', re.DOTALL)
# What the extension raises by itself: wrong arguments, whose texts are formatted there, and calls that cannot be made.
_ARGUMENT = re.compile(
    r'(?<!new_err\()(?:format!|refused|config_error)\((?:\s*py,)?\s*"((?:[^"\\(]|\\.)(?:[^"\\]|\\.)*)"'
)
_CALL = re.compile(r'usage_error\(\s*py,\s*"((?:[^"\\]|\\.)*)"')


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
    for path in sorted((ROOT / "rust").glob("*/src/*.rs")):
        code = path.read_text(encoding="utf-8")
        raised = [(text, "UsageError") for text in _CALL.findall(code)]
        if path.is_relative_to(ROOT / "rust/py"):
            raised += [(text, "ConfigError") for text in _ARGUMENT.findall(code) if not re.match(r"\w+\(", text)]
        for text, name in [*_RUST.findall(code), *raised]:
            joined = re.sub(r"\\\n\s*", "", text).replace('\\"', '"')
            yield path.relative_to(ROOT), name, re.sub(r"\{[^}]*\}", "...", joined)


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
