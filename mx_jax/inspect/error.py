"""How far quantized values are from the exact ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.codecs.element import decode
from mx_jax.mxarray import MXArray


def sqnr_db(exact: jax.typing.ArrayLike, approximate: jax.typing.ArrayLike) -> float:
    """Signal to quantization noise: `10 log10(sum exact^2 / sum (exact - approximate)^2)`, in dB.

    Args:
      exact: reference values.
      approximate: values of the same shape.

    Returns:
      A float; inf if nothing differs.

    Raises:
      ValueError: if the shapes differ.

    Examples:
      >>> import jax, mx_jax
      >>> x = jax.random.normal(jax.random.key(0), (256, 256))
      >>> round(mx_jax.inspect.sqnr_db(x, mx_jax.cast(x, "mxfp8_e4m3", scale_rule="rceil")))
      32
    """
    # In float64: squares of float32 values leave float32's range long before the values do.
    exact, approximate = np.asarray(exact, np.float64), np.asarray(approximate, np.float64)
    if exact.shape != approximate.shape:
        raise ValueError(
            "sqnr_db: shapes must agree, got "
            f"exact.shape={exact.shape}, approximate.shape={approximate.shape}"
        )
    noise = np.sum(np.square(exact - approximate))
    if noise == 0:
        return math.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(10.0 * np.log10(np.sum(np.square(exact)) / noise))


def saturated_fraction(x: jax.typing.ArrayLike, quantized: MXArray) -> float:
    """The share of x whose magnitude is above what its block can represent, 0 to 1.

    Args:
      x: what was quantized.
      quantized: `quantize(x, ...)`.

    Returns:
      A float.

    Raises:
      ValueError: if the shapes differ.
      TypeError: if quantized is not an MXArray.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = jnp.array([7.9, 1.0, 2.0, 3.0])
      >>> mx_jax.inspect.saturated_fraction(x, mx_jax.quantize(x, "mxfp4"))
      0.25
    """
    if not isinstance(quantized, MXArray):
        raise TypeError(
            "saturated_fraction: needs an MXArray, got quantized of type "
            f"{type(quantized).__name__}; quantize x first"
        )
    if np.shape(x) != quantized.shape:
        raise ValueError(
            "saturated_fraction: shapes must agree, got "
            f"x.shape={np.shape(x)}, quantized.shape={quantized.shape}; pass what was quantized"
        )
    return float(_saturated(jnp.asarray(x), quantized))


@jax.jit
def _saturated(x: jax.Array, quantized: MXArray) -> jax.Array:
    values = jnp.abs(quantized.dequantize(jnp.float32))
    element = quantized.format.element
    at_limit = jnp.abs(decode(quantized.codes, element)) >= element.max
    return jnp.mean(at_limit & (jnp.abs(x) > values))
