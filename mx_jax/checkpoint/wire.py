"""MXArrays as plain arrays: codes at their real width, scales, and a description beside them.

What saves trees of arrays (orbax, msgpack, `np.savez`) saves these, and they come back without a
target to tell what they were.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.facts import Described, describe
from mx_jax.checkpoint.safetensors_file import Entry
from mx_jax.checkpoint.weights import on_device
from mx_jax.codecs import packing
from mx_jax.codecs.blocks import check_parts
from mx_jax.formats import BlockFormat, BlockSize, block_format
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

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
    return checked(
        MXArray(
            codes=codes,
            scales=scales,
            tensor_scale=tensor_scale,
            format=format,
            blocks=blocks,
            dtype=jnp.dtype(dtype),
        ),
        "from_packed",
    )


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
        arrays = {name: part.fetch() for name, part in parts(stored).items()}
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
    scales, tensor_scale = arrays[SCALES], arrays.get(TENSOR_SCALE)
    codes = packing.unpack(codes, bits, shape[-1]) if shape else codes
    return checked(
        MXArray(
            codes=on_device(codes),
            scales=on_device(scales),
            tensor_scale=None if tensor_scale is None else jnp.asarray(tensor_scale),
            format=described.format,
            blocks=described.blocks,
            dtype=described.dtype,
        ),
        where,
    )


def checked(x: MXArray, where: str) -> MXArray:
    """x, if its parts fit together; `where` begins the error."""
    check_parts(x, where)
    return x
