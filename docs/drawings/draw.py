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
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'aria-label="{title}">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
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
    made = Drawing(860, 290, "Where things are: on storage, in host memory, on the device")
    made.box(10, 10, 270, 270, STORAGE, "Storage (SSD)", top=True)
    for at, words in enumerate(("values of all units", "masters and moments, twice", "gradients that wait (ssd)")):
        made.box(30, 50 + 74 * at, 230, 54, PAPER, words)
    made.box(350, 10, 240, 270, HOST, "Host memory: the budget", top=True)
    for at, words in enumerate(("chunks: state on its way\nthrough the update", "held entries, as many\nas there is room for",
                                "index and checksums")):  # fmt: skip
        made.box(370, 50 + 74 * at, 200, 54, PAPER, words)
    made.box(660, 10, 190, 270, DEVICE, "What computes", top=True)
    for at, words in enumerate(("two units, or more", "one unit's gradients", "activations, logits\n(torch's own)")):
        made.box(676, 50 + 74 * at, 158, 54, PAPER, words)
    made.arrow(262, 70, 672, 70)
    made.words(284, 64, "values")
    made.arrow(262, 145, 366, 100)
    made.arrow(368, 112, 264, 160)
    made.words(284, 178, "state")
    made.arrow(674, 150, 574, 96)
    made.words(594, 168, "gradients")
    return made


def step() -> Drawing:
    """One step along time."""
    made = Drawing(860, 236, "One step in time: forward, backward with updates beside it, commit")
    made.words(10, 45, "model")
    made.words(10, 105, "reads")
    made.words(10, 165, "update")
    for at in range(4):
        made.box(110 + 62 * at, 22, 56, 36, DEVICE, f"f{at + 1}")
        made.box(80 + 62 * at, 82, 56, 36, STORAGE, f"{at + 1}")
    for at in range(4):
        made.box(364 + 88 * at, 22, 82, 36, DEVICE, f"b{4 - at}")
        made.box(454 + 84 * at, 142, 78, 36, NEW, f"u{4 - at}")
    for at in range(2):
        made.box(520 + 88 * at, 82, 56, 36, STORAGE, f"{2 - at}")
    made.box(794, 142, 56, 36, OLD, "root")
    made.arrow(80, 208, 850, 208)
    made.words(110, 228, "forward: a unit is read while the one before computes")
    made.words(470, 228, "backward: updates run beside it; step() writes the root")
    return made


def commit() -> Drawing:
    """Two slots for each piece."""
    made = Drawing(860, 210, "Two slots for each piece of state; the root says which one is valid")
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
