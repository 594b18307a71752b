"""Records a run of `memascend train` that is killed and resumed, and draws it as docs/drawings/terminal.svg.

Run `python docs/drawings/terminal.py`. The script trains the model of examples/small_model.py in a shell on a
pseudo-terminal, kills the training with SIGKILL in the middle of a step, and types the same command again. The drawing
is an animation of the terminal's lines, without the lines that `_shown()` leaves out. The pause before a line is as
long as in the recording, but at least `SHORTEST` and at most `LONGEST` seconds. The script needs the packages of
`memascend train`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS, LOGGED = 12, 3
SETTINGS = f"""\
model: small/model
data: small/data/messages.jsonl
output: tuned
storage: tune.store
host_memory: 64MiB
max_steps: {STEPS}
logging_steps: {LOGGED}
disable_tqdm: true
"""
COMMAND = "memascend train --config tune.yaml"
# record() kills the training in the step after `KILLED_AFTER`: when the log line of step `KILLED_AFTER` appears,
# record() waits for the fraction `KILLED_AT` of the step time in that line.
KILLED_AFTER, KILLED_AT = 6, 0.5
TITLE = f"memascend train is killed by kill -9 within step {KILLED_AFTER + 1}; the same command resumes at that step"
# The beginning of the line with the totals. The drawing leaves this line out.
TOTALS = f"memascend: {STEPS - KILLED_AFTER} steps in "

PROMPT = "$ "
# In seconds. `Shell.wait()` checks this limit each time the terminal shows new output.
PATIENCE = 600.0
# The rows of memascend's header that the drawing shows, after the first start and after the second start.
ROWS = (("model", "RAM"), ("steps",))

# In pixels. The width is `check_site.WIDEST_DRAWING`. A phone shows a drawing of this width at three quarters of its
# size.
WIDTH, MARGIN, BAR, LINE, SIZE = 480, 12, 28, 18, 14
# The largest number of characters in a line.
COLUMNS = 54
# The smallest and the largest number of seconds between two lines of the drawing.
SHORTEST, LONGEST = 0.12, 1.0
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
GROUND, EDGE, INK, QUIET = "#161b22", "#57606a", "#e6edf3", "#9da7b3"
COLOURS = {"$": "#7ee787", "Killed": "#ff7b72", "memascend:": "#79c0ff", "the training": "#7ee787"}

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Shell:
    """A shell on a pseudo-terminal. `lines` has the time and the text of each line that the terminal showed."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[tuple[float, str]] = []
        self._rest = ""
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            # Set OMP_NUM_THREADS to 1, because several threads would wait for each other on a busy machine.
            answer = {**os.environ, "PATH": path, "PS1": PROMPT, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "--noediting", "-i"], answer)  # noqa: S606
        # Set 500 columns, so that only draw() breaks lines.
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))
        self.wait()

    def type(self, command: str) -> None:
        """Types a command, and presses Enter."""
        os.write(self._terminal, f"{command}\n".encode())

    def wait(self, text: str | None = None) -> str:
        """Reads until a line contains `text`, and returns this line.

        Without `text`, reads until the next prompt, and returns "".
        """
        seen, until = len(self.lines), time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self._rest += os.read(self._terminal, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
            *whole, self._rest = self._rest.split("\n")
            now = time.monotonic()
            self.lines += [(now, _ESCAPES.sub("", line).rsplit("\r", 1)[-1]) for line in whole]
            found = next((line for _, line in self.lines[seen:] if text is not None and text in line), None)
            if found is not None or (text is None and self._rest.endswith(PROMPT)):
                return found or ""
        raise TimeoutError(f"the terminal did not show {text or PROMPT!r}:\n{self._rest}")

    def kill_its_program(self) -> None:
        """Sends SIGKILL to the program that the shell runs."""
        (child,) = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)

    def close(self) -> None:
        """Closes the terminal, which ends the shell and its program."""
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


def record(folder: Path) -> list[tuple[float, str]]:
    """Starts, kills and resumes a training run. Returns the lines that the terminal showed."""
    made = [sys.executable, str(ROOT / "examples/small_model.py"), "small"]
    subprocess.run(made, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (folder / "tune.yaml").write_text(SETTINGS)
    shell = Shell(folder)
    try:
        shell.type("cat tune.yaml")
        shell.wait()
        shell.type(COMMAND)
        line = shell.wait(f"memascend: step {KILLED_AFTER} of {STEPS}: ")
        value, unit = re.search(r": ([\d.]+) (ms|s) a step", line).groups()  # type: ignore[union-attr]
        time.sleep(KILLED_AT * float(value) * {"ms": 1e-3, "s": 1}[unit])
        shell.kill_its_program()
        shell.wait()
        shell.type(COMMAND)
        shell.wait(f"memascend: resuming at step {KILLED_AFTER + 1} of {STEPS}")
        shell.wait()
    finally:
        shell.close()
    return shell.lines


def _shown(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Returns the lines to draw: commands, the settings file, the shell's "Killed", and lines that memascend printed.

    Drops memascend's line with the totals, header rows that are not in `ROWS`, and the lines of other libraries.
    """
    kept, start = [], -1
    settings = SETTINGS.splitlines()
    for second, line in lines:
        start += line.startswith("memascend: ") and ("new run" in line or "resuming" in line)
        is_row = line.startswith("  ") and line.split(maxsplit=1)[0] in ROWS[max(start, 0)]
        is_own = line.startswith(("memascend: ", "the training is done")) and not line.startswith(TOTALS)
        if is_row or is_own or line in settings or line.startswith((PROMPT, "Killed")):
            kept.append((second, line))
    return kept


def draw(lines: list[tuple[float, str]]) -> str:
    """Returns an SVG in which the lines appear one after the other. A viewer without animation shows all lines."""
    rows, at, before = [], 0.0, lines[0][0]
    for second, line in lines:
        at += min(max(second - before, SHORTEST), LONGEST)
        before = second
        # textwrap.wrap() indents each continuation of a line. In a row of memascend's header, the continuation begins
        # in the column of the row's words.
        hanging = " " * (12 if line.startswith("  ") else 2)
        # Keep a value and its unit on one line.
        joined = re.sub(r"(?<=\d) (?=[A-Za-z])", "\u00a0", line)
        broken = textwrap.wrap(joined, COLUMNS, subsequent_indent=hanging)
        rows += [(at, row.replace("\u00a0", " "), line) for row in broken]
    height = BAR + LINE * len(rows) + MARGIN
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{TITLE}">',
        f"<title>{TITLE}</title>",
        "<style>",
        f"text {{ font: {SIZE}px {FONT}; white-space: pre }}",
        "@keyframes appear { from { opacity: 0 } }",
        "@media (prefers-reduced-motion: no-preference) { text { animation: appear 0.1s backwards } }",
        "</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{GROUND}" stroke="{EDGE}"/>',
        *(f'<circle cx="{MARGIN + 6 + 18 * n}" cy="16" r="5" fill="{EDGE}"/>' for n in range(3)),
    ]
    for number, (second, row, line) in enumerate(rows):
        start = next((start for start in COLOURS if row.startswith(start)), "")
        bright = start if start == "memascend:" else row if start else ""
        words = f'<tspan fill="{COLOURS.get(start)}">{escape(bright)}</tspan>' if bright else ""
        words += escape(row[len(bright) :])
        ink = QUIET if line.startswith("  ") else INK
        place = f'x="{MARGIN}" y="{BAR + LINE * number + SIZE}" xml:space="preserve"'
        parts.append(f'<text {place} fill="{ink}" style="animation-delay:{second:.2f}s">{words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Records a run, and draws it."""
    with tempfile.TemporaryDirectory() as folder:
        lines = record(Path(folder))
    Path(__file__).with_suffix(".svg").write_text(draw(_shown(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
