"""Checks the pages that make_site.py made: `python docs/check_site.py` prints all faults.

Exits with 1 if it found a fault.

Faults are missing pages, raw markup, headings that differ from the source, links to missing files and anchors of the
site or to missing files of the repository, missing pictures, pictures without alternative text, pictures that are too
wide, and files that a page fetches from other hosts.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "target/site"
REPOSITORY = "https://github.com/memascend/memascend/blob/main/"
# In pixels. A phone shows a drawing of this width at three quarters of its size, so that letters of 14 pixels have 11
# pixels there.
WIDEST_DRAWING = 480

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
# These patterns match Markdown that was not rendered: `_RAW` outside of code, `_FENCE` inside code.
_RAW = re.compile(r"```|~~~|`|\]\(|\*\*|^\||^#+ |^[-*+] |^:::|\{[:#.]", re.MULTILINE)
_FENCE = re.compile(r"^ *(```|~~~)", re.MULTILINE)


class Page(HTMLParser):
    """The anchors, links, pictures and fetched files of a page, and the headings, code and prose of its article."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.pictures: list[dict[str, str]] = []
        # The headings that come from Markdown, without the headings that the API reference adds.
        self.headings: list[str] = []
        self.code = ""
        self.prose = ""
        self._open: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects the anchors, links, pictures and fetched files of a tag; begins headings and lines of text."""
        answer = {name: value or "" for name, value in attrs}
        self.anchors.update(answer[name] for name in ("id", "name") if name in answer)
        if tag == "a" and "href" in answer:
            self.links.append(answer["href"])
        elif tag == "img":
            self.pictures.append(answer)
        elif tag in ("script", "iframe", "link"):
            self.fetched.extend(answer[name] for name in ("src", "href") if name in answer)
        if answer.get("data-md-component") == "source":
            self.fetched.append("https://api.github.com")
        if tag in _HEADINGS and "doc-heading" not in answer.get("class", "") and self._inside("article"):
            self.headings.append("")
        if tag in ("p", "li", "td", "th", "div", *_HEADINGS):
            self.prose += "\n"
        if tag == "pre":
            self.code += "\n"
        if tag not in _VOID:
            self._open.append((tag, answer.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        """Closes the tag. Also closes inner tags that have no end tag."""
        if self._inside(tag):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Adds `data` to the code or the prose of the article, and to the last heading if `data` is part of it.

        Ignores scripts, styles, and data outside the article.
        """
        if not self._inside("article") or self._inside("script", "style"):
            return
        classes = [name for _, name in self._open]
        if (
            self.headings
            and self._inside(*_HEADINGS)
            and not any("headerlink" in name or "doc-heading" in name for name in classes)
        ):
            self.headings[-1] += data
        if self._inside("code", "pre"):
            self.code += data
        else:
            self.prose += data

    def _inside(self, *tags: str) -> bool:
        return any(tag in tags for tag, _ in self._open)


def headings(markdown: str) -> list[str]:
    """Returns the headings of a Markdown page, without their markup. Ignores fenced code."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2`*$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").replace("*", "") for title in titles]


def faults_of_text(page: Page, source: Path) -> list[str]:
    """Returns faults: raw markup, and the first heading that differs from the Markdown source."""
    found = [f"shows raw markup: {text!r}" for text in sorted({match[0] for match in _RAW.finditer(page.prose)})]
    found += [f"shows a raw fence: {text!r}" for text in sorted(set(_FENCE.findall(page.code)))]
    shown = [" ".join(title.split()) for title in page.headings]
    for written, seen in zip_longest(headings(source.read_text(encoding="utf-8")), shown):
        if written != seen:
            found.append(f"has the heading {seen!r} where {source.name} has {written!r}")
            break
    return found


def faults_of_links(page: Page, pages: dict[Path, Page]) -> list[str]:
    """Returns faults: links to files that do not exist on the site or in the repository.

    Links to anchors that a page of the site does not have are faults, too. Does not check other links.
    """
    found = []
    for link in page.links:
        where = urlsplit(link)
        if link.startswith(REPOSITORY):
            target = ROOT / unquote(where.path).removeprefix(urlsplit(REPOSITORY).path)
        elif where.scheme:
            continue
        else:
            target = _target(page, where.path)
        if not target.exists():
            found.append(f"links to {link}, which does not exist")
        elif where.fragment and target in pages and unquote(where.fragment) not in pages[target].anchors:
            found.append(f"links to {link}, but the page does not have this anchor")
    return found


def faults_of_pictures(page: Page) -> list[str]:
    """Returns faults: pictures that have no alternative text, have a size in the page, or are missing.

    An SVG picture that is wider than `WIDEST_DRAWING` is a fault, too.
    """
    found = []
    for picture in page.pictures:
        name = picture.get("src", "")
        path = _target(page, urlsplit(name).path)
        if not picture.get("alt"):
            found.append(f"shows {name} without alternative text")
        if {"width", "height", "style"} & picture.keys():
            found.append(f"sets a size for {name}, so the picture may be wider than its column")
        if not path.is_file():
            found.append(f"shows {name}, which is not a file of the site")
        elif path.suffix == ".svg" and int(re.search(r'\bwidth="(\d+)"', path.read_text())[1]) > WIDEST_DRAWING:  # type: ignore[index]
            found.append(f"shows {name}, which is so wide that its letters are too small on a phone")
    return found


def faults_of_styles() -> list[str]:
    """Returns faults: no rule limits pictures to their column, or a rule of site.css sets the width of pictures."""
    sheets = {path: path.read_text(encoding="utf-8") for path in SITE.rglob("*.css")}
    found = []
    if not any(re.search(r"\.md-typeset img\b[^{}]*\{[^}]*max-width:100%", sheet) for sheet in sheets.values()):
        found.append("no style rule limits the width of pictures to their column")
    own = re.sub(r"/\*.*?\*/", "", sheets[SITE / "site.css"], flags=re.DOTALL)
    found += [
        f"site.css gives {rule.strip()} a width"
        for rule, style in re.findall(r"([^{}]*\bimg\b[^{}]*)\{([^}]*)", own)
        if "width" in style
    ]
    return found


def check() -> list[str]:
    """Returns every fault of the site. A fault of a page begins with the path of the page."""
    pages = {path: Page(path) for path in sorted(SITE.rglob("*.html"))}
    found = faults_of_styles()
    for path, page in pages.items():
        faults = faults_of_links(page, pages) + faults_of_pictures(page)
        faults += [
            f"fetches {link} from another host"
            for link in page.fetched
            if urlsplit(link).netloc and "canonical" not in link
        ]
        found += [f"{path.relative_to(SITE)} {fault}" for fault in faults]
    for source in sorted(DOCS.glob("*.md")):
        made = SITE / "index.html" if source.stem == "index" else SITE / source.stem / "index.html"
        if made in pages:
            found += [f"{made.relative_to(SITE)} {fault}" for fault in faults_of_text(pages[made], source)]
        else:
            found.append(f"the site has no page for {source.name}")
    return found


def _target(page: Page, place: str) -> Path:
    """Returns the file of the site to which a link in `page` leads."""
    if not place:
        return page.path
    target = SITE / unquote(place[1:]) if place.startswith("/") else page.path.parent / unquote(place)
    target = target.resolve()
    return target / "index.html" if target.is_dir() else target


if __name__ == "__main__":
    faults = check()
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(bool(faults))
