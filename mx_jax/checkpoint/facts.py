"""What an MXArray is, besides its arrays, as JSON: every fact of its format, so that a reader needs
no table of names, and a format of one's own comes back as it was."""

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import (
    E2M1,
    E4M3_SCALE,
    MXFP4,
    WHOLE,
    BlockFormat,
    BlockSize,
    ElementFormat,
    ScaleFormat,
    Whole,
)
from mx_jax.mxarray import MXArray

# Of the description, not of the package. A reader refuses what it does not know.
VERSION = 1
_KINDS = typing.get_args(ScaleFormat.__annotations__["kind"])
_DTYPE_NAME = re.compile(r"(u?int|float|bfloat)\d+\w*")


def describe(x: MXArray) -> dict[str, Any]:
    """The static facts of an MXArray, ready for `json.dumps`.

    Args:
      x: any; its arrays are not read.

    Returns:
      `version`, `shape`, `dtype`, `blocks` as `[axis from the end, size]`, and `format`.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax.checkpoint.facts import describe
      >>> facts = describe(mx_jax.quantize(jnp.ones((2, 64)), "mxfp4"))
      >>> facts["shape"], facts["dtype"], facts["blocks"], facts["format"]["name"]
      ([2, 64], 'float32', [[-1, 32]], 'mxfp4')
    """
    return {
        "version": VERSION,
        "shape": list(x.shape),
        "dtype": x.dtype.name,
        "blocks": [[axis, _size_out(size)] for axis, size in x.blocks],
        "format": _format_out(x.format),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """What `describe` wrote, read back.

    Attributes:
      format: of the blocks.
      blocks: axes from the end with sizes.
      shape: of the tensor.
      dtype: that was quantized.
      packed: whether the codes lie at their real width, or one in a byte.
    """

    format: BlockFormat
    blocks: Blocks
    shape: tuple[int, ...]
    dtype: Any
    packed: bool

    @classmethod
    def read(cls, facts: Any, where: str) -> "Described":
        """Check and read a description.

        Args:
          facts: what `json.loads` gave.
          where: which tensor of what, for the error.

        Raises:
          ValueError: another version, or facts that are missing, unknown or impossible.
        """
        try:
            version = facts["version"]
            if version != VERSION:
                raise ValueError(f"is of version={version!r}, this mx_jax reads {VERSION}")
            return cls(
                format=_format_in(facts["format"]),
                blocks=tuple((_integer(axis), _size_in(size)) for axis, size in facts["blocks"]),
                shape=tuple(_integer(length, least=0) for length in facts["shape"]),
                dtype=_dtype(facts["dtype"]),
                packed=facts.get("packed") is not False,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{where}: its description is no MXArray's: {_said(error)}; was it damaged, or "
                "written by a newer mx_jax?"
            ) from error


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _format_out(format: BlockFormat) -> dict[str, Any]:
    facts = dataclasses.asdict(format)
    return facts | {"block": [_size_out(size) for size in format.block]}


def _format_in(facts: Mapping[str, Any]) -> BlockFormat:
    values = {
        **facts,
        "element": _element_in(facts["element"]),
        "scale": _scale_in(facts["scale"]),
        "block": tuple(_size_in(size) for size in facts["block"]),
    }
    return BlockFormat(**_typed(values, like=MXFP4))


def _element_in(facts: Mapping[str, Any]) -> ElementFormat:
    return ElementFormat(**_typed(facts, like=E2M1))


def _scale_in(facts: Mapping[str, Any]) -> ScaleFormat:
    element = None if facts["element"] is None else _element_in(facts["element"])
    scale = ScaleFormat(**_typed({**facts, "element": element}, like=E4M3_SCALE))
    if scale.kind not in _KINDS or (scale.kind == "element") != (element is not None):
        raise ValueError(f"a scale of kind={scale.kind!r} with element={element}")
    if scale.bits != (32 if scale.is_float32 else 8):
        raise ValueError(f"a scale of kind={scale.kind!r} with bits={scale.bits}")
    return scale


def _typed(facts: Mapping[str, Any], *, like: Any) -> dict[str, Any]:
    """The facts, of the types that a known format has; a dtype's name may be missing."""
    for name, value in facts.items():
        expected = type(getattr(like, name, None))
        optional = value is None and name in ("dtype_name", "element")
        if type(value) is not expected and not optional:
            raise ValueError(f"needs {name} of type {expected.__name__}, got {value!r}")
    name = facts.get("dtype_name")
    if name is not None and not _DTYPE_NAME.fullmatch(name):
        raise ValueError(f"dtype_name={name!r} names no dtype")
    return dict(facts)


def _size_out(size: BlockSize) -> int | str:
    return size.value if isinstance(size, Whole) else int(size)


def _size_in(size: Any) -> BlockSize:
    return WHOLE if size == WHOLE.value else _integer(size, least=1)


def _integer(value: Any, least: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"needs integers, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"needs integers from {least}, got {value}")
    return value


def _dtype(name: Any) -> Any:
    if not isinstance(name, str) or not _DTYPE_NAME.fullmatch(name):
        raise ValueError(f"dtype={name!r} names no dtype")
    dtype = jnp.dtype(name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={name!r} is no float dtype")
    return dtype
