"""Block formats: an element format, a scale format and the block that shares one scale.

Found by object, by name, or by the dtype whose codes they share.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3 and table 1; NVIDIA's NVFP4.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mx_jax.formats.element import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3_SCALE,
    E5M2,
    E8M0,
    ELEMENT_FORMATS,
    F32,
    F32_DIVISOR,
    INT8,
    INTEGER8,
    SCALE_FORMATS,
    ElementFormat,
    ScaleFormat,
    known_element,
    known_scale,
    nearest,
    same_facts,
    unknown_name,
)


class Whole(enum.Enum):
    """The block size of an axis that lies in one block, however long it is.

    Examples:
      >>> from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP8_E4M3, WHOLE
      >>> FLOAT8_ROWWISE_E4M3.block, MXFP8_E4M3.with_block(WHOLE).block
      ((1, WHOLE), (1, WHOLE))
    """

    WHOLE = "whole"

    def __repr__(self) -> str:
        return "WHOLE"


WHOLE = Whole.WHOLE

BlockSize = int | Whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """How a tensor is cut into blocks and what a block stores.

    Attributes:
      name: short lower-case name, e.g. `"mxfp8_e4m3"`.
      element: format of the elements.
      scale: format of the scale that a block shares.
      block: sizes along (kept, contracting) axes: MX is `(1, 32)`, row-wise float8 `(1, WHOLE)`,
        tensor-wise `(WHOLE, WHOLE)`, two-dimensional weights `(16, 16)`.
      tensor_scale: whether a float32 scale of the whole tensor multiplies every block scale.

    Raises:
      ValueError: if a block size is not positive, or a tensor scale is asked of an E8M0 format.

    Examples:
      >>> from mx_jax.formats import MXFP4
      >>> MXFP4.element.name, MXFP4.scale.name, MXFP4.block, MXFP4.bits_per_element
      ('e2m1', 'e8m0', (1, 32), 4.25)
    """

    name: str
    element: ElementFormat
    scale: ScaleFormat
    block: tuple[BlockSize, BlockSize] = (1, 32)
    tensor_scale: bool = False

    def __post_init__(self):
        if len(self.block) != 2:
            raise ValueError(
                f"BlockFormat {self.name}: block must be (kept, contracting), "
                f"got block={self.block}"
            )
        for size in self.block:
            check_block_size(size, f"BlockFormat {self.name}")
        if self.tensor_scale and self.scale.kind != "element":
            raise ValueError(
                f"BlockFormat {self.name}: a tensor scale goes with a block scale in an element "
                f"format such as e4m3, got scale={self.scale.name}; set tensor_scale=False"
            )

    @functools.cached_property
    def bits_per_element(self) -> float:
        """Stored bits of one element, its share of the block scale included."""
        share = 1.0
        for size in self.block:
            share = 0.0 if isinstance(size, Whole) else share / size
        return self.element.bits + self.scale.bits * share

    @functools.cached_property
    def significand_bits(self) -> int | None:
        """Binary digits of an element times its block scale; None if the scale is any float32.

        A product with no more of them than a dtype has is exact there, within its range.
        """
        if self.scale.is_float32:
            return None
        of_scale = 0 if self.scale.element is None else self.scale.element.significand_bits
        return self.element.significand_bits + of_scale

    @functools.cached_property
    def is_known(self) -> bool:
        """Whether element and scale are the library's own by their facts: what kernels ask."""
        return known_element(self.element) is not None and known_scale(self.scale) is not None

    def with_block(self, block_size: BlockSize) -> "BlockFormat":
        """The same format with another block size along the contracting axis."""
        check_block_size(block_size, f"BlockFormat {self.name}")
        if block_size == self.block[1]:
            return self
        return dataclasses.replace(self, block=(self.block[0], block_size))

    def __repr__(self) -> str:
        return f"BlockFormat({self.name}, block={self.block})"


# What stands for a block format: itself, its name, or the dtype whose codes are its elements.
FormatLike = BlockFormat | DTypeLike


def check_block_size(size: object, operation: str) -> None:
    """Raise ValueError unless `size` is a positive int or WHOLE.

    Examples:
      >>> from mx_jax.formats import WHOLE, check_block_size
      >>> check_block_size(WHOLE, "pack_rows")
      >>> check_block_size(0, "pack_rows")
      Traceback (most recent call last):
      ValueError: pack_rows: a block size must be a positive int or WHOLE, got block_size=0
    """
    if isinstance(size, Whole):
        return
    if isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0:
        return
    raise ValueError(
        f"{operation}: a block size must be a positive int or WHOLE, got block_size={size!r}"
    )


def _mx(name: str, element: ElementFormat) -> BlockFormat:
    return BlockFormat(name=name, element=element, scale=E8M0)


def _nv(name: str, tensor_scale: bool) -> BlockFormat:
    return BlockFormat(
        name=name, element=E2M1, scale=E4M3_SCALE, block=(1, 16), tensor_scale=tensor_scale
    )


MXFP8_E4M3 = _mx("mxfp8_e4m3", E4M3)
MXFP8_E5M2 = _mx("mxfp8_e5m2", E5M2)
MXFP6_E2M3 = _mx("mxfp6_e2m3", E2M3)
MXFP6_E3M2 = _mx("mxfp6_e3m2", E3M2)
MXFP4 = _mx("mxfp4", E2M1)
MXINT8 = _mx("mxint8", INT8)
NVFP4 = _nv("nvfp4", tensor_scale=True)
NVFP4_ONE_LEVEL = _nv("nvfp4_one_level", tensor_scale=False)

MX_FORMATS: tuple[BlockFormat, ...] = (
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP4,
    MXINT8,
)


def _square(format: BlockFormat) -> BlockFormat:
    """The format in blocks that are as high as wide, whose codes serve both orientations."""
    size = format.block[1]
    return dataclasses.replace(format, name=f"{format.name}{_SQUARE}", block=(size, size))


def _whole(name: str, element: ElementFormat, kept: BlockSize) -> BlockFormat:
    return BlockFormat(name=name, element=element, scale=F32_DIVISOR, block=(kept, WHOLE))


# Behind the name of a format, for its square blocks.
_SQUARE = "_2d"
MXFP4_2D, NVFP4_2D = _square(MXFP4), _square(NVFP4)

FLOAT8_ROWWISE_E4M3 = _whole("float8_rowwise_e4m3", E4M3, 1)
FLOAT8_ROWWISE_E5M2 = _whole("float8_rowwise_e5m2", E5M2, 1)
FLOAT8_TENSORWISE_E4M3 = _whole("float8_tensorwise_e4m3", E4M3, WHOLE)
FLOAT8_TENSORWISE_E5M2 = _whole("float8_tensorwise_e5m2", E5M2, WHOLE)
INT8_ROWWISE = _whole("int8_rowwise", INTEGER8, 1)
FLOAT8_BLOCKWISE_E4M3 = BlockFormat(
    name="float8_blockwise_e4m3", element=E4M3, scale=F32, block=(1, 128)
)
FLOAT8_BLOCKWISE_2D_E4M3 = dataclasses.replace(
    FLOAT8_BLOCKWISE_E4M3, name="float8_blockwise_2d_e4m3", block=(128, 128)
)
# DeepSeek-V3.1's: the same blocks under E8M0 scales. No rows below: E4M3 under E8M0 is MXFP8, of
# which these are other blocks; `block_format` knows their names.
FLOAT8_BLOCKWISE_E8M0 = dataclasses.replace(
    MXFP8_E4M3, name="float8_blockwise_e8m0", block=(1, 128)
)
FLOAT8_BLOCKWISE_2D_E8M0 = dataclasses.replace(
    MXFP8_E4M3, name="float8_blockwise_2d_e8m0", block=(128, 128)
)

BLOCK_FORMATS: tuple[BlockFormat, ...] = (
    *MX_FORMATS,
    NVFP4,
    NVFP4_ONE_LEVEL,
    MXFP4_2D,
    NVFP4_2D,
    FLOAT8_ROWWISE_E4M3,
    FLOAT8_ROWWISE_E5M2,
    FLOAT8_TENSORWISE_E4M3,
    FLOAT8_TENSORWISE_E5M2,
    FLOAT8_BLOCKWISE_E4M3,
    FLOAT8_BLOCKWISE_2D_E4M3,
    INT8_ROWWISE,
)


def known_block(format: BlockFormat) -> BlockFormat | None:
    """The row of `BLOCK_FORMATS` with the same facts, under whatever names, or None."""
    element, scale = known_element(format.element), known_scale(format.scale)
    if element is None or scale is None:
        return None
    return same_facts(dataclasses.replace(format, element=element, scale=scale), BLOCK_FORMATS)


# A dtype says nothing about blocks: it stands for the block format that the MX specification
# gives its elements, unless a second 4-bit format makes even that a guess.
_NAMED_BY_DTYPE = (*MX_FORMATS, NVFP4)
# Recipes for all operands have these names too: the format of their forward product.
_SHORT = {"mxfp8": MXFP8_E4M3, "mxfp6": MXFP6_E3M2}
# Formats of recipes alone.
_SHORT |= {format.name: format for format in (FLOAT8_BLOCKWISE_E8M0, FLOAT8_BLOCKWISE_2D_E8M0)}


def _names(formats: Iterable[Any]) -> str:
    return ", ".join(format.name for format in formats)


def block_format(format: FormatLike | None) -> BlockFormat:
    """The block format meant by an object, a name or a dtype.

    Args:
      format: a `BlockFormat`; a name such as `"mxfp4"` (case and `-` for `_` do not matter;
        `"mxfp8"` is mxfp8_e4m3 and `"mxfp6"` mxfp6_e3m2, as in the recipes of these names; `_2d`
        behind it means square blocks); or an ml_dtypes, NumPy or jnp dtype that only one block
        format stores.

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
    try:
        # NumPy takes None for float64, and a list for the fields of a record.
        dtype = None if format is None or isinstance(format, list | tuple) else np.dtype(format)
    except TypeError:
        dtype = None
    if dtype is None:
        raise TypeError(
            "a block format is given as a BlockFormat, a name or a dtype, "
            f"got format={format!r} of type {type(format).__name__}; known names: "
            f"{_names(BLOCK_FORMATS)}"
        )
    matches = [known for known in _NAMED_BY_DTYPE if known.element.dtype == dtype]
    if len(matches) == 1:
        return matches[0]
    why = "is stored by several block formats" if matches else "is stored by no block format"
    raise ValueError(f"dtype={dtype.name} {why}; name one of: {_names(matches or BLOCK_FORMATS)}")


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


def _by_name(name: str, formats: Sequence[Any], what: str) -> Any:
    wanted = name.strip().lower().replace("-", "_")
    names = [format.name for format in formats]
    if wanted in names:
        return formats[names.index(wanted)]
    if wanted in _SHORT:
        return _SHORT[wanted]
    if wanted.endswith(_SQUARE):
        rows = {known.name: known for known in formats} | _SHORT
        row = rows.get(wanted.removesuffix(_SQUARE))
        if isinstance(row, BlockFormat) and row.block[0] == 1 and row.block[1] is not WHOLE:
            return _square(row)
    # Block formats that are called so in part, or that have an element of that name.
    meant = [
        format.name
        for format in BLOCK_FORMATS
        if format.name.startswith(f"{wanted}_")
        or wanted in (format.element.name, format.element.dtype_name)
    ]
    hint = f", perhaps one of {', '.join(meant)}" if meant else nearest(wanted, (*names, *_SHORT))
    raise unknown_name(f"{what} name", name, names, hint)
