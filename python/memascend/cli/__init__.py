"""The command line: one module for each command, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from memascend.errors import MemascendError
from memascend.paths import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["main"]

# Each command is a module with add_arguments(parser) and run(options) -> exit status.
_COMMANDS = {
    "doctor": "Say what this machine offers and what to do about what it lacks.",
    "demo": "Train a model in memory and offloaded, side by side, in a minute or two, and compare every bit.",
    "train": "Fine-tune the model of a folder on rows of a file; killed at any moment, the same command goes on.",
    "plan": "Say what offloading a model would take: memory, storage, bytes of a step. The model need not be there.",
    "bench": "Measure, and print the ratio to what else there is, from the same run.",
    "store": "Look at a store, or check every byte of it.",
}


class _Version(argparse.Action):
    """Looks the version up only where it is asked for, which takes as long as all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('memascend')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: fine; 1: a named problem; 2: wrong usage; 130: ended by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="memascend", description="Fine-tune every parameter of a model that does not fit in memory."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if arguments is None else arguments
    called = next((word for word in given if not word.startswith("-")), None)
    for name, summary in _COMMANDS.items():
        command_parser = commands.add_parser(name, help=summary, description=summary)
        if name == called:
            command = importlib.import_module(f"memascend.cli.{name}")
            command.add_arguments(command_parser)
            command_parser.set_defaults(run=command.run)
    options = parser.parse_args([_at_home(word) for word in given])
    try:
        return int(options.run(options))
    except MemascendError as error:
        print(f"memascend {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has seen enough; what is still buffered has nowhere to go.
        sys.stdout = None
        return 0
    except OSError as error:
        # A file that was named cannot be read or written: the system says which and why.
        print(f"memascend {options.command}: {error}", file=sys.stderr)
        return 1


def _at_home(word: str) -> str:
    """An argument as a shell would give it: "--storage=~/run" has a "~" that no shell replaces."""
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={expanded(value)}"
    return expanded(word)
