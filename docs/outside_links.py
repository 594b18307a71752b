"""Leads links from the site to files of the tree that are no pages of it to the repository."""

from __future__ import annotations

import re
from typing import Any

# Links of a page that leave the folder of the documents.
_OUTSIDE = re.compile(r"(\]\()\.\./([^)#]+)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return _OUTSIDE.sub(rf"\1{config['repo_url']}/blob/main/\2", markdown)
