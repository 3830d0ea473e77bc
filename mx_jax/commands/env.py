"""Print versions and devices, whether the C++ library is used, and which backend computes what."""

import argparse
import json
import logging
from typing import Any

from mx_jax.commands.output import Commands, add_parser, print_table
from mx_jax.inspect import environment


def add_to(commands: Commands) -> None:
    """Add the command to a parser's subparsers."""
    help = "print versions, devices, the C++ library and backends"
    parser = add_parser(commands, run, "env", help=help, text=__doc__)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    logger = logging.getLogger("mx_jax")
    before = logger.level
    # Not the warning that the library is missing: the table has it.
    logger.setLevel(logging.ERROR)
    try:
        facts = environment.describe()
    finally:
        logger.setLevel(before)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts)
    return 1 if "error" in facts else 0


def _print(facts: dict[str, Any]) -> None:
    """One table for each kind of facts."""
    path, used, best, missing = facts["cpu_library"].values()
    library_rows = {"path": "-", "not used, because": f"{missing}"}
    if path is not None:
        more = "" if best == used else f", where the machine has {best}"
        library_rows = {"path": path, "instruction set": used + more}
    tables = {
        "Versions": facts["versions"] | {"system": facts["system"]},
        "C++ library": library_rows,
        "Variables": {name: value or "-" for name, value in facts["variables"].items()},
    }
    if "error" not in facts:
        devices = {f"{row['number']} x {row['kind']}": row["platform"] for row in facts["devices"]}
        tables["Devices"] = devices
        tables[f"Calls {facts['machine']}"] = {
            name: "\n".join([row["backend"], *row["reasons"]])
            for name, row in facts["calls"].items()
        }
    for title, rows in tables.items():
        print_table(("what", "value"), rows.items(), ("what", "value"), title)
    if "error" in facts:
        print(facts["error"])
