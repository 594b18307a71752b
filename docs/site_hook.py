"""Makes a site of the documents: links out of their folder lead to the repository, pictures open, names break well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
# Pictures of benchmarks, and other links of a page that leave the folder of the documents.
_PICTURE = re.compile(r"(!\[[^\]]*\]\()\.\./benchmarks/results/([\w-]+\.png)\)")
_OUTSIDE = re.compile(r"(\]\()\.\./([^)#]+)")
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_CODE = re.compile(r"<code\b.*?</code>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<]+")
_OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")
_JOINT = re.compile(r"(?<=[\w)\]])[._=,/(]+(?=[A-Za-z&{])")


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Called by mkdocs with the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.glob("*.png")):
        files.append(File(path.name, str(RESULTS), config["site_dir"], use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    # A phone's column is too narrow for several panels.
    return _OUTSIDE.sub(rf"\1{config['repo_url']}/blob/main/\2", _PICTURE.sub(r"[\1\2)](\2)", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs for each page: an option stays on one line, and a name of a table may break at its joints."""
    html = _in_code(_OPTION, r'<span class="option">\g<0></span>', html)
    return _CELL.sub(lambda cell: _in_code(_JOINT, r"\g<0><wbr>", cell[0]), html)


def on_post_page(output: str, **_: Any) -> str:
    """Called by mkdocs for each page: the theme would ask GitHub for the repository's stars."""
    return output.replace('data-md-component="source"', "")


# And for the page of what is not found.
on_post_template = on_post_page


def _in_code(pattern: re.Pattern[str], put: str, html: str) -> str:
    """`html` with the pattern replaced in the texts of its code."""
    return _CODE.sub(lambda code: _TEXT.sub(lambda text: pattern.sub(put, text[0]), code[0]), html)
