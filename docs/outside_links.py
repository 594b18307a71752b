"""Leads links from the site to other files of the tree to the repository; pictures become part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
# Pictures of benchmarks, and other links of a page that leave the folder of the documents.
_PICTURE = re.compile(r"(!\[[^\]]*\]\()\.\./benchmarks/results/([\w-]+\.png)")
_OUTSIDE = re.compile(r"(\]\()\.\./([^)#]+)")


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Called by mkdocs with the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.glob("*.png")):
        files.append(File(path.name, str(RESULTS), config["site_dir"], use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return _OUTSIDE.sub(rf"\1{config['repo_url']}/blob/main/\2", _PICTURE.sub(r"\1\2", markdown))
