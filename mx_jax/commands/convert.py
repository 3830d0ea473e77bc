"""`python -m mx_jax convert`."""

import argparse
from typing import Any

from mx_jax import checkpoint
from mx_jax.checkpoint.layouts import LAYOUTS
from mx_jax.commands.output import say, size
from mx_jax.commands.programs import layout_for, program_of, programs
from mx_jax.commands.stream import (
    add_input,
    add_output,
    add_shards,
    as_it_is,
    check_output,
    stored_bytes,
    tell_of_values,
    write_out,
    written,
)

_DESCRIPTION = """
Store quantized weights as another program does: the same codes and scales under other names. What
is not quantized stays as it is.
"""
_EXAMPLES = """
examples:

    python -m mx_jax convert model.gguf model.safetensors --to mx_jax
    python -m mx_jax convert gpt-oss/ out.safetensors --to compressed-tensors

LAYOUT is mx_jax, a layout's name, or that of a program, of whose layouts the one is taken that
holds the format that is there.
"""


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "convert",
        help="store quantized weights as another program does",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\nlayouts: {', '.join(row.name for row in LAYOUTS)}\n"
        f"programs: {', '.join(programs())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input(parser, "in")
    add_output(parser)
    add_shards(parser)
    parser.add_argument("--to", metavar="LAYOUT", required=True, help="how to store it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: a layout that does not hold what is there, or files that are damaged.
    """
    check_output(options)
    weights = checkpoint.read(vars(options)["in"], layout=options.layout)
    tell_of_values(weights, weights)
    tensors = {name: as_it_is(weights, name) for name in weights}
    layout = layout_for(options.to, tensors)
    write_out(options, weights, tensors, layout, program_of(options.to))
    before, after = stored_bytes(weights), written(options.out)
    say(f"{options.out}: {layout}, {len(weights)} tensors, {size(before)} -> {size(after)}")
    return 0
