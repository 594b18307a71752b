"""Makes the documentation site with Zensical: `python docs/make_site.py` writes target/site.

`copy_pages()` copies pages, pictures and llms.txt. In the copied pages, it replaces links to files outside docs/ with
links to the repository. Zensical converts the pages to HTML. `finish()` sets where a browser may break code into lines,
and removes the attribute that makes a page request data from GitHub.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks/results"
PAGES, SITE = ROOT / "target/pages", ROOT / "target/site"
REPOSITORY = "https://github.com/memascend/memascend/blob/main/"
# `_PICTURE` matches pictures of benchmark results. `_OUTSIDE` matches all other links of a page to files outside docs/.
_PICTURE = re.compile(r"(!\[[^\]]*\]\()\.\./benchmarks/results/([\w-]+\.png)\)")
_OUTSIDE = re.compile(r"(\]\()\.\./([^)#]+)")
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_CODE = re.compile(r"<code\b.*?</code>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<]+")
_OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")
_JOINT = re.compile(r"(?<=[\w)\]])[._=,/(]+(?=[A-Za-z&{])")


def copy_pages() -> None:
    """Copies pages, drawings, pictures, the style sheet and llms.txt to target/pages, where Zensical reads them.

    First deletes target/pages and target/site.
    """
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for page in DOCS.glob("*.md"):
        # Link each picture of results to its file, because a phone's column is too narrow for a picture with several
        # panels.
        text = _PICTURE.sub(r"[\1\2)](\2)", page.read_text(encoding="utf-8"))
        (PAGES / page.name).write_text(_OUTSIDE.sub(rf"\1{REPOSITORY}\2", text), encoding="utf-8")
    for path in (DOCS / "site.css", ROOT / "llms.txt", *RESULTS.glob("*.png")):
        shutil.copy(path, PAGES)
    shutil.copytree(DOCS / "drawings", PAGES / "drawings", ignore=shutil.ignore_patterns("*.py", "__pycache__"))


def finish(html: str) -> str:
    """Prevents line breaks in options, allows line breaks in code in tables, and prevents a request to GitHub.

    A page requests data from GitHub if an element has the attribute that this function removes.
    """
    html = _in_code(_OPTION, r'<span class="option">\g<0></span>', html)
    html = _CELL.sub(lambda cell: _in_code(_JOINT, r"\g<0><wbr>", cell[0]), html)
    return html.replace('data-md-component="source"', "")


def _in_code(pattern: re.Pattern[str], put: str, html: str) -> str:
    """Replaces matches of `pattern` with `put` in the text of `<code>` elements."""
    return _CODE.sub(lambda code: _TEXT.sub(lambda text: pattern.sub(put, text[0]), code[0]), html)


if __name__ == "__main__":
    copy_pages()
    # `--clean` deletes the cache of an earlier build, because the cache may have older docstrings.
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if subprocess.run(build, cwd=ROOT, check=False).returncode:
        sys.exit(1)
    for made in SITE.rglob("*.html"):
        made.write_text(finish(made.read_text(encoding="utf-8")), encoding="utf-8")
