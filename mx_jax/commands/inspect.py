"""Print how each tensor of a checkpoint is stored, and statistics of its values.

Its bits, its largest value, the shares of zeros and of codes at their format's limit, the range of
its block scales, and how far it is from a reference, whose tensors are found by name.

examples:

    python -m mx_jax inspect small.safetensors
    python -m mx_jax inspect small.safetensors --reference model.safetensors
    python -m mx_jax inspect model.gguf --only '.*attn.*' --json
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from mx_jax import checkpoint
from mx_jax.commands.output import print_table, watched
from mx_jax.commands.stream import add_command
from mx_jax.inspect.facts import TensorFacts, facts_of, size

_COLUMNS = ("tensor", "format", "shape", "size", "bits", "amax", "zeros %", "at limit %", "scales")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a parser's subparsers."""
    help = "print what the tensors of a checkpoint are"
    parser = add_command(commands, run, "inspect", "file", help=help, text=__doc__)
    parser.add_argument(
        "--reference", metavar="FILE", type=Path, help="what the tensors should be, for the SQNR"
    )
    parser.add_argument("--only", metavar="PATTERN", help="tensors whose whole name matches")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    weights = checkpoint.read(options.file, layout=options.layout)
    reference = None if options.reference is None else checkpoint.read(options.reference)
    only = options.only
    try:
        names = [name for name in weights if only is None or re.fullmatch(only, name)]
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"--only {only!r} is no regular expression: {error}") from error
    if not names and only is not None:
        raise ValueError(f"--only {only!r} matches none of the {len(weights)} tensors")
    found = facts_of(weights, names, reference, operation="inspect", progress=watched())
    if options.json:
        print(json.dumps({"tensors": [facts.as_json() for facts in found]}, indent=1))
    else:
        _print(found, reference is not None)
    return 0


def _print(found: Sequence[TensorFacts], compared: bool) -> None:
    columns = (*_COLUMNS, "SQNR dB") if compared else _COLUMNS
    rows = []
    for facts in found:
        *row, sqnr = facts.texts("-")
        scales = facts.scales
        row.append(f"2^{min(scales)} .. 2^{max(scales)}" if scales else "-")
        rows.append([*row, *([sqnr] if compared else [])])
    title = f"{len(found)} tensors, {size(sum(facts.nbytes for facts in found))}"
    print_table(columns, rows, left=_COLUMNS[:3], title=title)
    for facts in found:
        for warning in facts.plausibility.warnings:
            print(f"{facts.name}: {warning}")
