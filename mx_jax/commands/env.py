"""`python -m mx_jax env`."""

import argparse
import json
import logging

from mx_jax.commands.output import console
from mx_jax.inspect import environment


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a parser's subparsers."""
    env = commands.add_parser(
        "env",
        help="print versions, devices, the C++ library and backends",
        description="Print versions and devices, whether the C++ library is used or why not, and "
        "which backend computes what on this machine.",
    )
    env.add_argument("--json", action="store_true", help="print it as JSON")
    env.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    logger = logging.getLogger("mx_jax")
    before = logger.level
    # Not the warning that the library is missing: the table has it.
    logger.setLevel(logging.ERROR)
    try:
        found = environment.describe()
    finally:
        logger.setLevel(before)
    if options.json:
        print(json.dumps(found, indent=1))
        return 1 if "error" in found else 0
    out = console()
    for table in environment.tables(found):
        out.print(table)
    if "error" in found:
        out.print(found["error"])
    return 1 if "error" in found else 0
