"""What a cache is given has its shape: nothing is written into a part of it."""

import jax.numpy as jnp
import pytest

from mx_jax.nn import KVCache


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_keys_of_another_shape_are_refused(format: str | None):
    """Smaller ones would fill a part of a row, and leave the rest as it was."""
    cache = KVCache.zeros(2, 4, 2, 64, format=format)
    for batch, tokens, heads, features in (
        (1, 1, 2, 64),
        (2, 1, 1, 64),
        (2, 1, 2, 32),
        (2, 5, 2, 64),
    ):
        keys = jnp.ones((batch, tokens, heads, features))
        text = (
            rf"got batch \* heads={batch * heads}, tokens={tokens}, features={features}; the cache "
            "has 4, 4 and 64"
        )
        with pytest.raises(ValueError, match=text):
            cache.append(keys, keys, 0)
