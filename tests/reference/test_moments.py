"""Random bits of moments: a hash of an element's position, whatever the shape."""

import jax.numpy as jnp
import numpy as np

from mx_jax.reference.moments import random_bits


def test_bits_are_those_of_the_position_in_memory():
    words = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)
    flat = np.asarray(random_bits(jnp.zeros(3 * 5 * 64), words))
    shaped = np.asarray(random_bits(jnp.zeros((3, 5, 64)), words))
    np.testing.assert_array_equal(shaped.reshape(-1), flat)
    # Twenty bits each, none of them stuck, and hardly any value twice.
    assert flat.min() >= 0 and flat.max() < 1 << 20 and len(set(flat.tolist())) > 0.99 * flat.size
    assert all(0.4 < np.mean(flat >> bit & 1) < 0.6 for bit in range(20))
