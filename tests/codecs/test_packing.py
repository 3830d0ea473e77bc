"""Packed codes against a string of bits, and the tile order of scales against its index formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.codecs.packing import from_blocked_scales, pack, packed_length, unpack
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 32, 33)


def pack_by_hand(codes: list[int], bits: int) -> list[int]:
    """Codes as one little-endian number, whole groups of 1 to 8 codes, cut into bytes."""
    group = {8: 1, 4: 2, 6: 4, 2: 4}.get(bits, 8)
    codes = codes + [0] * (-len(codes) % group)
    number = sum(code << (bits * position) for position, code in enumerate(codes))
    return list(number.to_bytes(len(codes) * bits // 8, "little"))


@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_and_unpack(bits: int, rng: np.random.Generator):
    codes = {
        n: rng.integers(0, 1 << bits, (3, n)).astype(np.uint8).reshape(1, 3, n) for n in LENGTHS
    }
    packed = quick(lambda codes: {n: pack(codes[n], bits) for n in codes})(codes)
    unpacked = quick(lambda p: {n: unpack(p[n], bits, n) for n in p})(packed)
    for n in LENGTHS:
        rows = [pack_by_hand(row.tolist(), bits) for row in codes[n][0]]
        expected = np.array(rows, np.uint8).reshape(1, 3, -1 if n else 0)
        assert_bitwise_equal(packed[n], expected, what=f"{n} codes of {bits} bits")
        assert packed[n].shape[-1] == packed_length(n, bits)
        assert_bitwise_equal(unpacked[n], codes[n], what=f"{n} codes of {bits} bits, unpacked")
        on_host = pack(codes[n], bits)
        assert isinstance(on_host, np.ndarray)
        assert_bitwise_equal(on_host, expected, what=f"{n} codes of {bits} bits, on the host")
        assert isinstance(unpack(on_host, bits, n), np.ndarray)
        assert_bitwise_equal(unpack(on_host, bits, n), codes[n], what=f"{n} codes, on the host")


@pytest.mark.slow(but="6")
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_no_rows(bits: int):
    packed = quick(lambda codes: pack(codes, bits))(jnp.zeros((0, 6), jnp.uint8))
    assert packed.shape == (0, packed_length(6, bits))
    assert quick(lambda packed: unpack(packed, bits, 6))(packed).shape == (0, 6)


@pytest.mark.parametrize(("bits", "length", "size"), [(4, 5, 2), (4, 3, 3), (6, 4, 4), (8, 2, 3)])
def test_unpack_checks_the_length(bits: int, length: int, size: int):
    expected = packed_length(length, bits)
    message = rf"length={length} codes of bits={bits} take {expected} bytes, got .*\({size},\)$"
    with pytest.raises(ValueError, match=message):
        unpack(jnp.zeros(size, jnp.uint8), bits, length)


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (1, 1), (130, 5), (256, 12), (0, 4)])
def test_blocked_scales(rows: int, cols: int, rng: np.random.Generator):
    scales = rng.integers(1, 256, (rows, cols)).astype(np.uint8)
    tile_rows, tile_cols = -(-rows // 128), -(-cols // 4)
    # cuBLAS, 1D block scaling: byte (r % 32) * 16 + (r // 32) * 4 + c of a 512-byte tile.
    blocked = np.zeros(tile_rows * tile_cols * 512, np.uint8)
    for row in range(rows):
        for col in range(cols):
            tile = (row // 128) * tile_cols + col // 4
            inside = (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4
            blocked[tile * 512 + inside] = scales[row, col]
    blocked = blocked.reshape(tile_rows, tile_cols, 32, 4, 4)
    back = jax.jit(from_blocked_scales, static_argnums=(1, 2))(blocked, rows, cols)
    assert_bitwise_equal(back, scales)
