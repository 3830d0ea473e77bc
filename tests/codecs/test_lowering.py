"""Functions of scalars in programs: the same bits as of arrays, traced once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax.codecs import float32
from mx_jax.codecs.lowering import by_halves, elementwise, lowered_for
from mx_jax.codecs.rounding import Rounding
from mx_jax.codecs.scale import by_float64


def arithmetic(x, scale, offset):
    """Every kind of operation, of shapes that broadcast, with a jit inside."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    wide = lax.convert_element_type(scale, jnp.int32) - offset
    clipped = float32.clip(wide, -3, 4)
    shifted = lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(1)
    chosen = jnp.where(x > 0, bits >> 2, ~bits)
    finite = (x == x) & (bits != 7) | ~(scale < 3)
    total = jnp.where(finite, x * clipped.astype(jnp.float32), jnp.nan)
    return chosen ^ shifted.astype(jnp.int32), total.astype(jnp.bfloat16)


def lowered(function, *operands):
    """Results, and the program, of what is traced as a call is when it is lowered."""
    with lowered_for("cpu"):
        program = jax.jit(function)
        return program(*operands), program.lower(*operands).as_text()


X = jax.random.normal(jax.random.key(0), (4, 3, 8)).at[0, 0, :3].set(jnp.array([jnp.nan, 0, -0.0]))
SCALES = jnp.arange(12, dtype=jnp.uint8).reshape(4, 3, 1)


def same(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8)),
        *jax.tree.map(np.asarray, (found, expected)),
    )


def test_the_bits_of_arrays():
    found, text = lowered(lambda x, s: elementwise(arithmetic)(x, s, offset=2), X, SCALES)
    same(found, arithmetic(X, SCALES, 2))
    # What depends on scales alone is computed for them alone, and numbers have no equation.
    (clamp,) = (line for line in text.splitlines() if "clamp" in line)
    assert "tensor<4x3x1xi32>" in clamp
    assert "call @" not in text


@pytest.mark.parametrize("axes", [(1, None), (None, 0), (2, 2)])
def test_vmap(axes):
    x, scales = (
        jnp.stack([a, a + 1], axis) if axis is not None else a
        for a, axis in zip((X, SCALES), axes, strict=True)
    )
    run = jax.vmap(lambda x, s: elementwise(arithmetic)(x, s, offset=2), axes)
    same(lowered(run, x, scales)[0], run(x, scales))


def test_vmap_of_a_number():
    run = jax.vmap(lambda x, s: elementwise(float32.mul)(x, s), (None, 0))
    same(lowered(run, X, jnp.arange(3.0))[0], run(X, jnp.arange(3.0)))


def test_traced_once_for_all_shapes():
    seen = []

    def counted(x):
        seen.append(x.shape)
        return float32.add(x, 1)

    lowered(lambda *xs: [elementwise(counted)(x) for x in xs], X, X[0], X[0, 0])
    assert seen == [()]


def test_what_has_no_row_is_traced_as_it_is():
    found, text = lowered(lambda x: elementwise(jnp.sin)(x), X)
    same(found, jnp.sin(X))
    assert "sine" in text


def test_other_precisions():
    found, _ = lowered(lambda x, s: elementwise(by_float64)(x, s), X, X + 3)
    same(found, by_float64(X, X + 3))


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_by_halves(length):
    x = jax.random.randint(jax.random.key(1), (3, length, 2), 0, 99)
    run = jax.vmap(lambda x: by_halves(float32.max, x, 1), 2)
    found, text = lowered(run, x)
    same(found, jnp.moveaxis(x.max(1, keepdims=True), 2, 0))
    assert text.count("maximum") == (length - 1).bit_length()


def test_symbolic_lengths_are_left_to_jax():
    (n,) = jax.export.symbolic_shape("n")
    with lowered_for("cpu"):
        exported = jax.export.export(jax.jit(lambda x: elementwise(float32.mul)(x, 2.0)))(
            jax.ShapeDtypeStruct((n, 2), jnp.float32)
        )
    same(exported.call(X[0, :, :2]), X[0, :, :2] * 2)


def test_functions_of_others_see_shapes():
    """A rounding of somebody else's may ask for the shape of what it rounds, as dithering does."""

    def dithered(significand: jax.Array, shift: jax.Array, bits: jax.Array | None) -> jax.Array:
        places = np.arange(significand.size).reshape(significand.shape) % 2
        return (significand >> jnp.minimum(shift, 31)) + places

    rounding = Rounding(name="dithered", apply=dithered, random_bits=0)
    x = jnp.linspace(1, 2, 64)
    found = mx_jax.quantize(x, "mxfp8_e4m3", rounding=rounding).codes
    plain = mx_jax.quantize(x, "mxfp8_e4m3", rounding="toward_zero").codes
    np.testing.assert_array_equal(found, plain + np.arange(64, dtype=np.uint8) % 2)


def test_another_mode_is_traced_anew():
    @elementwise
    def doubled(x: jax.Array) -> jax.Array:
        return (x * np.float64(2.0)).astype(jnp.float32)

    for wide in (False, True, False):
        with jax.enable_x64(wide), lowered_for("cpu"):
            text = str(jax.make_jaxpr(doubled)(jnp.ones(4, jnp.float32)))
            body = jax.make_jaxpr(doubled)(jnp.ones(4, jnp.float32)).eqns[0].params["body"]
        assert ("f64" in str(body.jaxpr)) == wide, text
