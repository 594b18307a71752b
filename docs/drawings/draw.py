"""Draws the pictures of how-it-works.md: `python docs/drawings/draw.py` writes the SVG files into docs/drawings."""

from __future__ import annotations

from pathlib import Path

INK, PAPER = "#24292f", "#ffffff"
# The colours of boxes. `STORAGE`, `HOST` and `DEVICE` are the places of state. In `commit`, `NEW` marks valid slots,
# and `OLD` marks the other slots. In `step`, `NEW` marks updates, and `OLD` marks the root.
STORAGE, HOST, DEVICE, OLD, NEW = "#dbe9f6", "#e6f4e6", "#fdeeda", "#d0d7de", "#7fb77f"
FONT = 'font-family="sans-serif" font-size="14"'
# In pixels. This is only a little wider than the column of a phone, so that letters are legible on a phone.
WIDTH = 440


class Drawing:
    """A drawing of boxes, words and arrows on a white background."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}"'
        tip = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f'<defs><marker id="tip" {tip}><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, colour: str, words: str = "") -> None:
        """Draws a box with words in its middle."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" stroke="{INK}"/>'
        )
        lines = words.split("\n")
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.words(x + width / 2, first + 18 * number, line, middle=True)

    def words(self, x: float, y: float, text: str, *, middle: bool = False, bold: bool = False) -> None:
        """Draws a line of text."""
        anchor = ' text-anchor="middle"' if middle else ""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" fill="{INK}" {FONT}{anchor}{weight}>{text}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        """Draws a line with a tip at its end."""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def save(self, path: Path) -> None:
        """Writes the SVG file."""
        path.write_text("\n".join([*self._parts, "</svg>"]) + "\n", encoding="utf-8")


def places() -> Drawing:
    """Draws the state on storage, in host memory and on the device."""
    made = Drawing(WIDTH, 476, "Where state lies: on storage, in host memory, on the device")
    left, middle, right = (16 + 138 * column for column in range(3))
    bands = (
        ("Storage (SSD)", STORAGE, 6, ("values of\nall units", "master weights\nand moments,\ntwice")),
        (
            "Host memory: the budget",
            HOST,
            174,
            ("a CPU's units,\na GPU's on\ntheir way", "chunks through\nwhich the\nupdate streams"),
        ),
        ("What computes", DEVICE, 342, ("two units,\nor more", "one unit's\ngradients")),
    )
    for title, colour, y, (first, second) in bands:
        made.box(6, y, WIDTH - 12, 128, colour)
        # Put the title where no arrow crosses it.
        made.words(342, y + 21, title, middle=True, bold=True)
        made.box(left, y + 34, 128, 82, PAPER, first)
        made.box(middle, y + 34, 128, 82, PAPER, second)
    made.box(right, 40, 128, 82, PAPER, "gradients\nthat wait\n(clipping)")
    made.box(right, 208, 128, 36, PAPER, "the RAM tier")
    made.box(right, 254, 128, 36, PAPER, "index, checksums")
    made.box(right, 376, 128, 82, PAPER, "activations,\nlogits\n(torch's own)")
    made.arrow(left + 40, 122, left + 40, 206)
    made.words(left + 48, 158, "read")
    made.arrow(middle + 30, 122, middle + 30, 206)
    made.words(middle + 38, 158, "read")
    made.arrow(middle + 84, 208, middle + 84, 124)
    made.words(middle + 92, 158, "written")
    made.arrow(left + 40, 290, left + 40, 374)
    made.words(left + 48, 326, "copied")
    made.arrow(middle + 56, 376, middle + 56, 292)
    made.words(middle + 64, 326, "used")
    return made


def step() -> Drawing:
    """Draws the parts of one step from left to right in time."""
    made = Drawing(WIDTH, 398, "One step in time: forward, backward with updates beside it, commit")
    for y, words in ((55, "model"), (99, "reads"), (227, "model"), (271, "reads"), (315, "updates")):
        made.words(8, y, words)
    made.words(250, 20, "forward", middle=True, bold=True)
    made.words(250, 192, "backward", middle=True, bold=True)
    for at in range(4):
        made.box(140 + 72 * at, 32, 66, 36, DEVICE, f"unit {at + 1}")
        made.box(68 + 72 * at, 76, 66, 36, STORAGE, f"unit {at + 1}")
        made.box(68 + 70 * at, 204, 64, 36, DEVICE, f"unit {4 - at}")
        made.box(138 + 61 * at, 292, 56, 36, NEW, f"unit {4 - at}")
    for at in range(2):
        made.box(138 + 70 * at, 248, 52, 36, STORAGE, f"unit {2 - at}")
    made.box(382, 292, 48, 36, OLD, "root")
    made.arrow(68, 126, 430, 126)
    made.words(250, 148, "a unit is read while the one before computes", middle=True)
    made.arrow(68, 342, 430, 342)
    made.words(250, 364, "updates run beside it, into the other slot;", middle=True)
    made.words(250, 384, "step() writes the root", middle=True)
    return made


def commit() -> Drawing:
    """Draws the two slots of each extent, and the root: after step 7, with step 8 staged, and after its commit."""
    made = Drawing(WIDTH, 230, "Two slots for each extent; the root says which one is valid")
    for column, (title, below, first, second, valid) in enumerate(
        (
            ("after step 7", "", "step 7", "step 6", "left"),
            ("staged:", "step 8 is written", "step 7", "step 8", "left"),
            ("committed:", "step 8", "step 7", "step 8", "right"),
        )
    ):
        x = 8 + 146 * column
        made.words(x + 66, 20, title, middle=True, bold=True)
        made.words(x + 66, 40, below, middle=True, bold=True)
        for row in range(3):
            y = 54 + 36 * row
            made.box(x, y, 63, 30, NEW if first == "step 7" and valid == "left" else OLD, first)
            made.box(x + 69, y, 63, 30, NEW if valid == "right" else OLD, second)
        made.box(x + 36, 188, 60, 32, STORAGE, "root")
        made.arrow(x + (56 if valid == "left" else 76), 188, x + (36 if valid == "left" else 96), 158)
    return made


def main() -> None:
    """Writes all drawings."""
    folder = Path(__file__).parent
    for drawing in (places, step, commit):
        drawing().save(folder / f"{drawing.__name__}.svg")


if __name__ == "__main__":
    main()
