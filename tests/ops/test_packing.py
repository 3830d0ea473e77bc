"""Weights packed ahead of time: the bits of unpacked ones, wherever an MXArray may go.

float8 under scales of whole rows is packed for the kernels of MXFP8, its scales for the sums.
"""

import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint, formats, recipes
from mx_jax.axes import Axes
from mx_jax.backends.calls import OperandType
from mx_jax.backends.cpu_ffi import CPU_FFI, library, products
from mx_jax.backends.select import only_backend
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import store_weights
from mx_jax.packed import PackedMXArray
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library
from tests.quick import quick

FORMATS = (*formats.MX_FORMATS, formats.NVFP4)
ROWS, TENSOR = "float8_rowwise_e4m3", "float8_tensorwise_e5m2"
MXFP4 = recipes.weight_only("mxfp4")


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def pack(x: MXArray, **options) -> PackedMXArray:
    packed = mx_jax.pack_weights(x, **options)
    assert isinstance(packed, PackedMXArray)
    return packed


def num_calls(function, *args) -> int:
    return function.lower(*args).as_text().count(f"@{products.PACKED_MATMUL}(")


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize(
    ("format", "bits"), [("mxfp4", 4), ("mxfp6_e2m3", 6), ("mxfp6_e3m2", 6), ("mxint8", 8)]
)
def test_packed_weights_take_the_bits_of_their_codes(format: str, bits: int):
    packed = pack(mx_jax.quantize(np.ones((64, 128), np.float32), format))
    # And for each 32 rows 64 bytes that sum the panel up.
    assert packed.nbytes == 64 * 128 * bits // 8 + 64 * 128 // 32 + 2 * 64
    assert f"{format}, shape=(64, 128), dtype=float32, backend=cpu_ffi" in repr(packed)
    assert_bitwise_equal(pickle.loads(pickle.dumps(packed)).dequantize(), packed.dequantize())


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_weights_of_no_rows(format: BlockFormat, tmp_path: Path):
    x = mx_jax.quantize(np.ones((0, 128), np.float32), format)
    packed = pack(x)
    assert packed.unpack().codes.shape == (0, 128) and packed.unpack().blocks == x.blocks
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, {"x": packed})
    assert checkpoint.load(path)["x"].scales.shape == x.scales.shape


@needs_library
@pytest.mark.usefixtures("insist")
def test_panels_of_another_version_are_refused():
    x, packed = draw(1, 64), pack(mx_jax.quantize(draw(64, 40), "mxfp4", axis=0))
    assert jnp.isfinite(mx_jax.matmul(x, packed, recipe=MXFP4)).all()
    arrays = dataclasses.replace(packed.arrays, bytes=packed.arrays.bytes.at[0, 0].set(1))
    other = dataclasses.replace(packed, arrays=arrays)
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"another version.*; pack them again"
    ):
        jax.block_until_ready(mx_jax.matmul(x, other, recipe=MXFP4))


@pytest.mark.slow(but=5)
@needs_library
@pytest.mark.usefixtures("insist", "kernels_alone")
@pytest.mark.parametrize("lhs", ["float32", "wide", "bfloat16", "same"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_packed_panels_of_any_kind(format: BlockFormat, lhs: str):
    """Ordinary panels beside one of any codes and one of extreme scales: as 70 rows have them."""
    rng = np.random.default_rng(3)
    case = MatmulCase(lhs=format, rhs=format, m=(70,), n=(170,), k=(600,))
    left, right = case.operands(rng)
    assert isinstance(right, MXArray) and isinstance(left, MXArray)
    codes, scales = np.array(right.codes), np.array(right.scales)
    codes[32:64] = rng.integers(0, 2**format.element.bits, codes[32:64].shape)
    scales[96:128] = rng.integers(0, 256, scales[96:128].shape)
    right = dataclasses.replace(right, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    rows = left if lhs == "same" else left.dequantize("bfloat16" if lhs == "bfloat16" else None)
    if lhs == "wide":
        # Some rows have ordinary values alone, others tiny or huge ones.
        exponents = rng.integers(-105, 105, rows.shape) * (np.arange(70) % 3 == 1)[:, None]
        rows = jnp.asarray(np.ldexp(np.asarray(rows), exponents), jnp.float32)
    packed, backend, call = pack(right), CPU_FFI, case.call
    assert_bitwise_equal(packed.unpack().codes, right.codes, what="codes")
    if lhs != "same":
        call = dataclasses.replace(call, lhs=OperandType.of(rows, call.lhs.axes))
    # NumPy cuts rows: for JAX each cut would be a program.
    rows, many = jax.tree.map(np.asarray, (rows, backend.run(call, rows, right)))
    for first, m in [(1, 1), (2, 2), (5, 4), *((0, m) for m in (1, 2, 6, 8, 9, 16, 40))]:
        few = dataclasses.replace(call, lhs=dataclasses.replace(call.lhs, shape=(m, 600)))
        actual = backend.run(few, rows[first : first + m], packed)
        what = f"rows {first}, {m} of them"
        # No rule of arithmetic says which NaN two numbers give.
        assert_bitwise_equal(actual, many[first : first + m], what=what, any_nan=True)


# Where an MXArray may go --------------------------------------------------------------------------


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp6_e2m3", "float8_rowwise_e4m3"])
def test_a_transposed_weight_is_packed_as_it_was(format: str):
    """`[out, in]`, as others store it, becomes the kernel `[in, out]` without moving a byte."""
    stored = mx_jax.quantize(draw(48, 64), format, axis=1)
    kernel, transposed = pack(stored.T), pack(stored).T
    assert isinstance(transposed, PackedMXArray) and transposed.shape == kernel.shape == (64, 48)
    assert transposed.blocks == kernel.blocks and transposed.mT.shape == (48, 64)
    assert_bitwise_equal(transposed.unpack().codes, stored.T.codes, what="codes")
    assert_bitwise_equal(transposed.T.unpack().codes, stored.codes, what="codes")
    recipe, x = recipes.weight_only(format), draw(3, 64, seed=1)
    product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe))
    assert num_calls(product, x, transposed) == num_calls(product, x, kernel) == 1
    assert_bitwise_equal(product(x, transposed), product(x, kernel), what="product")


@needs_library
def test_axes_that_are_no_whole_group_are_unpacked_to_be_permuted():
    stored = mx_jax.quantize(draw(2, 5, 32, 64), "mxfp4", axis=-1)
    packed = mx_jax.pack_weights(stored, num_batch=1)
    assert isinstance(packed, PackedMXArray)
    transposed = packed.transpose(0, 3, 1, 2)
    assert isinstance(transposed, PackedMXArray) and transposed.shape == (2, 64, 5, 32)
    assert_bitwise_equal(
        transposed.unpack().codes, stored.transpose(0, 3, 1, 2).codes, what="codes"
    )
    for permuted, expected in ((packed.mT, stored.mT), (packed.T, stored.T)):
        assert isinstance(permuted, mx_jax.MXArray)
        assert_bitwise_equal(permuted.codes, expected.codes, what="codes")


@needs_library
@pytest.mark.usefixtures("insist")
def test_other_axes_are_unpacked():
    """A transposed use, a left operand, a dequantized one: slow, and right."""
    kernel = mx_jax.quantize(draw(64, 64), "mxfp4", axis=1)
    packed, x = pack(kernel), draw(3, 64)
    recipe = recipes.high_precision()
    with pytest.raises(ValueError, match="is contracted along axis=0"):
        mx_jax.dot_general(x, packed, (((1,), (0,)), ((), ())), recipe=recipe)
    left = mx_jax.dot_general(packed, x, (((1,), (1,)), ((), ())), recipe=recipe)
    expected = mx_jax.dot_general(kernel, x, (((1,), (1,)), ((), ())), recipe=recipe)
    assert_bitwise_equal(left, expected, what="product")
    assert_bitwise_equal(mx_jax.dequantize(packed), kernel.dequantize(), what="values")
    with pytest.warns(UserWarning, match="is unpacked and dequantized, which is slow: only mx_"):
        assert_bitwise_equal(jnp.asarray(packed), kernel.dequantize(), what="values")
    assert_bitwise_equal(packed[3:5].codes, kernel[3:5].codes, what="codes")


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize("format", ["nvfp4", ROWS])
def test_scan_over_layers(format: str):
    """Stacked by vmap or packed as one array."""
    kernels = jax.vmap(lambda w: mx_jax.quantize(w, format, axis=0))(draw(4, 64, 64) / 8)
    recipe = recipes.weight_only(format)

    @jax.jit
    def run(x, w):
        def layer(x, w):
            return mx_jax.matmul(x, w, recipe=recipe), None

        return jax.lax.scan(layer, x, w)[0]

    x, expected = draw(3, 64), draw(3, 64)
    for kernel in kernels.dequantize():
        expected = expected @ kernel
    for stacked in (jax.vmap(mx_jax.pack_weights)(kernels), pack(kernels, num_batch=1)):
        assert num_calls(run, x, stacked) == 1
        np.testing.assert_allclose(run(x, stacked), expected, atol=1e-5)


# Many rows ----------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("isa", library.ISAS)
@pytest.mark.parametrize("format", ["mxfp4", ROWS])
def test_many_rows_are_multiplied_too(format: str, isa: str, monkeypatch: pytest.MonkeyPatch):
    """By XLA's dot, where an instruction set would be slower; nobody is told to pack otherwise."""
    loaded = library.load()
    assert not isinstance(loaded, str)
    monkeypatch.setattr(library, "load", lambda: dataclasses.replace(loaded, isa=isa))
    kernel, x = mx_jax.quantize(draw(64, 640), format, axis=0), draw(600, 64, seed=1)
    packed, recipe = pack(kernel), recipes.weight_only(format)
    product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe))
    assert num_calls(product, x, packed) == 0
    assert num_calls(product, x[: products.FLOAT32_ROWS[isa]], packed) == 1
    with only_backend("reference"):
        expected = quick(functools.partial(mx_jax.matmul, recipe=recipe))(x, kernel)
    assert_bitwise_equal(product(x, packed), expected, what="product")
    with mx_jax.testing.target("cpu"):
        (row,) = mx_jax.inspect.explain(product, x, packed).rows
    assert row.backend == "cpu_ffi" and f"XLA's dot: {isa} would multiply in float32" in row.how


@needs_library
@pytest.mark.parametrize("packs", [False, True])
def test_many_rows_of_experts(packs: bool, monkeypatch: pytest.MonkeyPatch):
    """Each tile by XLA's dot: not all rows by each matrix, so unused experts are not seen."""
    monkeypatch.setattr(products, "FLOAT32_ROWS", dict.fromkeys(library.ISAS, 1))
    experts, x = draw(3, 64, 40).at[1].set(jnp.nan), draw(100, 64, seed=1)
    stored = jax.vmap(lambda w: mx_jax.quantize(w, "mxfp4", axis=0))(experts)
    weights = mx_jax.pack_weights(stored, contracting=1, num_batch=1) if packs else stored
    product = jax.jit(lambda x, w, n: mx_jax.ragged_dot(x, w, n, recipe=MXFP4))
    sizes = jnp.asarray([70, 0, 30])
    text = product.lower(x, weights, sizes).as_text()
    assert "ragged_dot" not in text and "cpu_matmul" not in text
    expected = np.concatenate([x[:70] @ stored[0].dequantize(), x[70:] @ stored[2].dequantize()])
    np.testing.assert_allclose(product(x, weights, sizes), expected, rtol=1e-5, atol=1e-5)


# Where nothing is packed --------------------------------------------------------------------------


def test_without_a_backend_that_packs():
    kernel = mx_jax.quantize(draw(64, 40), "mxfp4", axis=0)
    with only_backend("reference"):
        assert mx_jax.pack_weights(kernel) is kernel


@needs_library
def test_packed_elsewhere():
    """Under another backend weights are unpacked, and the reference multiplies."""
    kernel, x = mx_jax.quantize(draw(64, 40), "mxfp4", axis=0), draw(3, 64)
    with only_backend("cpu_ffi"):
        packed = pack(kernel)
        assert mx_jax.pack_weights(packed) is packed
    with only_backend("reference"):
        product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=MXFP4))
        complaint = r"unpacked at every call.*backend cpu_ffi, and reference takes this product"
        with pytest.warns(UserWarning, match=complaint):
            assert num_calls(product, x, packed) == 0
            assert_bitwise_equal(product(x, packed), product(x, kernel), what="product")


@needs_library
@pytest.mark.parametrize(
    ("x", "options", "complaint"),
    [
        (jnp.ones((64, 40)), {}, "needs an MXArray, got weights of type ArrayImpl; quantize it"),
        ((64, 40), dict(contracting=1), "blocks lie along the last, got contracting=.1,., blocks"),
        ((64, 40), dict(contracting=7), "axis out of range, got contracting=7"),
        ((64, 40), dict(num_batch=1), "come after the batch axes, got num_batch=1, contracting=.0"),
        ((64, 40), dict(contracting=1.5), r"contracting must be an int, got.*=1\.5"),
        ((64, 40), dict(num_batch=0.0), r"num_batch must be an int, got.*=0\.0"),
        ((64, 40), dict(recipe=recipes.mxfp8), "recipe must be a Recipe .call it: recipes are"),
    ],
)
def test_bad_input(x, options, complaint: str):
    if isinstance(x, tuple):
        x = mx_jax.quantize(draw(*x), "mxfp4", axis=0)
    with pytest.raises((TypeError, ValueError), match=f"pack_weights: .*{complaint}"):
        mx_jax.pack_weights(x, **options)


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize(
    ("shape", "format", "options", "complaint"),
    [
        ((64, 96), "float8_blockwise_e4m3", {}, "needs scales in e8m0 or e4m3"),
        ((8, 64, 40), "mxfp4", dict(axis=1), "contracted axes before or after all kept ones"),
        ((64,), "mxfp4", {}, "packs blocks along the last contracted axis"),
    ],
)
def test_what_it_does_not_pack(shape, format: str, options, complaint: str):
    """An only backend says why; elsewhere the weights come back as they are."""
    x = mx_jax.quantize(draw(*shape), format, **options)
    with pytest.raises(ValueError, match=f"cpu_ffi: .*{complaint}"):
        mx_jax.pack_weights(x)
    with only_backend(None):
        assert mx_jax.pack_weights(x) is x


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp8_e4m3", ROWS, TENSOR])
def test_rows_of_packed_weights(format: str):
    x = mx_jax.quantize(draw(70, 40), format)
    packed, indices = pack(x, contracting=1), jnp.asarray([[0, 69, 31], [32, 32, 80]])
    assert packed.takes
    looked_up = quick(PackedMXArray.take)(packed, indices)
    assert looked_up.shape == (2, 3, 40) and looked_up.format == x.format
    values = np.asarray(x.dequantize())
    np.testing.assert_array_equal(looked_up.dequantize(), values[np.minimum(indices, 69)])
    # Only the panels of these rows are unpacked.
    shapes = jax.make_jaxpr(lambda packed: packed.take(indices).codes)(packed)
    assert "u8[70,40]" not in str(shapes) and "u8[96,64]" not in str(shapes)
    if format != TENSOR:
        with pytest.raises(IndexError, match="axis=-2 is cut into blocks of"):
            pack(mx_jax.quantize(draw(64, 70), format, axis=0)).take(indices)


# Products of any axes, and scales of whole rows ---------------------------------------------------


def stored(w: jax.Array, recipe: recipes.Recipe, axes: tuple[int, ...], num_stacked: int) -> Any:
    """Weights quantized as products over these axes of each matrix do it."""
    kept = tuple(i for i in range(w.ndim - num_stacked) if i not in axes)
    place = Axes((), kept, axes)
    return store_weights(w, recipe, place, num_stacked=num_stacked, packed=False)


# Subscripts, shapes, contracted axes of a matrix, axes in front of it.
PRODUCTS = [
    ("tk,kn->tn", (3, 70), (70, 40), (0,), 0),
    ("btk,nk->btn", (2, 3, 70), (40, 70), (1,), 0),
    ("tk,khd->thd", (3, 64), (64, 4, 9), (0,), 0),
    ("thk,hkn->tn", (3, 2, 64), (2, 64, 40), (0, 1), 0),
    ("lk,lkn->ln", (5, 64), (5, 64, 40), (0,), 1),
    ("ltk,lnk->ltn", (5, 3, 64), (5, 40, 64), (1,), 1),
    ("kt,kn->tn", (64, 3), (64, 40), (0,), 0),
]


@pytest.mark.slow(but="mxfp4|rowwise")
@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", ROWS, TENSOR])
def test_any_product_of_weights(format: str):
    """A call each: the bits of unpacked weights; of scales that leave sums, float32's error."""
    whole = format in (ROWS, TENSOR)

    def product(subscripts: str, x: Any, w: Any, recipe: recipes.Recipe) -> jax.Array:
        return mx_jax.einsum(subscripts, x, w, recipe=recipe)

    for subscripts, x, w, axes, num_batch in PRODUCTS:
        each, left = recipes.weight_only(format), draw(*x, seed=1)
        kernel = stored(draw(*w), each, axes, num_batch)
        contracting = tuple(axis + num_batch for axis in axes)
        packed = pack(kernel, contracting=contracting, num_batch=num_batch)
        assert_bitwise_equal(packed.unpack().codes, kernel.codes, what=subscripts)
        assert_bitwise_equal(packed.unpack().scales, kernel.scales, what=subscripts)
        for recipe in (each, recipes.float8_rowwise()) if whole else (each,):
            compiled = quick(product, static_argnums=(0, 3))
            text = compiled.lower(subscripts, left, packed, recipe).as_text()
            assert text.count(f"@{products.PACKED_MATMUL}(") == 1, subscripts
            result = compiled(subscripts, left, packed, recipe)
            if not whole:
                expected = compiled(subscripts, left, kernel, recipe)
                assert_bitwise_equal(result, expected, what=subscripts)
                continue
            lhs = left
            if recipe.output.lhs is not None:  # as it quantizes weights
                k = tuple(i for i, letter in enumerate(subscripts.split(",")[0]) if letter in "hk")
                lhs = stored(left, recipe, k, 0).dequantize()
            both = np.asarray(lhs, np.float64), np.asarray(kernel.dequantize(), np.float64)
            size = np.einsum(subscripts, *map(np.abs, both))
            error = np.abs(np.asarray(result, np.float64) - np.einsum(subscripts, *both))
            assert (error <= 2.0**-21 * size).all(), (subscripts, recipe.name, (error / size).max())


@needs_library
@pytest.mark.usefixtures("insist")
def test_special_values():
    """NaN stays in its row; scales at both ends of float32 leave sums that are in range alone."""
    w = np.ones((3, 64), np.float32) * np.array([[1e-10], [1.0], [1e30]], np.float32)
    kernel = mx_jax.quantize(w, ROWS, axis=1)
    kernel = dataclasses.replace(kernel, codes=kernel.codes.at[1, 5].set(0x7F))
    recipe = recipes.weight_only(ROWS)
    x = jnp.full((1, 64), 1e6)
    result = np.asarray(mx_jax.matmul(x, pack(kernel.T), recipe=recipe))[0]
    np.testing.assert_allclose(result[[0, 2]], [64e-4, 64e36], rtol=1e-6)
    assert np.isnan(result[1])


@needs_library
def test_scales_that_end_within_a_product_are_not_packed():
    half = mx_jax.quantize(draw(2, 32, 8), ROWS, axis=1)
    with only_backend("cpu_ffi"):
        pack(half, contracting=1, num_batch=1)
    with only_backend("cpu_ffi"), pytest.raises(ValueError, match="whole along all contracted ax"):
        mx_jax.pack_weights(half, contracting=(0, 1))
