"""`python -m mx_jax formats`."""

import argparse
import importlib
from collections.abc import Iterable, Mapping, Sequence
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
_CODES = ("code", "hex", "binary", "value")
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
    title = "Block formats (elements that share a scale: kept x contracting axis)"
    for table in (
        _table("Element formats", [*map(_element_row, elements)], "special values", "dtype"),
        _table("Scale formats", [*map(_scale_row, scales)], "value", "dtype"),
        _table(title, [*map(_block_row, blocks)], "element", "scale", "block", "tensor scale"),
    ):
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


def _table(title: str, rows: Sequence[Mapping[str, str]], *texts: str) -> Table:
    """Rows of cells by their column; `texts`: columns that begin at the left, as names do."""
    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column in ("name", *texts) else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _element_row(element: ElementFormat) -> dict[str, str]:
    fixed = element.kind == "int"
    return {
        "name": element.name,
        "bits": str(element.bits),
        "exp": "-" if fixed else str(element.exponent_bits),
        "man": str(element.mantissa_bits),
        "bias": "-" if fixed else str(element.bias),
        "emax": str(element.emax),
        "max": f"{element.max:.10g}",
        "smallest normal": "-" if fixed else _power(element.smallest_normal),
        "smallest subnormal": _power(element.smallest_subnormal),
        "special values": _specials(element),
        "range dB": f"{element.dynamic_range_db:.1f}",
        "dtype": element.dtype_name or "-",
    }


def _scale_row(scale: ScaleFormat) -> dict[str, str]:
    return {
        "name": scale.name,
        "bits": str(scale.bits),
        "bias": "-" if scale.bias is None else str(scale.bias),
        "max": _power(scale.max),
        "smallest": _power(scale.smallest),
        "value": "code / scale" if scale.kind == "divisor" else "code * scale",
        "dtype": scale.dtype_name,
    }


def _block_row(block: BlockFormat) -> dict[str, str]:
    kept, contracting = (getattr(size, "value", size) for size in block.block)
    return {
        "name": block.name,
        "element": block.element.name,
        "scale": block.scale.name,
        "block": f"{kept} x {contracting}",
        "tensor scale": "f32" if block.tensor_scale else "-",
        "bits per element": f"{block.bits_per_element:g}",
    }


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


def _value_tables(format: AnyFormat) -> list[Table]:
    """One table for an element or a scale, both for a block format."""
    if isinstance(format, BlockFormat):
        scale = [] if format.scale.is_float32 else _value_tables(format.scale)
        return [*_value_tables(format.element), *scale]
    if isinstance(format, ScaleFormat) and format.is_float32:
        raise ValueError(
            f"formats --values: {format.name} is float32, whose codes are too many to list"
        )
    digits, rows = -(-format.bits // 4), []
    for code in range(1 << format.bits):
        texts = (str(code), f"0x{code:0{digits}X}", f"{code:0{format.bits}b}")
        rows.append(dict(zip(_CODES, (*texts, repr(format.value(code))), strict=True)))
    return [_table(f"{type(format).__name__} {format.name}", rows, _CODES[0])]
