"""Products that GPUs are timed by: chains of square products, each by weights of its own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mx_jax
from mx_jax.backends.pallas_gpu import matmul, scaled
from mx_jax.backends.pallas_gpu.rejections import BLOCK_SCALED
from mx_jax.backends.pallas_gpu.tuning import Tiles
from mx_jax.backends.pallas_gpu.weights import pack
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

KERNEL, BASELINE, DEQUANTIZE = "pallas_gpu", "bf16 dot", "dequantize, dot"
CUDNN = "jax.nn.scaled_matmul"

# `x[m, size], weight -> [m, size]` in bfloat16.
Product = Callable[[jax.Array, Any], jax.Array]


def _batch(x: MXArray) -> MXArray:
    return jax.tree.map(lambda array: array[None], x)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """The baseline."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def kernel_product(
    format: BlockFormat, architecture: str, tiles: Tiles | None = None, dequantize: bool = False
) -> tuple[Callable[[MXArray], Any], Product]:
    """How an architecture's kernel wants quantized weights, and its product by them.

    Args:
      format: of the weights; on Blackwell x is quantized to it on the way.
      architecture: e.g. `"sm90"`.
      tiles: instead of the table's.
      dequantize: what the kernel is compared with for many rows: XLA's product of decoded weights.
    """
    if architecture in BLOCK_SCALED:

        def scaled_product(x: jax.Array, w: scaled.ScaledOperand) -> jax.Array:
            left = scaled.lay_out(_batch(mx_jax.quantize(x, format)))
            return scaled.multiply(left, w, jnp.bfloat16, architecture=architecture, tiles=tiles)[0]

        return lambda w: scaled.lay_out(_batch(w)), scaled_product

    def product(x: jax.Array, w: Any) -> jax.Array:
        if dequantize:
            return dot(x, w.unpack().dequantize(jnp.bfloat16)[0])
        out = matmul.multiply(x[None], w, jnp.bfloat16, architecture=architecture, tiles=tiles)
        return out[0]

    return lambda w: pack(_batch(w)), product


def products(
    format: BlockFormat, size: int, copies: int, architecture: str
) -> dict[str, tuple[Product, list[Any]]]:
    """Name -> (product, as many weights as copies)."""
    lay_out, kernel = kernel_product(format, architecture)
    keys = jax.random.split(jax.random.key(0), copies)

    def weights(how: Callable[[jax.Array], Any]) -> list[Any]:
        # So scaled, a chain of products keeps its magnitude.
        run = jax.jit(
            lambda key: how(jax.random.normal(key, (size, size), jnp.bfloat16) / size**0.5)
        )
        return [run(key) for key in keys]

    known: dict[str, tuple[Product, list[Any]]] = {
        KERNEL: (kernel, weights(lambda w: lay_out(mx_jax.quantize(w, format)))),
        BASELINE: (dot, weights(lambda w: w)),
        DEQUANTIZE: (
            lambda x, w: dot(x, w.dequantize(jnp.bfloat16)),
            weights(lambda w: mx_jax.quantize(w, format)),
        ),
    }
    if architecture in BLOCK_SCALED:
        known[CUDNN] = (functools.partial(_cudnn, format), known[DEQUANTIZE][1])
    return known


def _cudnn(format: BlockFormat, x: jax.Array, w: MXArray) -> jax.Array:
    """cuDNN's block-scaled product, through jax; a tensor's scale multiplies afterwards."""
    left, right = _batch(mx_jax.quantize(x, format)), _batch(w)
    parts = (left.elements, right.elements, left.scale_values, right.scale_values)
    out = jax.nn.scaled_matmul(*parts, preferred_element_type=jnp.float32)[0]
    for factor in (left.tensor_scale, right.tensor_scale):
        out = out if factor is None else out * factor.reshape(())
    return out.astype(jnp.bfloat16)


def chained(product: Product, weights: list[Any], calls: int, x: jax.Array):
    """A function that multiplies x by all weights, `calls` times over."""
    run = jax.jit(lambda x, weights: functools.reduce(product, weights, x))

    def sample():
        y = x
        for _ in range(calls):
            y = run(y, weights)
        return y

    return sample
