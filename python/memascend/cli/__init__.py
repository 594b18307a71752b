"""Implements the command line. Each command is a module or folder, which is imported when the command is called.

Invariant: `--help` of every command works without torch, because commands import torch in functions. With `--json`, a
command prints one JSON value. `main()` documents the exit codes.

`train` trains a model. `plan` estimates a run. `store` and `doctor` inspect stores and machines, and never change a
store. `demo` compares training with and without offloading.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from typing import TYPE_CHECKING

from memascend.errors import MemascendError
from memascend.text import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

# Each command is a module with two functions: add_arguments(parser), and run(options), which returns the exit code. A
# module may also have the texts USAGE and HELP for its `--help`.
_COMMANDS = {
    "doctor": "Check this machine, and print what to do about each check that is slow or fails.",
    "demo": "Train a model in memory and offloaded, side by side, and compare every bit (one minute).",
    "train": "Fine-tune a Hugging Face model on your examples; after a kill the same command resumes.",
    "plan": "Estimate memory, seconds of a step, disk space and the drive's life; needs no weights and no GPU.",
    "store": "Show what a store holds, or verify every byte of it.",
}


# Matches arguments of `offload()` in error messages, with or without a value. Options of `train` or `plan` have the
# same names as these arguments.
_OPTION = re.compile(
    r"\b(host_memory|device_memory|max_grad_norm|activations|device|storage|state|existing)=(?:(['\"])(.*?)\2)?"
    r"|\b(host_memory|device_memory|max_grad_norm)\b"
)


class _Parser(argparse.ArgumentParser):
    """The parser of the program or of one command. For unknown arguments of a command, shows the command's usage."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if self.get_default("words") is not None:
            # Only `memascend train` has `words`. That command parses all of its arguments itself.
            return argparse.Namespace(**{**vars(found), "words": list(args or ())}), []
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = [close[0] for word in unknown for close in [difflib.get_close_matches(word, options, 1)] if close]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, and returns its exit code.

    The exit code is 0 after success, 1 if the command fails or reports a problem, 130 after Ctrl-C, and 143 if `train`
    ends after SIGTERM. It is 0, too, if the program that reads the output closes the pipe. Raises SystemExit with code
    0 after `--help`, and with code 2 after wrong usage.
    """
    parser = _Parser(
        prog="memascend", description="Fine-tune all parameters of models whose training state does not fit in RAM."
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    given = sys.argv[1:] if arguments is None else arguments
    called = next((word for word in given if not word.startswith("-")), None)
    for name, summary in _COMMANDS.items():
        command = importlib.import_module(f"memascend.cli.{name}") if name == called else None
        usage, description = getattr(command, "USAGE", None), getattr(command, "HELP", summary)
        command_parser = commands.add_parser(name, help=summary, usage=usage, description=description)
        if command is not None:
            command.add_arguments(command_parser)
            command_parser.set_defaults(run=command.run, refuse=command_parser.error)
    options = parser.parse_args([_at_home(word) for word in given])
    if options.version:
        from importlib.metadata import version

        print(f"memascend {version('memascend')}")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    return _ran(options)


def _ran(options: argparse.Namespace) -> int:
    """Runs the parsed command, prints the command's errors, and returns the exit code."""
    try:
        return int(options.run(options))
    except argparse.ArgumentError as error:
        # The command itself rejected an argument that argparse could not check. `refuse` exits with code 2.
        options.refuse(str(error))
    except MemascendError as error:
        text = _in_own_words(str(error)) if options.command in {"train", "plan"} else str(error)
        print(f"memascend {options.command}: {text}", file=sys.stderr)
    except KeyboardInterrupt as stop:
        return int(getattr(stop, "exit_code", 130))
    except BrokenPipeError:
        # The program that reads the output has closed the pipe, so the rest of the output is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # A file cannot be read or written. The message of the operating system names the file.
        print(f"memascend {options.command}: {error}", file=sys.stderr)
    return 1


def _in_own_words(text: str) -> str:
    """Replaces arguments of `offload()` in a message by the command's options: "host_memory=" by "--host-memory"."""
    return _OPTION.sub(_flag, text)


def _flag(found: re.Match[str]) -> str:
    flag = f"--{(found[1] or found[4]).replace('_', '-')}"
    return f"{flag} {found[3]}" if found[3] else flag


def _at_home(word: str) -> str:
    """Returns a word with "~" replaced by the home folder. Shells do not replace the "~" in "--storage=~/run"."""
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={expanded(value)}"
    return expanded(word)
