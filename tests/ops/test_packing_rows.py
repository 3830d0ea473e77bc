"""float8 under scales of whole rows, packed: the kernels of MXFP8, and the scales of the sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.axes import Axes
from mx_jax.backends.cpu_ffi import rejections
from mx_jax.backends.select import only_backend
from mx_jax.mxarray import MXArray
from mx_jax.ops.packing import store_weights
from mx_jax.packed import PackedMXArray
from mx_jax.recipes import weight_only
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

pytestmark = [needs_library, pytest.mark.usefixtures("insist")]
ROWS, TENSOR = "float8_rowwise_e4m3", "float8_tensorwise_e5m2"


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def stored(
    w: jax.Array, recipe: recipes.Recipe, axes: tuple[int, ...], num_stacked: int = 0
) -> MXArray:
    """Weights quantized as products over these axes of each matrix do it."""
    kept = tuple(i for i in range(w.ndim - num_stacked) if i not in axes)
    place = Axes((), kept, axes)
    found = store_weights(w, recipe, place, num_stacked=num_stacked, packed=False)
    assert isinstance(found, MXArray)
    return found


def pack(x: MXArray, **options: Any) -> PackedMXArray:
    packed = mx_jax.pack_weights(x, **options)
    assert isinstance(packed, PackedMXArray)
    return packed


def assert_same(x: MXArray, y: Any, what: str) -> None:
    assert isinstance(y, MXArray) and (x.shape, x.blocks) == (y.shape, y.blocks), what
    assert_bitwise_equal(y.codes, x.codes, what=what)
    assert_bitwise_equal(y.scales, x.scales, what=what)


PRODUCTS = [
    ("tk,kn->tn", (3, 70), (70, 40), (0,), {}),
    ("btk,nk->btn", (2, 3, 70), (40, 70), (1,), {}),
    ("thk,hkn->tn", (3, 2, 35), (2, 35, 40), (0, 1), {}),
    ("tk,khd->thd", (3, 64), (64, 4, 9), (0,), {}),
    ("ltk,lkn->ltn", (2, 3, 64), (2, 64, 40), (0,), {"num_batch": 1}),
]


@pytest.mark.sweep(reason="a C++ library, the same one, computes these bits")
@pytest.mark.parametrize("format", [ROWS, TENSOR])
def test_products_of_any_axes(format: str):
    """In high precision and in float8; a call each, within float32's error of the exact product."""

    def product(subscripts: str, x: Any, w: Any, recipe: recipes.Recipe) -> jax.Array:
        return mx_jax.einsum(subscripts, x, w, recipe=recipe)

    for subscripts, x, w, axes, options in PRODUCTS:
        kernel = stored(draw(*w), weight_only(format), axes, options.get("num_batch", 0))
        contracting = tuple(axis + options.get("num_batch", 0) for axis in axes)
        packed, left = pack(kernel, contracting=contracting, **options), draw(*x, seed=1)
        assert_same(kernel, packed.unpack(), subscripts)
        for recipe in (weight_only(format), recipes.float8_rowwise()):
            compiled = jax.jit(product, static_argnums=(0, 3))
            text = compiled.lower(subscripts, left, packed, recipe).as_text()
            assert text.count(f"@{rejections.PACKED_MATMUL}(") == 1, subscripts
            found = np.asarray(compiled(subscripts, left, packed, recipe), np.float64)
            lhs = left
            if recipe.fwd.lhs is not None:  # as it quantizes weights
                k = tuple(i for i, letter in enumerate(subscripts.split(",")[0]) if letter in "hk")
                lhs = stored(left, recipe, k).dequantize()
            both = np.asarray(lhs, np.float64), np.asarray(kernel.dequantize(), np.float64)
            size = np.einsum(subscripts, *map(np.abs, both))
            error = np.abs(found - np.einsum(subscripts, *both))
            assert (error <= 2.0**-21 * size).all(), (subscripts, recipe.name, (error / size).max())


def test_scan_and_vmap_slice_it():
    kernels = stored(draw(3, 64, 64) / 8, weight_only(ROWS), (0,), 1)
    stacked, x = pack(kernels, contracting=1, num_batch=1), draw(2, 64)
    recipe = weight_only(ROWS)

    @jax.jit
    def run(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return mx_jax.matmul(x, w, recipe=recipe), None

        each = jax.vmap(lambda w: mx_jax.matmul(x, w, recipe=recipe))(w)
        return jax.lax.scan(layer, x, w)[0], each

    assert run.lower(x, stacked).as_text().count(f"@{rejections.PACKED_MATMUL}(") == 2
    last, each = run(x, stacked)
    values = np.asarray(kernels.dequantize(), np.float64)
    np.testing.assert_allclose(last, np.asarray(x) @ values[0] @ values[1] @ values[2], atol=1e-5)
    np.testing.assert_allclose(each, np.asarray(x) @ values, atol=1e-5)


def test_special_values():
    """NaN stays in its row; scales at both ends of float32 leave sums that are in range alone."""
    w = np.ones((3, 64), np.float32) * np.array([[1e-10], [1.0], [1e30]], np.float32)
    kernel = mx_jax.quantize(w, ROWS, axis=1)
    kernel = MXArray(**(vars(kernel) | {"codes": kernel.codes.at[1, 5].set(0x7F)}))
    recipe = weight_only(ROWS)
    x = jnp.full((1, 64), 1e6)
    found = np.asarray(mx_jax.matmul(x, pack(kernel.T), recipe=recipe))[0]
    np.testing.assert_allclose(found[[0, 2]], [64e-4, 64e36], rtol=1e-6)
    assert np.isnan(found[1])


def test_rows_are_looked_up_one_by_one():
    kernel = mx_jax.quantize(draw(70, 40), ROWS, axis=1)
    packed, indices = pack(kernel), jnp.array([[3, 69], [0, 200]])
    assert packed.takes
    found = packed.take(indices)
    clipped = np.minimum(np.asarray(indices), 69)
    assert_same(kernel[clipped], found, "rows")
    whole = stored(draw(70, 40), weight_only(TENSOR), (1,))
    rows = pack(whole, contracting=1).take(indices).dequantize()
    np.testing.assert_array_equal(rows, np.asarray(whole.dequantize())[clipped])


def test_what_is_not_packed():
    """Scales that end within a product, and activations that no kernel multiplies by them."""
    half = mx_jax.quantize(draw(2, 32, 8), ROWS, axis=1)
    assert isinstance(mx_jax.pack_weights(half, contracting=1, num_batch=1), PackedMXArray)
    with only_backend("cpu_ffi"), pytest.raises(ValueError, match="whole along all contracted ax"):
        mx_jax.pack_weights(half, contracting=(0, 1))
