"""What codecs do inside of a program that is lowered for one platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.codecs import float32
from mx_jax.codecs.lowering import by_halves
from mx_jax.codecs.rounding import Rounding


@pytest.mark.parametrize("length", [1, 5, 8])
def test_by_halves(length):
    x = jax.random.randint(jax.random.key(1), (3, length, 2), 0, 99)
    run = jax.vmap(lambda x: by_halves(float32.max, x, 1), 2)
    np.testing.assert_array_equal(run(x), jnp.moveaxis(x.max(1, keepdims=True), 2, 0))
    text = jax.jit(run).lower(x).as_text()
    assert text.count("maximum") == (length - 1).bit_length()


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
