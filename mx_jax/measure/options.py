"""What `python -m mx_jax gpu` is told."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from mx_jax.formats import block_format
from mx_jax.measure import simulation, worker
from mx_jax.measure.cases import Wanted

_DESCRIPTION = """
Check every kernel on this machine's GPU, time it beside what computes without it and beside
bfloat16, and write what was found into your cache. From the next start of Python on, what is
right and faster is used by default; mx_jax.inspect.explain quotes the measurement. Each case
runs in a process of its own with a time limit, so that one that hangs or crashes costs one row.
A run that was interrupted goes on where it ended. MX_JAX_EVIDENCE=off switches all of it off.
"""


def add_to(commands: Any) -> argparse.ArgumentParser:
    """Add the command's parser to those of others."""
    parser = commands.add_parser(
        "gpu",
        help="check and time the GPU kernels here, and switch on what is right and faster",
        description=_DESCRIPTION,
    )
    _add_what(parser)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="after which no case is begun (default: 10)"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds that a case may take (default: 120)"
    )
    parser.add_argument(
        "--tune",
        type=float,
        default=worker.THOROUGH.tuning,
        metavar="SECONDS",
        help="for other tiles of a case's kernel, each checked, then timed (default: "
        f"{worker.THOROUGH.tuning:g}; 0 tries none)",
    )
    parser.add_argument("--again", action="store_true", help="measure also what was measured here")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="instead of your cache")
    parser.add_argument(
        "--session", type=Path, metavar="FILE.jsonl", help="results as they come (default: beside)"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="try the command on a CPU, by Mosaic's interpreter; times mean nothing, and nothing "
        "is switched on",
    )
    parser.add_argument("--one", metavar="CASE", help=argparse.SUPPRESS)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    parser.add_argument(
        "--formats", nargs="+", type=_format, metavar="FORMAT", help="block formats, by name"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=_size, metavar="NxK", help="of weights, as 8192x8192"
    )
    parser.add_argument(
        "--experts", nargs="+", type=_experts, metavar="GxNxK", help="of a mixture, as 8x14336x4096"
    )
    parser.add_argument("--rows", nargs="+", type=_rows, metavar="M", help="of activations")


def _format(text: str) -> str:
    try:
        return block_format(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> tuple[int, ...]:
    return _numbers(text, "NxK, as 8192x8192", 2)


def _experts(text: str) -> tuple[int, ...]:
    return _numbers(text, "GxNxK, as 8x14336x4096", 3)


def _numbers(text: str, form: str, count: int) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) != count or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"needs {form}, got {text!r}")
    return tuple(map(int, parts))


def _rows(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"needs a number of rows, got {text!r}")
    return int(text)


def wanted(options: argparse.Namespace) -> Wanted:
    """What the options choose; sizes of one kind alone leave out the other."""
    found = simulation.WANTED if options.simulate else Wanted()
    if options.sizes or options.experts:
        sizes, experts = options.sizes or (), options.experts or ()
        found = dataclasses.replace(found, sizes=sizes, experts=experts)
    if options.rows:
        found = dataclasses.replace(found, rows=options.rows, ragged_rows=options.rows)
    return dataclasses.replace(found, formats=options.formats or found.formats)
