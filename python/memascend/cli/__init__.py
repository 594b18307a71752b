"""The command line: one module for each command, loaded when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from memascend.errors import MemascendError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

# Each module has SUMMARY, add_arguments(parser) and run(options) -> exit status.
_COMMANDS = ("doctor", "demo", "bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: fine; 1: a named problem; 2: wrong usage."""
    parser = argparse.ArgumentParser(
        prog="memascend", description="Fine-tune every parameter of a model that does not fit in memory."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _COMMANDS:
        command = importlib.import_module(f"memascend.cli.{name}")
        command_parser = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(command_parser)
        command_parser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
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
