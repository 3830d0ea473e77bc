"""Indexing, transposing, reshaping and updating: equal to doing it to the values, or refused."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import MXArray
from mx_jax.codecs.blocks import scales_shape
from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP4, MXFP4_2D, MXFP8_E4M3, NVFP4, NVFP4_2D, WHOLE
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

at = np.s_
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
            *(at[0], at[-1], at[1, 2], at[1, -2, :], at[...], at[:], at[..., 32:]),
            *(at[:, 1:3, 32:64], at[::2, ::-1], at[0, ..., 64:], at[..., :64], at[..., 32:80]),
            *(at[..., 32:1000], at[..., 0:0], at[:, :, 64:32], at[3:], at[None]),
            *(at[:, None, 0], at[..., None], at[None, ..., None, 32:], at[ROWS], at[TABLE]),
            *(at[ROWS, 1], at[ROWS, :, 32:], at[ROWS, None], at[np.int64(1)], at[np.array(1)]),
            *(at[jnp.int32(2), 0], at[()]),
        ],
    ),
    (
        MXFP8_E4M3,
        (3, 40, 4),
        1,
        16,
        [
            *(at[0], at[:, 16:], at[:, 32:40, 1], at[1, :16, ::2], at[..., -1]),
            *(at[2, None, 16:32, None], at[ROWS], at[ROWS, 16:], at[ROWS, 16:, 1]),
            # NumPy moves the axes of an index array to the front when a slice parts it from an int:
            # blocks must not end up on an axis where they are not.
            at[TABLE, :, 0],
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


S = slice(None)
CUT = "between blocks with step 1"
REFUSED: list[tuple[Any, str]] = [
    ((0, 0, 0, 0), "too many indices, got 4 for ndim=3"),
    ((..., 0, ...), "only one ellipsis is allowed"),
    ((S, S, 0), "takes slices only"),
    ((S, S, slice(1, 32)), f"{CUT}, got 1:32:1"),
    ((S, S, slice(0, 33)), f"{CUT}, got 0:33:1"),
    ((S, S, slice(0, 64, 2)), f"{CUT}, got 0:64:2"),
    ((S, S, slice(64, 32, -1)), CUT),
    ((True,), "got True on axis=-3"),
    ((np.array([True, False, True]),), "on axis=-3"),
    (([0, 1],), r"got \[0, 1\] on axis=-3"),
    ((0, np.array([0])), "got an array at position 1"),
    ((None, np.array([0])), "got an array at position 1"),
    ((0, S, np.array([0])), "takes slices only"),
]


@pytest.mark.parametrize(("index", "message"), REFUSED)
def test_refused(index: Any, message: str):
    with pytest.raises(IndexError, match=f"MXArray index: .*{message}") as caught:
        array((3, 4, 80))[index]
    has_remedy = "dequantize() first, or index whole blocks" in str(caught.value)
    assert has_remedy == (not message.startswith(("too many", "only one")))


@pytest.mark.parametrize("index", [1.0, "a", (0, 0, slice(0, 1.5))], ids=repr)
def test_what_is_no_int(index: Any):
    is_slice = isinstance(index, tuple)
    text = "slice indices must be" if is_slice else f"MXArray index: .* {index!r} on"
    with pytest.raises(TypeError, match=text):
        array((3, 4, 80))[index]


def test_rows_by_a_traced_index(rng: np.random.Generator):
    """As `scan` indexes the weights of a layer, and an embedding its rows."""
    x = rng.normal(size=(5, 64)).astype(np.float32)
    quantized = mx_jax.quantize(x, MXFP8_E4M3)
    rows, values = jax.jit(lambda q, i: q[i].dequantize()), np.asarray(quantized)
    for index in (3, ROWS):
        assert_bitwise_equal(rows(quantized, index), values[index])


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
    *((), (0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2), (-1, 0, 1, 2)),
    *(((2, 0, 3, 1),), ([1, 2, 3, 0],)),
]


@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda format: format.name)
def test_transposing(format, rng: np.random.Generator):
    x = random(rng, (3, 40, 4, 5))
    whole = jax.jit(lambda x: mx_jax.quantize(x, format, axis=1, block_size=16))(x)
    arrays = jax.jit(lambda w: [*(w.transpose(*order) for order in ORDERS), w.T, w.mT])(whole)
    codes, scales = np.asarray(whole.codes), element_scales(whole)
    expected = [[part.transpose(*order) for part in (codes, scales)] for order in ORDERS]
    expected += [[codes.T, scales.T], [np.swapaxes(part, -1, -2) for part in (codes, scales)]]
    for array, (wanted_codes, wanted_scales) in zip(arrays, expected, strict=True):
        assert_bitwise_equal(array.codes, wanted_codes)
        assert_bitwise_equal(element_scales(array), wanted_scales)
        ((axis, size),) = array.blocks
        assert (array.shape[axis], size) == (40, 16)
    with pytest.raises(ValueError, match="do not permute ndim=1"):
        _ = mx_jax.quantize(jnp.zeros(32), format).mT
    for wrong in ((0, 1, 2, 4), (-5, 1, 2, 3), (0, 0, 1, 2), (0, 1)):
        with pytest.raises(ValueError, match="do not permute ndim=4"):
            whole.transpose(wrong)


# Reshaping ----------------------------------------------------------------------------------------


@functools.cache
def array(shape: tuple[int, ...], format: str = "mxfp8_e4m3", **how: Any) -> MXArray:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return mx_jax.quantize(x, format, **how)


# Made where it is needed: every worker of a run reads every file.
later = functools.partial(functools.partial, array)

RESHAPES = [
    ("merge rows", later((2, 3, 64)), (6, 64), ((-1, 32),)),
    ("divide rows", later((6, 64)), (2, 3, 1, 64), ((-1, 32),)),
    ("merge the blocked axis", later((3, 64)), (192,), ((-1, 32),)),
    ("divide the blocked axis", later((3, 128)), (3, 2, 64), ((-1, 32),)),
    ("both", later((2, 2, 64)), (1, 4, 2, 32), ((-1, 32),)),
    ("blocks along the first", later((64, 2, 3), axis=0), (64, 6), ((-2, 32),)),
    ("divide the first", later((64, 6), axis=0), (2, 32, 3, 2), ((-3, 32),)),
    ("a partial block stays", later((2, 3, 40)), (6, 40), ((-1, 32),)),
    ("two-dimensional blocks", later((64, 32), "mxfp4_2d"), (2, 32, 32), ((-2, 32), (-1, 32))),
    ("row-wise", later((4, 40), "float8_rowwise_e4m3"), (2, 2, 1, 40), ((-1, WHOLE),)),
    ("one tensor scale", later((4, 32), "nvfp4"), (2, 64), ((-1, 16),)),
    (
        "tensor-wise",
        later((4, 6), "float8_tensorwise_e4m3"),
        (3, 1, 8),
        ((-3, WHOLE), (-2, WHOLE), (-1, WHOLE)),
    ),
    ("as it is", later((1, 1)), (1, 1), ((-1, 32),)),
    ("divide no rows", later((0, 64)), (0, 2, 32), ((-1, 32),)),
]


@pytest.mark.slow(but="divide|the blocked|one tensor scale|two-dim|as it is")
@pytest.mark.parametrize(
    ("make", "shape", "blocks"), [c[1:] for c in RESHAPES], ids=[c[0] for c in RESHAPES]
)
def test_reshape(make: Callable[[], MXArray], shape: tuple[int, ...], blocks: Any):
    x = make()
    y = x.reshape(shape)
    assert (y.shape, y.blocks) == (shape, blocks)
    np.testing.assert_array_equal(y.dequantize(), x.dequantize().reshape(shape))


ROWWISE = "float8_rowwise_e4m3"


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (later((4, 64)), (4, 4, 16)),
        (later((4, 40)), (160,)),
        (later((4, 40)), (2, 80)),
        (later((3, 96)), (3, 2, 48)),
        (later((64, 4), axis=0), (256,)),
        (later((64, 64), "mxfp4_2d"), (4096,)),
        (later((4, 40), ROWWISE), (160,)),
        (later((4, 40), ROWWISE), (4, 2, 20)),
        (later((0, 64)), (64, 0)),
        (later((4, 1)), (4,)),
    ],
)
def test_what_would_cut_blocks(make: Callable[[], MXArray], shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="would cut blocks"):
        make().reshape(shape)


def with_tensor_scales(shape: tuple[int, ...], scales: tuple[int, ...]) -> MXArray:
    """Different ones."""
    numbers = jnp.arange(1.0, 1 + np.prod(scales)).reshape(scales)
    return dataclasses.replace(array(shape, "nvfp4"), tensor_scale=numbers)


@pytest.mark.parametrize(
    ("shape", "wanted", "before", "after"),
    [
        # One for each matrix: its axis may move, be joined and be divided; others may too.
        ((2, 4, 32), (2, 1, 4, 32), (2, 1, 1), (2, 1, 1, 1)),
        ((2, 3, 4, 32), (6, 4, 32), (2, 3, 1, 1), (6, 1, 1)),
        ((2, 3, 4, 32), (6, 4, 32), (2, 1, 1, 1), (6, 1, 1)),
        ((6, 4, 32), (2, 3, 4, 32), (6, 1, 1), (2, 3, 1, 1)),
        ((2, 4, 32), (8, 32), (2, 1, 1), (8, 1)),
        ((2, 4, 32), (2, 128), (2, 1, 1), (2, 1)),
        ((2, 4, 32), (2, 4, 32), (2, 1, 1), (2, 1, 1)),
    ],
)
def test_tensor_scales_of_a_reshape(shape: Any, wanted: Any, before: Any, after: Any):
    x = with_tensor_scales(shape, before)
    y = x.reshape(wanted)
    assert y.tensor_scale is not None and y.tensor_scale.shape == after
    np.testing.assert_array_equal(y.dequantize(), x.dequantize().reshape(wanted))


def test_a_tensor_scale_that_changes_within_blocks_is_cut():
    with pytest.raises(ValueError, match="would cut blocks"):
        with_tensor_scales((2, 128), (2, 1)).reshape(256)


@pytest.mark.parametrize(
    ("shape", "wanted", "error"),
    [
        ((4, 64), (5, -1), ValueError),
        ((1, 1), (-1, -1), ValueError),
        ((4, 64), (0, -1), ValueError),
        ((4, 64), (-4, -64), ValueError),
        ((4, 64), (4, 63), ValueError),
        ((4, 64), (4.0, 64), TypeError),
    ],
)
def test_shapes_that_are_none(shape: Any, wanted: Any, error: type[Exception]):
    with pytest.raises(error, match=r"needs a shape of size=|lengths must be ints"):
        array(shape).reshape(wanted)


def test_jnp_reshape_keeps_codes():
    """JAX hands an MXArray's reshape to the MXArray: nothing is dequantized without a word."""
    x = array((2, 3, 64))
    y = jnp.reshape(x, (6, 64))
    assert isinstance(y, MXArray) and x.reshape(-1, 32).shape == (12, 32)
    with pytest.raises(ValueError, match="would cut blocks"):
        jnp.reshape(y, (24, 16))
    with pytest.raises(ValueError, match=r"order='C' alone, got \{'order': 'F'\}"):
        x.reshape((6, 64), order="F")


@pytest.mark.slow
def test_reshape_passes_gradients():
    def loss(x: jax.Array) -> jax.Array:
        return (mx_jax.quantize(x, "mxfp4").reshape(2, 2, 32).dequantize() ** 2).sum()

    x = jnp.linspace(-1.0, 1.0, 128).reshape(4, 32)
    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * mx_jax.cast(x, "mxfp4"))


def test_methods_that_left_name_what_takes_their_place():
    x = array((4, 32))
    with pytest.raises(AttributeError, match=r"left mx_jax in 0\.2: nn\.KVCache takes new rows"):
        x.dynamic_update_slice(x, (0, 0))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"the values have it, x.dequantize\(\).at"):
        x.at[0].set(x[0])  # pyright: ignore[reportAttributeAccessIssue]
