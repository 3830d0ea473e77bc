"""Print what each element, scale and block format can represent.

FORMAT is a name, e.g. e2m1, e8m0 or mxfp4.
"""

import argparse
from collections.abc import Mapping, Sequence

from mx_jax import formats
from mx_jax.commands.output import Commands, add_parser, print_table

AnyFormat = formats.BlockFormat | formats.ElementFormat | formats.ScaleFormat


def add_to(commands: Commands) -> None:
    """Add the command to a parser's subparsers."""
    help = "print the table of formats, or every code of one"
    parser = add_parser(commands, run, "formats", help=help, text=__doc__)
    parser.add_argument(
        "formats", metavar="FORMAT", nargs="*", help="only these, and what they consist of"
    )
    parser.add_argument("--values", metavar="FORMAT", help="list every code of a format")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if options.values:
        _print_codes(formats.any_format(options.values))
        return 0
    known = (*formats.BLOCK_FORMATS, *formats.ELEMENT_FORMATS, *formats.SCALE_FORMATS)
    chosen = [formats.any_format(each) for each in options.formats] or known
    blocks = [each for each in chosen if isinstance(each, formats.BlockFormat)]
    # What is named, and what the blocks consist of, each once.
    elements = [each for each in chosen if isinstance(each, formats.ElementFormat)]
    elements = dict.fromkeys((*elements, *(block.element for block in blocks)))
    scales = [each for each in chosen if isinstance(each, formats.ScaleFormat)]
    scales = dict.fromkeys((*scales, *(block.scale for block in blocks)))
    title = "Block formats (elements that share a scale: kept x contracting axis)"
    _print("Element formats", [*map(_element_row, elements)], "special values", "dtype")
    _print("Scale formats", [*map(_scale_row, scales)], "value", "dtype")
    _print(title, [*map(_block_row, blocks)], "element", "scale", "block", "tensor scale")
    print(
        "emax: unbiased exponent of the largest value. Dynamic range: 20 log10(max / smallest). "
        "List every code of one with --values FORMAT."
    )
    return 0


def _print(title: str, rows: Sequence[Mapping[str, str]], *left: str) -> None:
    """Rows of cells by their column; `left`: columns that begin at the left, as names do."""
    if rows:
        print_table([*rows[0]], [[*row.values()] for row in rows], ("name", *left), title=title)


def _element_row(element: formats.ElementFormat) -> dict[str, str]:
    fixed = element.kind == "int"
    if fixed:
        specials = "-2" if element.negative_extra else "-2 never written"
    else:
        names = ["Inf"] * element.has_inf + ["NaN"] * (element.nan_code is not None)
        specials = ", ".join([*names, "-0" if element.has_negative_zero else "no -0"])
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
        "special values": specials,
        "range dB": f"{element.dynamic_range_db:.1f}",
        "dtype": element.dtype_name or "-",
    }


def _scale_row(scale: formats.ScaleFormat) -> dict[str, str]:
    return {
        "name": scale.name,
        "bits": str(scale.bits),
        "bias": "-" if scale.bias is None else str(scale.bias),
        "max": _power(scale.max),
        "smallest": _power(scale.smallest),
        "value": "code / scale" if scale.kind == "divisor" else "code * scale",
        "dtype": scale.dtype_name,
    }


def _block_row(block: formats.BlockFormat) -> dict[str, str]:
    kept, contracting = (getattr(size, "value", size) for size in block.block)
    return {
        "name": block.name,
        "element": block.element.name,
        "scale": block.scale.name,
        "block": f"{kept} x {contracting}",
        "tensor scale": "f32" if block.tensor_scale else "-",
        "bits per element": f"{block.bits_per_element:g}",
    }


def _power(value: float) -> str:
    """Powers of two as such."""
    mantissa, exponent = value.hex().split("p")
    return f"2^{int(exponent)}" if float.fromhex(mantissa + "p0") == 1 else f"{value:g}"


def _print_codes(format: AnyFormat) -> None:
    """Every code of an element or a scale; of a block format those of both."""
    if isinstance(format, formats.BlockFormat):
        _print_codes(format.element)
        if not format.scale.is_float32:
            _print_codes(format.scale)
        return
    if isinstance(format, formats.ScaleFormat) and format.is_float32:
        raise ValueError(
            f"formats --values: {format.name} is float32, whose codes are too many to list"
        )
    digits, columns = -(-format.bits // 4), ("code", "hex", "binary", "value")
    rows = [
        (str(code), f"0x{code:0{digits}X}", f"{code:0{format.bits}b}", repr(format.value(code)))
        for code in range(1 << format.bits)
    ]
    title = f"{type(format).__name__} {format.name}"
    print_table(columns, rows, left=columns[:1], title=title)
