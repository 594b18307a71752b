"""Lists the messages of all errors that the package raises, by the file that raises them: `python docs/messages.py`."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("python/memascend", "triton_kernels")


def messages() -> Iterator[tuple[Path, str, str]]:
    """Each as (file, error, message), with "..." for what is filled in."""
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


def main() -> None:
    """Print them."""
    file = None
    for path, error, message in messages():
        if path != file:
            print(f"\n{path}")
            file = path
        print(f"  {error}: {message}")


if __name__ == "__main__":
    main()
