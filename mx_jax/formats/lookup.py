"""Formats by object, by name, or by the dtype whose codes they share."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from mx_jax.formats.block import (
    BLOCK_FORMATS,
    FLOAT8_BLOCKWISE_2D_E8M0,
    FLOAT8_BLOCKWISE_E8M0,
    MX_FORMATS,
    MXFP6_E3M2,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
)
from mx_jax.formats.element import ELEMENT_FORMATS, ElementFormat
from mx_jax.formats.scale import SCALE_FORMATS, ScaleFormat

# A dtype says nothing about blocks: it stands for the block format that the MX specification
# gives its elements, unless a second 4-bit format makes even that a guess.
_NAMED_BY_DTYPE = (*MX_FORMATS, NVFP4)
# Recipes for all operands have these names too: the format of their forward product.
_SHORT = {"mxfp8": MXFP8_E4M3, "mxfp6": MXFP6_E3M2}
# Formats of recipes alone.
_SHORT |= {format.name: format for format in (FLOAT8_BLOCKWISE_E8M0, FLOAT8_BLOCKWISE_2D_E8M0)}


def _names(formats: Iterable[Any]) -> str:
    return ", ".join(format.name for format in formats)


def block_format(format: Any) -> BlockFormat:
    """The block format meant by an object, a name or a dtype.

    Args:
      format: a `BlockFormat`; a name such as `"mxfp4"` (case and `-` for `_` do not matter;
        `"mxfp8"` is mxfp8_e4m3 and `"mxfp6"` mxfp6_e3m2, as in the recipes of these names); or an
        ml_dtypes, NumPy or jnp dtype that only one block format stores.

    Returns:
      The `BlockFormat`.

    Raises:
      ValueError: unknown name, or a dtype that names no block format or several; the message
        lists the choices.
      TypeError: anything else.

    Examples:
      >>> import ml_dtypes
      >>> from mx_jax.formats import block_format
      >>> block_format("MXFP4"), block_format(ml_dtypes.float8_e4m3fn)
      (BlockFormat(mxfp4, block=(1, 32)), BlockFormat(mxfp8_e4m3, block=(1, 32)))
    """
    if isinstance(format, BlockFormat):
        return format
    if isinstance(format, str):
        return _by_name(format, BLOCK_FORMATS, "block format")
    return _by_dtype(format)


def any_format(name: str) -> BlockFormat | ElementFormat | ScaleFormat:
    """The block, element or scale format of that name, looked for in this order.

    Raises:
      ValueError: unknown name; the message lists the known.

    Examples:
      >>> from mx_jax.formats import any_format
      >>> any_format("mxfp4"), any_format("e2m1").max, any_format("e8m0").bias
      (BlockFormat(mxfp4, block=(1, 32)), 6.0, 127)
    """
    return _by_name(name, (*BLOCK_FORMATS, *ELEMENT_FORMATS, *SCALE_FORMATS), "format")


def _by_name(name: str, formats: Iterable[Any], what: str) -> Any:
    wanted = name.strip().lower().replace("-", "_")
    if wanted in _SHORT:
        return _SHORT[wanted]
    for format in formats:
        if format.name == wanted:
            return format
    raise ValueError(f"unknown {what} name={name!r}{_meant(wanted)}; known: {_names(formats)}")


def _meant(name: str) -> str:
    """Block formats that are called so in part, or that have an element of that name."""
    found = [
        format.name
        for format in BLOCK_FORMATS
        if format.name.startswith(f"{name}_")
        or name in (format.element.name, format.element.dtype_name)
    ]
    return f", perhaps one of {', '.join(found)}" if found else ""


def _by_dtype(dtype: Any) -> BlockFormat:
    try:
        # NumPy takes None for float64, and a list for the fields of a record.
        wanted = None if dtype is None or isinstance(dtype, list | tuple) else np.dtype(dtype)
    except TypeError:
        wanted = None
    if wanted is None:
        raise TypeError(
            "a block format is given as a BlockFormat, a name or a dtype, "
            f"got format={dtype!r} of type {type(dtype).__name__}; known names: "
            f"{_names(BLOCK_FORMATS)}"
        )
    matches = [format for format in _NAMED_BY_DTYPE if format.element.dtype == wanted]
    if len(matches) == 1:
        return matches[0]
    choices = matches or BLOCK_FORMATS
    why = "is stored by several block formats" if matches else "is stored by no block format"
    raise ValueError(f"dtype={wanted.name} {why}; name one of: {_names(choices)}")
