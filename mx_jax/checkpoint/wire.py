"""MXArrays as plain arrays: codes at their real width, scales, and a description beside them.

What saves trees of arrays (orbax, msgpack, `np.savez`) saves these, and they come back without a
target to tell what they were. The description has every fact of the format, so that a reader needs
no table of names, and a format of one's own comes back as it was.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.safetensors_file import Entry
from mx_jax.checkpoint.weights import on_device
from mx_jax.codecs import packing
from mx_jax.codecs.blocks import Blocks, check_parts
from mx_jax.formats import (
    E2M1,
    E4M3_SCALE,
    MXFP4,
    WHOLE,
    BlockFormat,
    BlockSize,
    ScaleFormat,
    Whole,
    block_format,
)
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

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
      >>> from mx_jax.checkpoint.wire import describe
      >>> facts = describe(mx_jax.quantize(jnp.ones((2, 64)), "mxfp4"))
      >>> facts["shape"], facts["dtype"], facts["blocks"], facts["format"]["name"]
      ([2, 64], 'float32', [[-1, 32]], 'mxfp4')
    """
    return {
        "version": VERSION,
        "shape": list(x.shape),
        "dtype": x.dtype.name,
        "blocks": [[axis, _size_out(size)] for axis, size in x.blocks],
        "format": dataclasses.asdict(x.format)
        | {"block": [_size_out(size) for size in x.format.block]},
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """What `describe` wrote, read back.

    Attributes:
      format: of the blocks.
      blocks: axes from the end with sizes.
      shape: of the tensor.
      dtype: that was quantized.
      packed: whether the codes are at their real width, or one in a byte.
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
            said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{where}: its description is no MXArray's: {said}; was it damaged, or written by "
                "a newer mx_jax?"
            ) from error


def _format_in(facts: Mapping[str, Any]) -> BlockFormat:
    return _made(
        MXFP4,
        facts,
        element=_made(E2M1, facts["element"]),
        scale=_scale_in(facts["scale"]),
        block=tuple(_size_in(size) for size in facts["block"]),
    )


def _scale_in(facts: Mapping[str, Any]) -> ScaleFormat:
    element = None if facts["element"] is None else _made(E2M1, facts["element"])
    scale = _made(E4M3_SCALE, facts, element=element)
    if scale.kind not in _KINDS or (scale.kind == "element") != (element is not None):
        raise ValueError(f"a scale of kind={scale.kind!r} with element={element}")
    if scale.bits != (32 if scale.is_float32 else 8):
        raise ValueError(f"a scale of kind={scale.kind!r} with bits={scale.bits}")
    return scale


def _made(like: Any, facts: Mapping[str, Any], **read: Any) -> Any:
    """Another of the kind of `like`, of facts of its types; a dtype's name may be missing."""
    values = {**facts, **read}
    for name, value in values.items():
        expected = type(getattr(like, name, None))
        optional = value is None and name in ("dtype_name", "element")
        if type(value) is not expected and not optional:
            raise ValueError(f"needs {name} of type {expected.__name__}, got {value!r}")
    name = values.get("dtype_name")
    if name is not None and not _DTYPE_NAME.fullmatch(name):
        raise ValueError(f"dtype_name={name!r} names no dtype")
    return type(like)(**values)


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


# The key of the description, by which `from_wire` knows its own.
DESCRIPTION = "mx_jax"
CODES, SCALES, TENSOR_SCALE = "codes", "scales", "tensor_scale"


def from_packed(
    packed_codes: jax.Array,
    scales: jax.Array,
    *,
    format: BlockFormat | str,
    length: int,
    axis: int = -1,
    tensor_scale: jax.Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> MXArray:
    """An MXArray of codes several to a byte: undoes `MXArray.packed_codes`.

    Little-endian along the last axis: FP4 the first in the low nibble, FP6 four in three bytes.

    Args:
      packed_codes: uint8 `[..., ceil(length * bits / 8)]`.
      scales: one a block: uint8 (E8M0, biased by 127, or E4M3), or float32 where the format says.
      format: of the blocks, or its name; blocks of one position along the kept axes.
      length: of the last axis, in codes.
      axis: along which the blocks lie.
      tensor_scale: float32 with an axis of length one for each of codes (NVFP4), else None.
      dtype: what `dequantize()` gives.

    Raises:
      ValueError: parts that do not fit together.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = mx_jax.quantize(jnp.arange(64.0).reshape(1, 64), "mxfp4")
      >>> y = mx_jax.checkpoint.from_packed(x.packed_codes, x.scales, format="mxfp4", length=64)
      >>> x.packed_codes.shape, bool((y.codes == x.codes).all())
      ((1, 32), True)
    """
    format = block_format(format)
    kept, contracting = format.block
    if kept != 1:
        raise ValueError(
            f"from_packed: needs blocks along one axis, got format={format.name} of "
            f"block={format.block}; build the MXArray from codes and scales"
        )
    codes = packing.unpack(packed_codes, format.element.bits, length)
    if not -codes.ndim <= axis < codes.ndim:
        raise ValueError(f"from_packed: axis={axis} is out of range for shape={codes.shape}")
    blocks: tuple[tuple[int, BlockSize], ...] = ((axis % codes.ndim - codes.ndim, contracting),)
    return built(codes, scales, tensor_scale, format, blocks, dtype, "from_packed")


def to_wire(tree: Any) -> Any:
    """A tree with each MXArray as a dict of plain arrays, for whatever saves trees of arrays.

    Codes lie on the host at their real width: MXFP4 takes 4.25 bits an element. Weights that were
    packed for this machine go as the MXArray that they hold.

    Args:
      tree: any pytree with MXArrays.

    Returns:
      The tree with dicts of `mx_jax` (the description, JSON as uint8), `codes`, `scales` and, for
      NVFP4, `tensor_scale`, NumPy arrays, in place of MXArrays; all else as it is.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> wire = checkpoint.to_wire(mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0))
      >>> wire["codes"].shape, wire["scales"].shape
      ((64, 4), (2, 8))
      >>> checkpoint.from_wire(wire).format.name
      'mxfp4'
    """

    def go(leaf: Any) -> Any:
        if not isinstance(leaf, Quantized):
            return leaf
        stored = unpacked(leaf)
        arrays = {name: np.asarray(part) for name, part in parts(stored).items()}
        return {DESCRIPTION: description(stored), **arrays}

    return jax.tree.map(go, tree, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def description(x: MXArray, **more: Any) -> np.ndarray:
    """What `describe` says, as bytes; `more` is said too."""
    return np.frombuffer(json.dumps(describe(x) | more).encode(), np.uint8)


def from_wire(tree: Any) -> Any:
    """Undo `to_wire`.

    Args:
      tree: what was saved and read back: arrays of NumPy or JAX.

    Raises:
      ValueError: a description that is damaged or of a newer version, or arrays that do not fit.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax, numpy as np
      >>> from mx_jax import checkpoint
      >>> q = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> path = os.path.join(tempfile.mkdtemp(), "q.npz")
      >>> np.savez(path, **checkpoint.to_wire(q))
      >>> with np.load(path) as file:
      ...     back = checkpoint.from_wire(dict(file))
      >>> bool((back.codes == q.codes).all()), back.blocks
      (True, ((-2, 32),))
    """

    def go(path: Any, leaf: Any) -> Any:
        if not _is_wire(leaf):
            return leaf
        where = f"from_wire: {jax.tree_util.keystr(path, simple=True, separator='/') or 'the tree'}"
        try:
            facts = json.loads(np.asarray(leaf[DESCRIPTION]).tobytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: its description is no JSON: {error}") from error
        return assemble(Described.read(facts, where), leaf, where)

    return jax.tree.map_with_path(go, tree, is_leaf=_is_wire)


def _is_wire(node: Any) -> bool:
    return isinstance(node, Mapping) and {DESCRIPTION, CODES, SCALES} <= set(node)


def parts(x: MXArray) -> dict[str, Entry]:
    """An MXArray's arrays as they are stored, by name; each is fetched when its turn comes."""
    check_parts(x, "to_wire")
    bits = x.format.element.bits if x.ndim else 8
    codes = Entry(
        _stored_shape(x.shape, bits),
        np.dtype("uint8"),
        lambda: packing.pack(np.asarray(x.codes), bits),
    )
    found = {CODES: codes, SCALES: Entry.of(x.scales)}
    return found if x.tensor_scale is None else found | {TENSOR_SCALE: Entry.of(x.tensor_scale)}


def _stored_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Of the codes of a tensor: its last axis in bytes."""
    return (*shape[:-1], packing.packed_length(shape[-1], bits)) if shape else ()


def assemble(described: Described, arrays: Mapping[str, Any], where: str) -> MXArray:
    """An MXArray of what `describe` and `parts` gave; ValueError where they do not fit."""
    bits = described.format.element.bits if described.packed else 8
    shape = described.shape
    codes = arrays[CODES]
    expected = _stored_shape(shape, bits)
    if tuple(codes.shape) != expected or codes.dtype != np.uint8:
        raise ValueError(
            f"{where}: codes must be uint8 of shape={expected} for a tensor of shape={shape} in "
            f"{described.format.name}, got codes.dtype={codes.dtype}, codes.shape={codes.shape}"
        )
    codes = packing.unpack(codes, bits, shape[-1]) if shape else codes
    facts = described.format, described.blocks, described.dtype, where
    return built(codes, arrays[SCALES], arrays.get(TENSOR_SCALE), *facts)


def built(
    codes: np.ndarray | jax.Array,
    scales: np.ndarray | jax.Array,
    tensor_scale: np.ndarray | jax.Array | None,
    format: BlockFormat,
    blocks: Blocks,
    dtype: Any,
    where: str,
) -> MXArray:
    """An MXArray on the device, if its parts fit together; `where` begins the error."""
    found = MXArray(
        codes=on_device(codes),
        scales=on_device(scales),
        tensor_scale=None if tensor_scale is None else jnp.asarray(tensor_scale),
        format=format,
        blocks=blocks,
        dtype=jnp.dtype(dtype),
    )
    check_parts(found, where)
    return found
