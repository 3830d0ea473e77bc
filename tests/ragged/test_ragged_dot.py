"""ragged_dot as users meet it: transformations, MXArrays, dtypes, randomness."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP4
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.recipes import Hadamard, MatmulSpec, Recipe, operand
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick, with_gradients
from tests.recipes.uniform import uniform

M, K, N, GROUPS = 12, 16, 8, 3
SPEC = operand(MXFP4.with_block(8), scale_rule="even")

RECIPE = uniform(SPEC)
HIGH = mx_jax.recipes.high_precision()


def products(lhs, rhs, group_sizes, g):
    """The product and both gradients."""
    return with_gradients(lambda x, w: ragged_dot(x, w, group_sizes, recipe=RECIPE))(lhs, rhs, g)


compiled = quick(products)


def draw(rng, *batch):
    lhs, rhs, g = (
        rng.standard_normal((*batch, *shape), np.float32)
        for shape in ((M, K), (GROUPS, K, N), (M, N))
    )
    sizes = rng.multinomial(M - 1, [1 / GROUPS] * GROUPS, size=batch or None).astype(np.int32)
    return lhs, rhs, sizes, g


def assert_all_close(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


# High precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 0, 7), (2, 3, 4), (9, 9, 9), (0, 0, 0)])
def test_high_precision_is_lax_ragged_dot(sizes, rng: np.random.Generator):
    lhs, rhs, _, g = draw(rng)
    sizes = jnp.array(sizes)
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    actual, vjp = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, recipe=HIGH, **options), lhs, rhs)
    expected, their_vjp = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes, **options), lhs, rhs)
    assert_bitwise_equal(actual, expected)
    for left, right in zip(vjp(g), their_vjp(g), strict=True):
        assert_bitwise_equal(left, right)


def test_high_precision_takes_integers():
    lhs, rhs = jnp.arange(6).reshape(3, 2), jnp.ones((1, 2, 2), jnp.int32)
    assert_bitwise_equal(
        ragged_dot(lhs, rhs, [3], recipe=HIGH), lax.ragged_dot(lhs, rhs, jnp.array([3]))
    )


# Transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(None, 0, None, None), (1, 2, None, 1)], ids=str)
def test_vmap(axes, rng: np.random.Generator):
    ones, batches = draw(rng), draw(rng, 2)
    operands = [
        one if axis is None else np.moveaxis(batch, 0, axis)
        for one, batch, axis in zip(ones, batches, axes, strict=True)
    ]
    actual = quick(jax.vmap(products, axes))(*operands)
    for i in range(2):
        chosen = [
            one if axis is None else batch[i]
            for one, batch, axis in zip(ones, batches, axes, strict=True)
        ]
        assert_all_close([x[i] for x in actual], compiled(*chosen))


@pytest.mark.slow(but="shape1")
@pytest.mark.parametrize("shape", [(0, K, GROUPS), (M, K, 0), (M, 0, GROUPS)])
def test_nothing_to_multiply(shape):
    m, k, num_groups = shape
    lhs, rhs, g = jnp.ones((m, k)), jnp.ones((num_groups, k, N)), jnp.ones((m, N))
    sizes = jnp.full(num_groups, m // 3, jnp.int32)
    for array, like in zip(compiled(lhs, rhs, sizes, g), (g, lhs, rhs), strict=True):
        assert_bitwise_equal(array, np.zeros(like.shape, np.float32))


# Operands ------------------------------------------------------------------------------------


def quantized(x, axis):
    return mx_jax.quantize(x, SPEC.format, axis=axis, scale_rule=SPEC.scale_rule)


def test_quantized_operands(rng: np.random.Generator):
    lhs, rhs, sizes, g = draw(rng)

    @quick
    def through_quantize(lhs, rhs):
        def product(lhs, rhs):
            lhs, rhs = quantized(lhs, -1), quantized(rhs, -2)
            return ragged_dot(lhs, rhs, sizes, recipe=RECIPE), (lhs, rhs)

        output, vjp, stored = jax.vjp(product, lhs, rhs, has_aux=True)
        return (output, *vjp(g)), [x.dequantize() for x in stored]

    actual, stored = through_quantize(lhs, rhs)
    # The gradients are those of what was saved: the codes.
    assert_all_close(actual, compiled(*stored, sizes, g))


def test_a_stored_weight(rng: np.random.Generator):
    lhs, rhs, sizes, g = draw(rng)
    stored = quick(quantized, static_argnums=1)(rhs, -2)

    @quick
    def through_stored(lhs, stored):
        output, vjp = jax.vjp(lambda x: ragged_dot(x, stored, sizes, recipe=RECIPE), lhs)
        high = ragged_dot(lhs, stored, sizes, recipe=HIGH)
        values = stored.dequantize()
        return output, *vjp(g), high, lax.ragged_dot(lhs, values, sizes), values

    *actual, high, expected_high, values = through_stored(lhs, stored)
    output, _, _ = compiled(lhs, rhs, sizes, g)
    _, lhs_bar, _ = compiled(lhs, values, sizes, g)
    assert_all_close((*actual, high), (output, lhs_bar, expected_high))


def test_dtypes(rng: np.random.Generator):
    lhs, rhs, sizes, g = draw(rng)
    lhs, rhs, g = (jnp.asarray(x, jnp.bfloat16) for x in (lhs, rhs, g))
    # As it runs without jit.
    results = products(lhs, rhs, sizes, g)
    wide = ragged_dot(lhs, rhs, sizes, recipe=RECIPE, preferred_element_type=jnp.float32)
    exact = compiled(*(np.float32(x) for x in (lhs, rhs)), sizes, np.float32(g))
    assert_bitwise_equal(wide, exact[0])
    for array, expected in zip(results, exact, strict=True):
        assert_bitwise_equal(array, expected.astype(jnp.bfloat16))


# Randomness ----------------------------------------------------------------------------------


def stochastic(format, rule) -> Recipe:
    return uniform(operand(format, scale_rule=rule, rounding="stochastic"))


STOCHASTIC = stochastic(MXFP4.with_block(8), "rceil")
GROUPWISE = stochastic(FLOAT8_ROWWISE_E4M3, "float8_power_of_two")


def rounded_products(recipe, lhs, rhs, g, key):
    sizes = jnp.array([6, 1, 4])
    product = functools.partial(ragged_dot, group_sizes=sizes, recipe=recipe, key=key)
    return with_gradients(product)(lhs, rhs, g)


def exact_products(lhs, rhs, g):
    return with_gradients(lambda x, w: lax.ragged_dot(x, w, jnp.array([6, 1, 4])))(lhs, rhs, g)


@pytest.fixture(scope="module", params=[STOCHASTIC, GROUPWISE], ids=["blocks", "groups"])
def rounded(request: pytest.FixtureRequest):
    """The products of one operand after another, rounded with many keys at a time."""
    one_key = functools.partial(rounded_products, request.param)
    return quick(jax.vmap(one_key, (None, None, None, 0)))


NUM_KEYS = 256

KEYS = jax.random.split(jax.random.key(0), NUM_KEYS)


@pytest.mark.slow(but="groups")
def test_exact_values_never_move(rounded, rng: np.random.Generator):
    # What E2M1 and E4M3 hold as they are, whatever power of two the scale is.
    values = np.array([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6], np.float32)
    operands = [rng.choice(values, shape) for shape in ((M, K), (GROUPS, K, N), (M, N))]
    exact_ones = quick(exact_products)(*operands)
    for array, exact in zip(rounded(*operands, KEYS), exact_ones, strict=True):
        np.testing.assert_array_equal(array, np.broadcast_to(exact, array.shape))


def test_rounding_is_unbiased_and_repeatable(rounded, rng: np.random.Generator):
    lhs, rhs, _, g = draw(rng)
    samples, again = rounded(lhs, rhs, g, KEYS), rounded(lhs, rhs, g, KEYS[::-1])
    arrays = jax.tree.map(np.asarray, (samples, again, quick(exact_products)(lhs, rhs, g)))
    for values, reversed_values, exact in zip(*arrays, strict=True):
        # Six standard errors: with some 700 values, a false alarm in 10^6 tests.
        error = np.std(values, axis=0) / np.sqrt(NUM_KEYS)
        assert (np.abs(np.mean(values, axis=0) - exact) <= 6 * error + 1e-5).all()
        # The same keys in another order give the same bits, and no two keys do.
        assert_bitwise_equal(values, reversed_values[::-1])
        assert len(np.unique(values.reshape(NUM_KEYS, -1), axis=0)) == NUM_KEYS


def test_rows_draw_their_bits_whatever_their_group(rng: np.random.Generator):
    lhs, rhs, _, g = draw(rng)
    rhs = np.broadcast_to(rhs[:1], rhs.shape)

    @quick
    def rounded(lhs, rhs, sizes, g, key):
        output, vjp = jax.vjp(lambda x: ragged_dot(x, rhs, sizes, recipe=STOCHASTIC, key=key), lhs)
        return vjp(g)[0], output

    one, several = (
        rounded(lhs, rhs, np.int32(sizes), g, jax.random.key(0))
        for sizes in ([12, 0, 0], [5, 0, 7])
    )
    # All three experts hold the same matrix, but draw bits of their own: compare those of one.
    assert_bitwise_equal(one[0][:5], several[0][:5])
    assert_bitwise_equal(one[1][:5], several[1][:5])


def test_signs_are_drawn_from_the_key_and_cancel(rng: np.random.Generator):
    # INT8 keeps 7 bits of values that share an octave or two: transforms that do not cancel show.
    spec = operand("mxint8")
    both = MatmulSpec(lhs=spec, rhs=spec, transform=Hadamard(size=8, signs=None))
    recipe = uniform(spec, output=both, grad_input=both, grad_weight=both)
    lhs, rhs, _, g = draw(rng)
    rounded = quick(functools.partial(rounded_products, recipe))
    once, again, other = (rounded(lhs, rhs, g, jax.random.key(seed)) for seed in (0, 0, 1))
    for array, same, different, exact in zip(
        once, again, other, exact_products(lhs, rhs, g), strict=True
    ):
        assert_bitwise_equal(array, same)
        assert (np.asarray(array) != different).any()
        assert np.linalg.norm(array - exact) < 0.03 * np.linalg.norm(exact)


# Group sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        np.array([5, 2**32 - 1, 3], np.uint32),
        np.array([5, 2**31 - 1, 2**31 - 1], np.int32),
        np.array([5, 7, 0], np.int64),
        np.array([5, 200, 200], np.uint8),
    ],
    ids=["uint32", "sum_beyond_int32", "int64", "uint8"],
)
def test_sizes_above_the_rows_are_cut_off(sizes, rng: np.random.Generator):
    """Whatever their dtype, traced or not: no sum and no narrowing wraps around."""
    lhs, rhs, _, g = draw(rng)
    expected = compiled(lhs, rhs, np.array([5, 7, 0], np.int32), g)
    arguments = jnp.asarray(sizes)
    for actual in (compiled(lhs, rhs, arguments, g), products(lhs, rhs, arguments, g)):
        assert_all_close(actual, expected)


# Keys ----------------------------------------------------------------------------------------


def test_one_group_draws_as_matmul_does(rng: np.random.Generator):
    """Each of the three products has its own stream, and matmul's: the bits agree, so codes do."""
    spec = operand(MXFP4, scale_rule="rceil", rounding="stochastic")
    recipe, key = uniform(spec), jax.random.key(7)
    lhs, rhs, g = (rng.standard_normal(s, np.float32) for s in ((64, 32), (32, 32), (64, 32)))

    dense = functools.partial(mx_jax.matmul, recipe=recipe, key=key)
    ours = lambda x, w: ragged_dot(x, w[None], [64], recipe=recipe, key=key)  # noqa: E731
    results = (quick(with_gradients(each))(lhs, rhs, g) for each in (ours, dense))
    assert_all_close(*results)
