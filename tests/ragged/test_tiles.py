"""The product of groups on CPUs: tiles of rows by the compiled handler, each by its own matrix."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.packed import PackedMXArray
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library, slow
from tests.quick import quick, with_gradients

M, K, N, GROUPS = 80, 64, 48, 4
# Tiles of 32 rows: some groups end within one, some take several, some none, rows are left over.
SIZES = {
    "within tiles": (5, 0, 40, 20),
    "several tiles": (0, 71, 0, 9),
    "nothing": (0, 0, 0, 0),
    "whole tiles": (32, 32, 16, 0),
}

pytestmark = needs_library


@pytest.fixture(autouse=True)
def _one_device():
    # The tests have eight devices, of which the handlers take one.
    with mx_jax.testing.target("cpu"):
        yield


def draw(rng: np.random.Generator):
    shapes = (M, K), (GROUPS, K, N), (M, N)
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


@functools.cache
def products(recipe, backend=None):
    """The product and both gradients."""

    @quick
    def run(lhs, rhs, g, sizes):
        with mx_jax.only_backend(backend):
            product = functools.partial(ragged_dot, group_sizes=sizes, recipe=recipe)
            return with_gradients(product)(lhs, rhs, g)

    return run


# Of blocks of several rows each row has the scales: the reference's.
SQUARE = recipes.mxfp4().with_(name="square", activations="mxfp4_2d")


@pytest.mark.slow(but="mxfp8|square-within")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", SQUARE, slow("nvfp4")], ids=str)
def test_as_the_reference(recipe, sizes, rng: np.random.Generator):
    operands = *draw(rng), np.array(sizes, np.int32)
    actual = products(recipe)(*operands)
    expected = products(recipe, "reference")(*operands)
    # Sums of at most 80 products of magnitude 10 or so, in another order.
    for result, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-4)
    rows = sum(sizes)
    assert not actual[0][rows:].any() and not actual[1][rows:].any()


def test_each_group_has_the_bits_of_its_product(rng: np.random.Generator):
    lhs, rhs, _ = draw(rng)
    sizes = SIZES["within tiles"]
    rhs = mx_jax.quantize(rhs, "mxfp8_e4m3", axis=1)
    actual = quick(lambda x, w: ragged_dot(x, w, np.array(sizes, np.int32), recipe="mxfp8"))(
        lhs, rhs
    )
    lhs, rhs, actual = np.asarray(lhs), rhs, np.asarray(actual)
    alone = quick(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        assert_bitwise_equal(actual[rows], alone(lhs[rows], rhs[group]), what=f"group {group}")
        start += size


def test_what_runs_is_the_handler_as_often_as_there_are_tiles(rng: np.random.Generator):
    def product(lhs, rhs, sizes):
        return ragged_dot(lhs, rhs, sizes, recipe="mxfp4")

    lhs, rhs, _ = draw(rng)
    text = jax.jit(product).lower(lhs, rhs, np.array(SIZES["nothing"], np.int32)).as_text()
    assert "mx_jax_cpu_matmul" in text and "stablehlo.while" in text
    assert not re.search(r"ragged_dot|dot_general", text)
    reported = mx_jax.inspect.explain(product, lhs, rhs, np.array(SIZES["nothing"], np.int32))
    assert (
        "ragged product mxfp4 [80, 64] x mxfp4 [4, 64, 48], 4 groups, to float32 -> cpu_ffi"
    ) in str(reported)
    run = functools.partial(ragged_dot, recipe=SQUARE)
    reported = mx_jax.inspect.explain(run, lhs, rhs, np.array(SIZES["nothing"], np.int32))
    assert "multiplies groups whose blocks have one row, got lhs=mxfp4_2d" in str(reported)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_packed_experts_give_the_same_bits(format, rng: np.random.Generator):
    lhs, rhs, g = draw(rng)
    sizes, recipe = np.array(SIZES["within tiles"], np.int32), recipes.weight_only(format)
    stored = jax.vmap(functools.partial(mx_jax.quantize, format=format, axis=0))(jnp.asarray(rhs))
    packed = mx_jax.pack_weights(stored, contracting=1, num_batch=1)
    assert isinstance(packed, PackedMXArray)

    def two(x, w):
        y, vjp = jax.vjp(lambda x: ragged_dot(x, w, sizes, recipe=recipe), x)
        return y, *vjp(g)

    assert "mx_jax_cpu_matmul_packed" in jax.jit(two).lower(lhs, packed).as_text()
    for result, wanted in zip(quick(two)(lhs, packed), quick(two)(lhs, stored), strict=True):
        assert_bitwise_equal(result, wanted, what="of packed experts")


def test_packed_experts_that_do_not_serve_say_so(rng: np.random.Generator):
    lhs, rhs, _ = draw(rng)
    stored = mx_jax.quantize(rhs, "mxfp4", axis=1)
    sizes, recipe = np.array(SIZES["within tiles"], np.int32), recipes.weight_only("mxfp4")

    def product(w):
        return jax.jit(lambda w: ragged_dot(lhs, w, sizes, recipe=recipe)).lower(w)

    packed = mx_jax.pack_weights(stored, contracting=1, num_batch=1)
    with (
        mx_jax.only_backend("reference"),
        pytest.warns(UserWarning, match=r"ragged_dot: packed weights are unpacked .* cpu_ffi"),
    ):
        product(packed)
    along_n = mx_jax.pack_weights(mx_jax.quantize(rhs, "mxfp4"), contracting=2, num_batch=1)
    with pytest.raises(ValueError, match="has its blocks along axis=2"):
        product(along_n)
