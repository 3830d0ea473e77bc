"""Indexing and transposing an MXArray: equal to doing it to the values, or refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.codecs.blocks import scales_shape
from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP4, MXFP4_2D, MXFP8_E4M3, NVFP4, NVFP4_2D, WHOLE
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick


class Brackets:
    """`at[1, ::2]` is the index itself."""

    def __getitem__(self, index: Any) -> Any:
        return index


at = Brackets()
ROWS = np.array([2, 0, 0, -1], np.int32)
TABLE = np.array([[0, 1, 2], [2, 1, 0]], np.int32)

# format, shape, axis, block size, the indices that its blocks allow
ALLOWED = [
    (
        MXFP4,
        (3, 4, 80),
        -1,
        32,
        [
            at[0],
            at[-1],
            at[1, 2],
            at[1, -2, :],
            at[...],
            at[:],
            at[..., 32:],
            at[:, 1:3, 32:64],
            at[::2, ::-1],
            at[0, ..., 64:],
            at[..., :64],
            at[..., 32:80],
            at[..., 32:1000],
            at[..., 0:0],
            at[:, :, 64:32],
            at[3:],
            at[None],
            at[:, None, 0],
            at[..., None],
            at[None, ..., None, 32:],
            at[ROWS],
            at[TABLE],
            at[ROWS, 1],
            at[ROWS, :, 32:],
            at[ROWS, None],
            at[np.int64(1)],
            at[np.array(1)],
            at[jnp.int32(2), 0],
            at[()],
        ],
    ),
    (
        MXFP8_E4M3,
        (3, 40, 4),
        1,
        16,
        [
            at[0],
            at[:, 16:],
            at[:, 32:40, 1],
            at[1, :16, ::2],
            at[..., -1],
            at[2, None, 16:32, None],
            at[ROWS],
            at[ROWS, 16:],
            at[ROWS, 16:, 1],
        ],
    ),
    (NVFP4, (3, 4, 32), -1, None, [at[1], at[1, 2, 16:], at[ROWS], at[TABLE, 1], at[None, ::2, 0]]),
    (
        NVFP4_2D,
        (3, 40, 48),
        -1,
        None,
        [at[1], at[1, 16:, 32:], at[:, 32:], at[ROWS, :16], at[None]],
    ),
    (MXFP4_2D, (70, 64), 0, None, [at[32:], at[:, 32:], at[64:70, :32], at[None]]),
    (
        FLOAT8_ROWWISE_E4M3,
        (5, 24),
        -1,
        None,
        [at[1], at[1:3], at[:, 3:7], at[:, ::-2], at[2, 20:], at[:, 5:5], at[ROWS]],
    ),
    (MXFP4, (3, 24), -1, WHOLE, [at[2, ::3], at[:, 1:2]]),
    (MXFP4, (6, 5), 0, 1, [at[2:5], at[3:, 2]]),
]


@pytest.mark.parametrize(
    ("format", "shape", "axis", "block_size", "indices"),
    ALLOWED,
    ids=[f"{case[0].name}-{case[1]}-{case[3]}" for case in ALLOWED],
)
def test_allowed(format, shape, axis, block_size, indices, rng: np.random.Generator):
    x = random(rng, shape)
    whole = quick(lambda x: mx_jax.quantize(x, format, axis=axis, block_size=block_size))(x)

    @quick
    def read(whole):
        parts = [whole[index] for index in indices]
        return parts, (whole.dequantize(), parts[-1].dequantize())

    parts, values = read(whole)
    codes, scales = np.asarray(whole.codes), element_scales(whole)
    for index, part in zip(indices, parts, strict=True):
        what = f"[{index}]"
        assert_bitwise_equal(part.codes, codes[as_numpy(index)], what=f"codes {what}")
        assert_bitwise_equal(element_scales(part), scales[as_numpy(index)], what=f"scales {what}")
        assert part.shape == part.codes.shape
        assert [size for _, size in part.blocks] == [size for _, size in whole.blocks]
        assert (part.format, part.dtype) == (whole.format, whole.dtype)
    # Dequantizing takes the blocks from where they are stored.
    assert_bitwise_equal(values[1], np.asarray(values[0])[as_numpy(indices[-1])])


def random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.normal(size=shape) * 2.0 ** rng.uniform(-4, 4, shape)).astype(np.float32)


def as_numpy(index: Any) -> Any:
    """The index with NumPy arrays in place of jax's."""
    items = index if isinstance(index, tuple) else (index,)
    return tuple(np.asarray(item) if isinstance(item, jax.Array) else item for item in items)


def element_scales(x: mx_jax.MXArray) -> np.ndarray:
    """The stored scale of every element, times the tensor's: what an index has to keep."""
    assert x.scales.shape == scales_shape(x.shape, x.blocks)
    spread = np.asarray(x.scales).astype(np.float32)
    for axis, size in x.blocks:
        length = x.shape[axis]
        spread = spread.repeat(length if size is WHOLE else size, axis).take(range(length), axis)
    if x.tensor_scale is not None:
        assert x.tensor_scale.ndim == x.ndim
        spread = spread * np.asarray(x.tensor_scale)
    assert spread.shape == x.shape
    return spread


def test_the_stored_blocks_follow_the_index():
    x = mx_jax.quantize(jnp.zeros((3, 64, 4)), MXFP4, axis=1)
    indexed = {
        "row": at[0],
        "column": at[..., 0],
        "new last": at[..., None],
        "new first": at[None],
        "both": at[0, None, :, 1],
    }
    found = jax.eval_shape(lambda x: {name: x[index] for name, index in indexed.items()}, x)
    assert {name: array.blocks for name, array in found.items()} == {
        "row": ((-2, 32),),
        "column": ((-1, 32),),
        "new last": ((-3, 32),),
        "new first": ((-2, 32),),
        "both": ((-1, 32),),
    }


REMEDY = "dequantize() first, or index whole blocks"
SLICES_ONLY = "is cut into blocks of 32, which share a scale, and takes slices only; got index="
BETWEEN = "a slice must start and stop between blocks with step 1, got "
KINDS = "takes ints, slices, None, an ellipsis and, on the first axis, an integer array; got "

REFUSED = [
    (at[:, 3], f"axis=-1 {SLICES_ONLY}3; {REMEDY}"),
    (at[0, ROWS], f"axis=-1 {SLICES_ONLY}{ROWS!r}; {REMEDY}"),
    (at[:, np.int32(3)], f"axis=-1 {SLICES_ONLY}{np.int32(3)!r}; {REMEDY}"),
    (at[:, 0:16], f"axis=-1 of length=80 is cut into blocks of 32; {BETWEEN}0:16:1; {REMEDY}"),
    (at[:, 16:], f"axis=-1 of length=80 is cut into blocks of 32; {BETWEEN}16:80:1; {REMEDY}"),
    (at[:, ::2], f"axis=-1 of length=80 is cut into blocks of 32; {BETWEEN}0:80:2; {REMEDY}"),
    (at[:, ::-1], f"axis=-1 of length=80 is cut into blocks of 32; {BETWEEN}79:-1:-1; {REMEDY}"),
    (at[:, :-1], f"axis=-1 of length=80 is cut into blocks of 32; {BETWEEN}0:79:1; {REMEDY}"),
    (at[[0, 1]], f"{KINDS}[0, 1] on axis=-2; {REMEDY}"),
    (at[True], f"{KINDS}True on axis=-2; {REMEDY}"),
    (at[:, False], f"{KINDS}False on axis=-1; {REMEDY}"),
    (at[np.array([True, False, True])], f"on axis=-2; {REMEDY}"),
    (at[0, 0, 0], "MXArray index: too many indices, got 3 for ndim=2"),
    (at[..., ...], "MXArray index: only one ellipsis is allowed, got index=(Ellipsis, Ellipsis)"),
]


@pytest.mark.parametrize(("index", "message"), REFUSED, ids=[repr(case[0]) for case in REFUSED])
def test_refused(index: Any, message: str):
    x = mx_jax.quantize(jnp.zeros((3, 80)), MXFP4)
    with pytest.raises(IndexError, match=re.escape(message)):
        x[index]


@pytest.mark.parametrize("index", [1.5, "a", at[0:1, 0.0]], ids=repr)
def test_what_is_no_index_at_all(index: Any):
    x = mx_jax.quantize(jnp.zeros((3, 80)), MXFP4, axis=0, block_size=3)
    with pytest.raises((TypeError, IndexError)):
        x[:, index]


# NumPy moves the axes of an index array to the front when a slice parts it from another array or
# int: blocks must not end up on an axis where they are not.
@pytest.mark.parametrize(
    "index",
    [
        at[0, :, ROWS],
        at[ROWS, :, ROWS],
        at[:, :, ROWS],
        at[:, :, TABLE],
        at[jnp.int32(0), :, ROWS],
        at[TABLE, :, 0],
    ],
    ids=["int-array", "array-array", "last", "table", "traced-array", "table-int"],
)
def test_arrays_elsewhere_than_first(index: Any, rng: np.random.Generator):
    """Right, or refused with a clear message."""
    x = mx_jax.quantize(random(rng, (3, 64, 4)), MXFP4, axis=1)
    try:
        part = x[index]
    except IndexError as error:
        assert "on the first axis, an integer array" in str(error)
        return
    assert_bitwise_equal(part.codes, np.asarray(x.codes)[as_numpy(index)])
    assert_bitwise_equal(element_scales(part), element_scales(x)[as_numpy(index)])


def test_rows_by_a_traced_index(rng: np.random.Generator):
    """What a layer's weights under `scan`, or the rows of an embedding, are indexed with."""
    x = rng.normal(size=(5, 64)).astype(np.float32)
    quantized = mx_jax.quantize(x, MXFP8_E4M3)
    row = jax.jit(lambda q, i: q[i].dequantize())
    rows = jax.jit(lambda q, i: q[i].dequantize())
    values = np.asarray(jax.jit(lambda q: q.dequantize())(quantized))
    assert_bitwise_equal(row(quantized, 3), values[3])
    assert_bitwise_equal(rows(quantized, ROWS), values[ROWS])


def test_iterating_and_unpacking(rng: np.random.Generator):
    x = rng.normal(size=(3, 32)).astype(np.float32)
    quantized = mx_jax.quantize(x, MXFP8_E4M3)
    assert len(quantized) == 3
    # Without an end this would go on for ever: look at one row more than there is.
    rows = [row for _, row in zip(range(4), quantized, strict=False)]
    assert len(rows) == 3
    for index, row in enumerate(rows):
        assert_bitwise_equal(row.codes, quantized.codes[index])
        assert row.blocks == ((-1, 32),)


ORDERS = [
    (),
    (0, 1, 2, 3),
    (3, 2, 1, 0),
    (1, 0, 3, 2),
    (-1, 0, 1, 2),
    ((2, 0, 3, 1),),
    ([1, 2, 3, 0],),
]


@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda format: format.name)
def test_transposing(format, rng: np.random.Generator):
    x = random(rng, (3, 40, 4, 5))
    whole = jax.jit(lambda x: mx_jax.quantize(x, format, axis=1, block_size=16))(x)
    turned = jax.jit(lambda w: [*(w.transpose(*order) for order in ORDERS), w.T, w.mT])(whole)
    codes, scales = np.asarray(whole.codes), element_scales(whole)
    expected = [[part.transpose(*order) for part in (codes, scales)] for order in ORDERS]
    expected += [[codes.T, scales.T], [np.swapaxes(part, -1, -2) for part in (codes, scales)]]
    for array, (wanted_codes, wanted_scales) in zip(turned, expected, strict=True):
        assert_bitwise_equal(array.codes, wanted_codes)
        assert_bitwise_equal(element_scales(array), wanted_scales)
        ((axis, size),) = array.blocks
        assert (array.shape[axis], size) == (40, 16)
    values = jax.jit(lambda w: (w.dequantize(), w.mT.dequantize()))(whole)
    assert_bitwise_equal(values[1], np.swapaxes(values[0], -1, -2))


def test_blocks_move_with_their_axes():
    x = mx_jax.quantize(jnp.zeros((2, 40, 48)), MXFP4_2D)
    assert x.blocks == ((-2, 32), (-1, 32))
    assert x.T.blocks == ((-3, 32), (-2, 32))
    assert x.transpose(1, 0, 2).blocks == ((-3, 32), (-1, 32))


@pytest.mark.parametrize(
    "axes", [(0,), (0, 0), (0, 1, 2), (1, 2), (0, 5), (-3, 0), ((0, 3),)], ids=str
)
def test_axes_that_do_not_permute(axes: tuple):
    x = mx_jax.quantize(jnp.zeros((2, 32)), MXFP4)
    with pytest.raises(
        ValueError, match=rf"transpose: axes={re.escape(repr(axes))} do not permute"
    ):
        x.transpose(*axes)


def test_mt_needs_two_axes():
    with pytest.raises(ValueError, match="do not permute ndim=1"):
        _ = mx_jax.quantize(jnp.zeros(32), MXFP4).mT
