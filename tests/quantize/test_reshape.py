"""Reshaping keeps blocks whole, or says so; blocks are written into an array and nothing moves."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import MXArray
from mx_jax.formats import WHOLE


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
]


@pytest.mark.by_default("divide|the blocked|one tensor scale|two-dim|as it is")
@pytest.mark.parametrize(
    ("make", "shape", "blocks"), [c[1:] for c in RESHAPES], ids=[c[0] for c in RESHAPES]
)
def test_reshape(make: Callable[[], MXArray], shape: tuple[int, ...], blocks: Any):
    x = make()
    y = x.reshape(shape)
    assert (y.shape, y.blocks) == (shape, blocks)
    np.testing.assert_array_equal(y.dequantize(), x.dequantize().reshape(shape))
    np.testing.assert_array_equal(y.reshape(-1).codes if len(shape) == 1 else y.codes, y.codes)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (later((3, 64)), (12, 16)),
        (later((3, 40)), (120,)),
        (later((64, 3), axis=0), (192,)),
        (later((64, 64), "mxfp4_2d"), (4096,)),
        (later((4, 40), "float8_rowwise_e4m3"), (160,)),
        (later((4, 40), "float8_rowwise_e4m3"), (4, 2, 20)),
        (later((0, 64)), (64, 0)),
    ],
    ids=lambda value: str(getattr(value, "args", value)),
)
def test_blocks_that_would_be_cut(make: Callable[[], MXArray], shape: tuple[int, ...]):
    with pytest.raises(
        ValueError, match=r"MXArray.reshape: .* would cut blocks.* dequantize\(\) first"
    ):
        make().reshape(shape)


def test_bad_shapes():
    x = array((3, 64))
    with pytest.raises(ValueError, match=r"needs a shape of size=192, got shape=\(5, -1\)"):
        x.reshape(5, -1)
    with pytest.raises(TypeError, match="lengths must be ints, got shape="):
        x.reshape(3, 64.0)
    with pytest.raises(ValueError, match=r"order='C' alone, got \{'order': 'F'\}"):
        x.reshape((3, 64), order="F")
    assert x.reshape(-1, 32).shape == (6, 32)


def test_jnp_reshape_keeps_codes():
    """JAX hands an MXArray's reshape to the MXArray: nothing is dequantized without a word."""
    y = jnp.reshape(array((2, 3, 64)), (6, 64))
    assert isinstance(y, MXArray)
    with pytest.raises(ValueError, match="would cut blocks"):
        jnp.reshape(array((3, 64)), (12, 16))


@pytest.mark.slow
def test_reshape_passes_gradients_and_a_tensor_scale_for_each_matrix():
    def loss(x: jax.Array) -> jax.Array:
        return (mx_jax.quantize(x, "mxfp4").reshape(2, 2, 32).dequantize() ** 2).sum()

    x = jnp.linspace(-1.0, 1.0, 128).reshape(4, 32)
    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * mx_jax.cast(x, "mxfp4"))
    q = jax.vmap(lambda x: mx_jax.quantize(x, "nvfp4"))(x.reshape(2, 2, 32))
    y = q.reshape(2, 1, 2, 32)
    assert y.tensor_scale is not None and y.tensor_scale.shape == (2, 1, 1, 1)
    np.testing.assert_array_equal(y.dequantize()[:, 0], q.dequantize())
    np.testing.assert_array_equal(q.reshape(4, 32).dequantize(), q.dequantize().reshape(4, 32))


FORMATS = ["mxfp8_e4m3", "mxfp4", "nvfp4_one_level", "float8_rowwise_e4m3"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_cache_takes_rows(format: str):
    """As a scanned decoder fills it: one row at a traced place, codes and scales as they came."""
    rows = np.random.default_rng(1).normal(size=(3, 2, 64)).astype(np.float32)
    empty = mx_jax.quantize(jnp.zeros((2, 5, 64)), format)

    @jax.jit
    def fill(cache: MXArray, rows: jax.Array) -> MXArray:
        def step(cache, at):
            row = mx_jax.quantize(jax.lax.dynamic_index_in_dim(rows, at)[0][:, None], format)
            return cache.dynamic_update_slice(row, (0, at + 1, 0)), None

        return jax.lax.scan(step, cache, jnp.arange(3))[0]

    filled = fill(empty, rows)
    for t in range(3):
        want = mx_jax.quantize(rows[t], format)
        np.testing.assert_array_equal(filled.codes[:, t + 1], want.codes)
        np.testing.assert_array_equal(filled.scales[:, t + 1], want.scales)
    for untouched in (0, 4):
        np.testing.assert_array_equal(filled.codes[:, untouched], empty.codes[:, untouched])
        np.testing.assert_array_equal(filled.scales[:, untouched], empty.scales[:, untouched])


def test_whole_blocks_along_a_blocked_axis():
    cache, block = array((2, 128)), array((2, 32))
    write = jax.jit(lambda cache, block, start: cache.dynamic_update_slice(block, (0, start)))
    got = write(cache, block, 64)
    np.testing.assert_array_equal(got.codes, cache.codes.at[:, 64:96].set(block.codes))
    np.testing.assert_array_equal(got.scales, cache.scales.at[:, 2:3].set(block.scales))
    # Between blocks only: known, it is refused; traced, what it writes is NaN.
    whole = cache.dequantize()
    for update, start, first in ((block, 48, 32), (array((2, 64)), 33, 32), (block, 127, 96)):
        torn, last = write(cache, update, start).dequantize(), first + update.shape[1]
        assert bool(jnp.isnan(torn[:, first:last]).all())
        np.testing.assert_array_equal(torn[:, :first], whole[:, :first])
        np.testing.assert_array_equal(torn[:, last:], whole[:, last:])
    with pytest.raises(ValueError, match=r"between blocks of 32, got start=48 on axis=-1"):
        cache.dynamic_update_slice(block, (0, 48))
    with pytest.raises(ValueError, match=r"written whole, got shape=\(2, 128\), update.shape="):
        cache.dynamic_update_slice(array((2, 20)), (0, 0))
    with pytest.raises(ValueError, match="a start for each axis, got 1 starts"):
        cache.dynamic_update_slice(block, (0,))


def test_at_sets_whole_blocks():
    x, block = array((4, 128)), array((4, 32))
    y = x.at[:, 32:64].set(block)
    np.testing.assert_array_equal(y[:, 32:64].dequantize(), block.dequantize())
    np.testing.assert_array_equal(y[:, 64:].dequantize(), x[:, 64:].dequantize())
    row = jax.jit(lambda x, i, row: x.at[i].set(row))(x, 2, array((128,)))
    np.testing.assert_array_equal(row[2].dequantize(), array((128,)).dequantize())
    np.testing.assert_array_equal(row.codes[:2], x.codes[:2])


def test_what_at_refuses():
    x = array((4, 128))
    with pytest.raises(
        TypeError, match=r"MXArray.at\[\].set: needs an MXArray, got values of type"
    ):
        x.at[0].set(jnp.zeros(128))
    with pytest.raises(IndexError, match="between blocks"):
        x.at[:, 3:35].set(array((4, 32)))
    for wrong in (array((3, 32)), array((4, 32), "mxfp4"), array((32, 32), axis=0)):
        with pytest.raises(ValueError, match=r"format=mxfp8_e4m3, shape=\(4, 32\), blocks="):
            x.at[:, :32].set(wrong)


def test_a_tensor_scale_is_never_left_behind():
    x = array((4, 32), "nvfp4")
    same = mx_jax.quantize(jnp.ones((1, 32)), "nvfp4", tensor_scale=x.tensor_scale)
    other = mx_jax.quantize(jnp.ones((1, 32)), "nvfp4")
    np.testing.assert_array_equal(x.at[1:2].set(same)[1:2].dequantize(), same.dequantize())
    with pytest.raises(ValueError, match=r"quantize them with tensor_scale=x.tensor_scale"):
        x.at[1:2].set(other)
    traced = jax.jit(lambda x, row: x.at[1:2].set(row))(x, other).dequantize()
    assert bool(jnp.isnan(traced[1]).all()) and bool(jnp.isfinite(traced[2:]).all())


def test_tensor_scales_of_some_matrices_are_not_enough():
    """One for each matrix: all of them have to be the array's."""
    nvfp4 = mx_jax.quantize(jnp.ones((2, 4, 32)), "nvfp4", tensor_scale=jnp.ones((2, 1, 1)))
    row = mx_jax.quantize(jnp.ones((2, 1, 32)), "nvfp4", tensor_scale=jnp.float32([[[1]], [[2]]]))
    with pytest.raises(ValueError, match="must be under the array's tensor scale"):
        nvfp4.at[:, :1].set(row)


def test_rows_under_tensor_scales_of_their_own():
    """A row is written under the scale of its place, and under no other row's."""
    rows = jnp.linspace(-1.0, 1.0, 96).reshape(3, 32) * jnp.array([[1e-4], [1.0], [1e4]])
    x = jax.vmap(lambda row: mx_jax.quantize(row, "nvfp4"))(rows)
    assert x.tensor_scale is not None and x.tensor_scale.shape == (3, 1)
    new = mx_jax.quantize(-rows[1], "nvfp4", tensor_scale=x.tensor_scale[1])
    y = x.at[1].set(new)
    np.testing.assert_array_equal(y[1].dequantize(), new.dequantize())
    np.testing.assert_array_equal(y.dequantize()[::2], x.dequantize()[::2])
    with pytest.raises(ValueError, match=r"under the array's tensor scale"):
        x.at[2].set(new)
