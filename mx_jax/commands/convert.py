"""`python -m mx_jax convert`."""

import argparse
from typing import Any

from rich.table import Table

from mx_jax import checkpoint
from mx_jax.checkpoint.layouts import LAYOUTS, named
from mx_jax.checkpoint.torchao import TORCHAO
from mx_jax.commands.converting import Conversion, How, converted, counts, plan
from mx_jax.commands.experts import taken_apart
from mx_jax.commands.output import console, say
from mx_jax.commands.programs import layout_for, program_of, programs
from mx_jax.commands.stream import (
    OWN,
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
from mx_jax.inspect.tensor_facts import size

_DESCRIPTION = """
Store quantized weights as another program does, without changing a value: the same codes and scales
under other names, or the same codes under scales of another kind, proved by decoding both. What is
not quantized stays as it is. What the layout cannot hold is refused, with the number of blocks.
"""
_EXAMPLES = """
examples:

    python -m mx_jax convert model.gguf model.safetensors --to mx_jax
    python -m mx_jax convert small/ out/ --to compressed-tensors

  MXFP4 as NVFP4, whose scales can be those of most models:
    python -m mx_jax convert mxfp4/ nvfp4/ --to modelopt-nvfp4 --dry-run
    python -m mx_jax convert mxfp4/ nvfp4/ --to modelopt-nvfp4

LAYOUT is mx_jax, a layout's name, or that of a program, of whose layouts the one is taken that
holds the format that is there.
"""
_COLUMNS = ("tensor", "from", "to", "how", "blocks", "do not fit")


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "convert",
        help="store quantized weights as another program does",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\nlayouts: {', '.join(_written())}\nprograms: {', '.join(programs())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input(parser, "in")
    add_output(parser)
    add_shards(parser)
    parser.add_argument("--to", metavar="LAYOUT", required=True, help="how to store it")
    parser.add_argument(
        "--inexact",
        action="store_true",
        help="where it does not fit: round the tensor scale, or quantize the values anew",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would become of each")
    parser.set_defaults(run=run)


def _written() -> list[str]:
    """Names of layouts that are written, not read alone."""
    return [OWN, *(row.name for row in LAYOUTS if row.rotation is None), TORCHAO]


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: a layout that does not hold what is there, or files that are damaged.
    """
    if not options.dry_run:
        check_output(options)
    weights = checkpoint.read(vars(options)["in"], layout=options.layout)
    held = {name: as_it_is(weights, name) for name in weights}
    layout = layout_for(options.to, held, weights.path)
    row = None if layout in (OWN, TORCHAO) else named(layout)
    if row is not None:
        apart, before = taken_apart(weights, row), len(weights)
        if len(apart) > before:
            say(f"the experts of gpt-oss, one by one: {before} tensors become {len(apart)}")
        weights = apart
    planned = plan(weights, row)
    inexact = [each for each in planned if not each.how.exact]
    if options.dry_run:
        _print([each for each in planned if each.how is not How.COPIED] or planned)
        return 0
    if inexact and not options.inexact:
        first = inexact[0]
        raise ValueError(
            f"convert: {weights.path}: {len(inexact)} of {len(planned)} tensors cannot be stored "
            f"as {layout} without loss, such as {first.name} in {first.source}: {first.why}; "
            "--dry-run lists them, --inexact changes their values"
        )
    tell_of_values(weights, weights)
    tensors = {each.name: converted(weights, row, each) for each in planned}
    write_out(options, weights, tensors, layout, program_of(options.to))
    _print([each for each in planned if each.how is not How.COPIED])
    before, after = stored_bytes(weights), written(options.out)
    say(f"{options.out}: {layout}, {len(weights)} tensors, {size(before)} -> {size(after)}")
    say(", ".join(f"{count} {how.value}" for how, count in counts(planned).items()))
    return 0


def _print(planned: list[Conversion]) -> None:
    """A row a tensor."""
    if not planned:
        return
    table = Table(*_COLUMNS, box=None)
    for each in planned:
        numbers = [str(each.blocks or ""), str(each.unfit or "")]
        table.add_row(each.name, each.source, each.target, each.how.value, *numbers)
    console().print(table)
