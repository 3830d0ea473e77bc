"""`python -m mx_jax formats`."""

import argparse
import importlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rich.table import Table

from mx_jax.commands.output import console
from mx_jax.formats import (
    BLOCK_FORMATS,
    ELEMENT_FORMATS,
    SCALE_FORMATS,
    BlockFormat,
    ElementFormat,
    ScaleFormat,
    any_format,
)

AnyFormat = BlockFormat | ElementFormat | ScaleFormat
F = TypeVar("F", ElementFormat, ScaleFormat)


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    formats = commands.add_parser(
        "formats",
        help="print the table of formats, or every code of one",
        description="Print what each element, scale and block format can represent. FORMAT is a "
        "name, e.g. e2m1, e8m0 or mxfp4, or module:NAME, a format of your own.",
    )
    formats.add_argument(
        "formats", metavar="FORMAT", nargs="*", help="only these, and what they consist of"
    )
    formats.add_argument("--values", metavar="FORMAT", help="list every code of a format")
    formats.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: unknown formats.
    """
    out = console()
    if options.values:
        for table in _value_tables(_format(options.values)):
            out.print(table)
        return 0
    own = (*BLOCK_FORMATS, *ELEMENT_FORMATS, *SCALE_FORMATS)
    given = [_format(each) for each in options.formats] or own
    blocks = [each for each in given if isinstance(each, BlockFormat)]
    elements = _parts(given, ElementFormat, [block.element for block in blocks])
    scales = _parts(given, ScaleFormat, [block.scale for block in blocks])
    for table in (_element_table(elements), _scale_table(scales), _block_table(blocks)):
        if table.row_count:
            out.print(table)
    out.print(
        "emax: unbiased exponent of the largest value. Dynamic range: 20 log10(max / smallest). "
        "List every code of one with --values FORMAT."
    )
    return 0


def _format(text: str) -> AnyFormat:
    """A format by its name; by `module:NAME` one of the user's own."""
    if ":" not in text:
        return any_format(text)
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"formats: cannot import {text!r}: {error}") from None
    if not isinstance(found, AnyFormat):
        raise ValueError(
            f"formats: {text!r} must be a BlockFormat, ElementFormat or ScaleFormat, got {found!r}"
        )
    return found


def _parts(given: Iterable[Any], kind: type[F], more: Iterable[F]) -> list[F]:
    """What is of a kind, and more of it, each once."""
    return list(dict.fromkeys([*(each for each in given if isinstance(each, kind)), *more]))


def _table(title: str, *columns: str, text_columns: Sequence[int] = (0,)) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in text_columns else "right")
    return table


def _element_table(elements: Iterable[ElementFormat]) -> Table:
    table = _table(
        "Element formats",
        "name",
        "bits",
        "exp",
        "man",
        "bias",
        "emax",
        "max",
        "smallest normal",
        "smallest subnormal",
        "special values",
        "range dB",
        "dtype",
        text_columns=(0, 9, 11),
    )
    for element in elements:
        fixed = element.kind == "int"
        table.add_row(
            element.name,
            str(element.bits),
            "-" if fixed else str(element.exponent_bits),
            str(element.mantissa_bits),
            "-" if fixed else str(element.bias),
            str(element.emax),
            f"{element.max:.10g}",
            "-" if fixed else _power(element.smallest_normal),
            _power(element.smallest_subnormal),
            _specials(element),
            f"{element.dynamic_range_db:.1f}",
            element.dtype_name or "-",
        )
    return table


def _specials(element: ElementFormat) -> str:
    names = []
    if element.kind == "int":
        return "-2 never written" if not element.negative_extra else "-2"
    if element.has_inf:
        names.append("Inf")
    if element.nan_code is not None:
        names.append("NaN")
    names.append("-0" if element.has_negative_zero else "no -0")
    return ", ".join(names)


def _power(value: float) -> str:
    """Powers of two as such."""
    mantissa, exponent = value.hex().split("p")
    return f"2^{int(exponent)}" if float.fromhex(mantissa + "p0") == 1 else f"{value:g}"


def _scale_table(scales: Iterable[ScaleFormat]) -> Table:
    table = _table(
        "Scale formats",
        "name",
        "bits",
        "bias",
        "max",
        "smallest",
        "value",
        "dtype",
        text_columns=(0, 5, 6),
    )
    for scale in scales:
        table.add_row(
            scale.name,
            str(scale.bits),
            "-" if scale.bias is None else str(scale.bias),
            _power(scale.max),
            _power(scale.smallest),
            "code / scale" if scale.kind == "divisor" else "code * scale",
            scale.dtype_name,
        )
    return table


def _block_table(blocks: Iterable[BlockFormat]) -> Table:
    table = _table(
        "Block formats (elements that share a scale: kept x contracting axis)",
        "name",
        "element",
        "scale",
        "block",
        "tensor scale",
        "bits per element",
        text_columns=(0, 1, 2, 3, 4),
    )
    for block in blocks:
        kept, contracting = (getattr(size, "value", size) for size in block.block)
        table.add_row(
            block.name,
            block.element.name,
            block.scale.name,
            f"{kept} x {contracting}",
            "f32" if block.tensor_scale else "-",
            f"{block.bits_per_element:g}",
        )
    return table


def _value_tables(format: AnyFormat) -> list[Table]:
    """One table for an element or a scale, both for a block format."""
    if isinstance(format, BlockFormat):
        scale = [] if format.scale.is_float32 else _value_tables(format.scale)
        return [*_value_tables(format.element), *scale]
    if isinstance(format, ScaleFormat) and format.is_float32:
        raise ValueError(
            f"formats --values: {format.name} is float32, whose codes are too many to list"
        )
    table = _table(f"{type(format).__name__} {format.name}", "code", "hex", "binary", "value")
    width = format.bits
    for code in range(1 << width):
        hexadecimal = f"0x{code:0{-(-width // 4)}X}"
        table.add_row(str(code), hexadecimal, f"{code:0{width}b}", repr(format.value(code)))
    return [table]
