"""Command line: `python -m mx_jax`."""

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mx_jax.formats.removed import whereabouts

# By name, the module that has `add_to`, in the order in which --help lists them; imported when its
# command runs: together they take half a second.
COMMANDS = {
    "formats": "mx_jax.commands.formats",
    "env": "mx_jax.commands.env",
    "quantize": "mx_jax.commands.quantize",
    "dequantize": "mx_jax.commands.quantize",
    "convert": "mx_jax.commands.convert",
    "inspect": "mx_jax.commands.inspect",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
      arguments: words after the program's name; default: those of the process.
    """
    # Closed when Python started, as a daemon's are; a file that is opened would take their number.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] not in COMMANDS and (place := whereabouts(words[0])):
        print(f"mx_jax: no command {words[0]}{place}", file=sys.stderr)
        return 2
    parser = command_parser(words[0] if words else None)
    for word in itertools.takewhile(lambda word: word != "--", words):
        # In Python 3.11 and 3.12 argparse takes the value away and fails.
        if word.startswith("-") and word.endswith("=--"):
            parser.error(f"argument {word.removesuffix('=--')}: expected a value, got --")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        places = (
            whereabouts(word.lstrip("-").partition("=")[0]) for word in unknown if word[0] == "-"
        )
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(places)}")
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return _refused(str(error))
    except Exception:
        # Whatever JAX raises where a platform is named that the machine lacks.
        from mx_jax.inspect.environment import no_device

        if (reason := no_device()) is None:
            raise
        return _refused(reason)
    return status


def _refused(text: str) -> int:
    print(f"mx_jax: {text}", file=sys.stderr)
    return 2


def command_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of one command, or of all; parsed options have the command's `run`."""
    made = argparse.ArgumentParser(
        prog="python -m mx_jax", description="Microscaling (MX) and float8 formats for JAX."
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    modules = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for module in modules:
        importlib.import_module(module).add_to(commands)
    return made
