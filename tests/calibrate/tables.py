"""Every value that an MXArray's scales allow, by decoding every code that a cast may give."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import mx_jax


def values_under(q: mx_jax.MXArray) -> np.ndarray:
    """float64 `[codes, *q.shape]`: what each code would be at each place."""
    element = q.format.element
    # An integer's most negative value is never given: a cast saturates alike on both sides.
    codes = (c for c in range(1 << element.bits) if abs(element.value(c)) <= element.max)
    filled = (dataclasses.replace(q, codes=jnp.full(q.shape, code, jnp.uint8)) for code in codes)
    return np.stack([np.asarray(mx_jax.dequantize(each), np.float64) for each in filled])
