"""Draws the pictures of how-it-works.md: `python docs/drawings/draw.py` writes the SVG files beside it."""

from __future__ import annotations

from pathlib import Path

INK, PAPER = "#24292f", "#ffffff"
# One colour for one thing, in all drawings.
STORAGE, HOST, DEVICE, OLD, NEW = "#dbe9f6", "#e6f4e6", "#fdeeda", "#d0d7de", "#7fb77f"
FONT = 'font-family="sans-serif" font-size="14"'


class Drawing:
    """Boxes, words and arrows on a white ground."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}"'
        tip = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f'<defs><marker id="tip" {tip}><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, colour: str, words: str = "", *, top: bool = False) -> None:
        """A box with words in its middle, or at its top."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" stroke="{INK}"/>'
        )
        lines = words.split("\n")
        first = y + 20 if top else y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.words(x + width / 2, first + 18 * number, line, middle=True, bold=top and number == 0)

    def words(self, x: float, y: float, text: str, *, middle: bool = False, bold: bool = False) -> None:
        """A line of text."""
        anchor = ' text-anchor="middle"' if middle else ""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" fill="{INK}" {FONT}{anchor}{weight}>{text}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        """A line with a tip at its end."""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text("\n".join([*self._parts, "</svg>"]) + "\n", encoding="utf-8")


def places() -> Drawing:
    """What lies where."""
    made = Drawing(860, 300, "Where state lies: on storage, in host memory, on the device")
    made.box(10, 10, 250, 280, STORAGE, "Storage (SSD)", top=True)
    for at, words in enumerate(
        ("values of all units", "master weights and\nmoments, twice", "gradients that wait\n(clipping)")
    ):
        made.box(30, 46 + 80 * at, 210, 58, PAPER, words)
    made.box(340, 10, 240, 280, HOST, "Host memory: the budget", top=True)
    made.box(360, 46, 200, 58, PAPER, "a CPU's units,\na GPU's on their way")
    made.box(360, 126, 200, 58, PAPER, "chunks through which\nthe update streams")
    made.box(360, 206, 200, 30, PAPER, "the RAM tier")
    made.box(360, 246, 200, 30, PAPER, "index and checksums")
    made.box(650, 10, 200, 280, DEVICE, "What computes", top=True)
    for at, words in enumerate(("two units, or more", "one unit's gradients", "activations, logits\n(torch's own)")):
        made.box(666, 46 + 80 * at, 168, 58, PAPER, words)
    made.arrow(240, 75, 358, 75)
    made.arrow(560, 75, 664, 75)
    made.words(300, 68, "read", middle=True)
    made.words(615, 68, "copied", middle=True)
    made.arrow(240, 147, 358, 147)
    made.arrow(360, 165, 242, 165)
    made.words(300, 140, "read", middle=True)
    made.words(300, 182, "written", middle=True)
    made.arrow(666, 155, 562, 155)
    made.words(615, 148, "used", middle=True)
    return made


def step() -> Drawing:
    """One step along time."""
    made = Drawing(860, 266, "One step in time: forward, backward with updates beside it, commit")
    for y, words in ((45, "model"), (105, "reads"), (165, "updates")):
        made.words(10, y, words)
    for at in range(4):
        made.box(146 + 62 * at, 22, 56, 36, DEVICE, f"unit {at + 1}")
        made.box(84 + 62 * at, 82, 56, 36, STORAGE, f"unit {at + 1}")
    for at in range(4):
        made.box(400 + 88 * at, 22, 82, 36, DEVICE, f"unit {4 - at}")
        made.box(488 + 76 * at, 142, 70, 36, NEW, f"unit {4 - at}")
    for at in range(2):
        made.box(488 + 88 * at, 82, 56, 36, STORAGE, f"unit {2 - at}")
    made.box(796, 142, 54, 36, OLD, "root")
    made.arrow(84, 200, 850, 200)
    made.words(236, 222, "forward", middle=True, bold=True)
    made.words(236, 244, "a unit is read while the one before computes", middle=True)
    made.words(620, 222, "backward", middle=True, bold=True)
    made.words(620, 244, "updates run beside it, into the other slot;", middle=True)
    made.words(620, 262, "step() writes the root", middle=True)
    return made


def commit() -> Drawing:
    """Two slots for each extent."""
    made = Drawing(860, 210, "Two slots for each extent; the root says which one is valid")
    for column, (title, first, second, valid) in enumerate(
        (
            ("after step 7", "step 7", "step 6", "left"),
            ("staged: step 8 is written", "step 7", "step 8", "left"),
            ("committed: step 8", "step 7", "step 8", "right"),
        )
    ):
        x = 10 + 290 * column
        made.words(x + 130, 24, title, middle=True, bold=True)
        for row in range(3):
            y = 40 + 36 * row
            made.box(x, y, 125, 30, NEW if first == "step 7" and valid == "left" else OLD, first)
            made.box(x + 135, y, 125, 30, NEW if valid == "right" else OLD, second)
        made.box(x + 85, 168, 90, 32, STORAGE, "root")
        made.arrow(x + (110 if valid == "left" else 150), 168, x + (75 if valid == "left" else 190), 146)
    return made


def main() -> None:
    """Write all of them."""
    folder = Path(__file__).parent
    for drawing in (places, step, commit):
        drawing().save(folder / f"{drawing.__name__}.svg")


if __name__ == "__main__":
    main()
