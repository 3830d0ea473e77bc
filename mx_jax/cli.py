"""Command line: `python -m mx_jax`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mx_jax.commands import convert, diff, env, formats, inspect, quantize
from mx_jax.generate import command as generate
from mx_jax.measure import command as measure
from mx_jax.plan import command as plan

# In the order in which --help lists them.
COMMANDS = (formats, env, quantize, convert, inspect, diff, generate, measure, plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
      arguments: words after the program's name; default: those of the process.
    """
    # Closed when Python started, as a daemon's are; a file that is opened would take their number.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    parser = command_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status = options.run(options)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # rich ends the program with status 1 where its reader has gone.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # The reader (head, less) has closed the pipe; nothing may be flushed at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"mx_jax: {error}", file=sys.stderr)
        return 2
    return status


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands; what it gives has the command's `run`."""
    made = argparse.ArgumentParser(
        prog="python -m mx_jax", description="Microscaling (MX) and float8 formats for JAX."
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return made
