"""Packed storage: several codes a byte, and the scale layout of tensor cores.

Little-endian: FP4 puts two codes in a byte, the first in the low nibble; FP6 puts four codes in
three bytes. Source: OCP MX v1.0 leaves storage open (5.1); these orders are the ones that
compressed-tensors, gpt-oss, ModelOpt and cuBLAS read.
"""

import math
from types import ModuleType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.codecs.explicit_axes import join_axes, split_axes

# Arrays of JAX are packed where they lie, those of NumPy on the host, without compiling anything.
A = TypeVar("A", jax.Array, np.ndarray)


def codes_per_group(bits: int) -> int:
    """How many codes fill a whole number of bytes: 1 for 8 bits, 2 for 4, 4 for 6, 8 for 5."""
    return 8 // math.gcd(8, bits)


def packed_length(length: int, bits: int) -> int:
    """Bytes that hold `length` codes; a last group that is not full is padded with zero codes."""
    group = codes_per_group(bits)
    return -(-length // group) * (group * bits // 8)


def pack(codes: A, bits: int) -> A:
    """Pack uint8 codes along the last axis.

    Args:
      codes: uint8 `[..., n]`, one code a byte, of JAX or NumPy.
      bits: width of a code, up to 8.

    Returns:
      uint8 `[..., packed_length(n, bits)]`, of the same kind.
    """
    group = codes_per_group(bits)
    if group == 1:
        return codes
    # Sizes are spelled out: reshape cannot work out a -1 where another axis is empty.
    *rows, length = codes.shape
    num_groups, num_bytes = -(-length // group), group * bits // 8
    padding = [(0, 0)] * len(rows) + [(0, -length % group)]
    inside = (len(rows) + 1,)
    full = isinstance(length, int) and length % group == 0
    padded: A = codes if full else _numpy_of(codes).pad(codes, padding)
    grouped = split_axes(padded, (*rows, num_groups, group), inside)
    return join_axes(_regroup(grouped, bits, 8), (*rows, num_groups * num_bytes), inside)


def unpack(packed: A, bits: int, length: int) -> A:
    """Undo `pack`: uint8 `[..., length]`, one code a byte."""
    expected = packed_length(length, bits)
    if packed.shape[-1] != expected:
        raise ValueError(
            f"unpack: length={length} codes of bits={bits} take {expected} bytes, "
            f"got packed.shape={packed.shape}"
        )
    group = codes_per_group(bits)
    if group == 1:
        return packed
    num_groups, num_bytes = -(-length // group), group * bits // 8
    rows = packed.shape[:-1]
    inside = (len(rows) + 1,)
    codes = _regroup(split_axes(packed, (*rows, num_groups, num_bytes), inside), 8, bits)
    codes = join_axes(codes, (*rows, num_groups * group), inside)
    full = isinstance(length, int) and length % group == 0
    return codes if full else codes[..., :length]


def _numpy_of(x: jax.Array | np.ndarray) -> ModuleType:
    return np if isinstance(x, np.ndarray) else jnp


def _regroup(fields: A, bits: int, wanted: int) -> A:
    """Fields of `given` bits along the last axis, little-endian, cut into `wanted` bits each."""
    xp, count = _numpy_of(fields), fields.shape[-1]
    # Fields and their shifts take 15 bits; compiled programs widen as they go, the host does not.
    word = np.uint16 if isinstance(fields, np.ndarray) else np.uint32
    wide = fields.astype(word)
    cut = []
    for start in range(0, count * bits, wanted):
        # No word has to hold the whole group: eight codes of five bits take 40.
        field = word(0)
        for index in range(start // bits, min(count, -(-(start + wanted) // bits))):
            shift = index * bits - start
            part = wide[..., index]
            field = field | (part << shift if shift >= 0 else part >> -shift)
        cut.append((field & word((1 << wanted) - 1)).astype(np.uint8))
    return xp.stack(cut, axis=-1)


def from_blocked_scales(blocked: A, rows: int, cols: int) -> A:
    """`[rows, cols]` scales of 128 x 4 tiles, bytes `[ceil(rows/128), ceil(cols/4), 32, 4, 4]`."""
    # In tile (i, j), row r of column c lies at `[r % 32, r // 32, c]`; zeros fill what the tiles
    # have beyond `rows` and `cols`. Source: cuBLAS, 1D block scaling.
    tiles = blocked.transpose(0, 3, 2, 1, 4)
    return tiles.reshape(tiles.shape[0] * 128, tiles.shape[3] * 4)[:rows, :cols]
