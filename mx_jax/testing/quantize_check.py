"""Casts by a backend, compared with the reference's: one, and two of one array in one call."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.backends.target import Backend
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference.quantize import quantize
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import Shape, draw_any_bits, draw_few_octaves


def check_quantize(backend: Backend, case: QuantizeCase) -> None:
    """Compare codes and scales with the reference's, on all kinds of floats."""
    call = case.call
    rng = np.random.default_rng(0)
    x = jnp.asarray(draw_any_bits(rng, case.shape, call.dtype))
    _compare_quantize(backend, call, x, rng, None)
    if call.format.tensor_scale and case.scale_rule is None:
        tame = jnp.asarray(draw_few_octaves(rng, case.shape).astype(call.dtype))
        given = jnp.full((1,) * x.ndim, 0.01, jnp.float32)
        _compare_quantize(backend, call, tame, rng, given)


def _compare_quantize(
    backend: Backend,
    call: QuantizeCall,
    x: jax.Array,
    rng: np.random.Generator,
    tensor_scale: jax.Array | None,
) -> None:
    num_bits = call.random_bits
    drawn = rng.integers(0, 1 << num_bits, call.random_shape, dtype=np.int32) if num_bits else None

    @jax.jit
    def both(x, bits, tensor_scale):
        expected = quantize(
            x,
            call.format,
            call.blocks,
            call.scale_rule,
            rounding=call.rounding,
            random_bits=bits,
            tensor_scale=tensor_scale,
        )
        return backend.run(call, x, bits, tensor_scale), expected

    assert_same(*both(x, drawn, tensor_scale))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeBothCase:
    """Two casts of one array.

    Attributes:
      first: one cast.
      second: the other, of the same shape and dtype.
    """

    first: QuantizeCase
    second: QuantizeCase

    @property
    def call(self) -> QuantizeBothCall:
        """What backends see of it."""
        return QuantizeBothCall(first=self.first.call, second=self.second.call)

    def __str__(self) -> str:
        return f"{self.first}-and-{self.second}"


def _both(
    format: BlockFormat, shape: Shape, axes: tuple[int, int] = (-1, -2), **options: Any
) -> QuantizeBothCase:
    first, second = (
        QuantizeCase(format=format, shape=shape, axis=axis, **options) for axis in axes
    )
    return QuantizeBothCase(first=first, second=second)


QUANTIZE_BOTH_CASES: tuple[QuantizeBothCase, ...] = (
    # Each kind of element and scale; 600 columns are a strip and a part of the next.
    _both(formats.MXFP8_E4M3, (70, 600), scale_rule="rceil"),
    _both(formats.MXFP8_E5M2, (64, 256), dtype="bfloat16"),
    _both(formats.MXFP6_E2M3, (64, 256), dtype="bfloat16", scale_rule="even"),
    _both(formats.MXFP6_E3M2, (2, 40, 130), dtype="float16"),
    _both(formats.MXFP4, (2, 64, 136), dtype="bfloat16", axes=(-2, -1)),
    _both(formats.MXINT8, (33, 129)),
    _both(formats.NVFP4, (3, 50, 80)),
    # Roundings, blocks, and an axis in between.
    _both(formats.MXFP4, (40, 136), rounding="stochastic"),
    _both(formats.MXFP8_E4M3, (40, 136), rounding="away", block_size=7),
    _both(formats.MXFP8_E4M3, (2, 40, 3, 64), axes=(-1, -3)),
    QuantizeBothCase(
        first=QuantizeCase(format=formats.MXFP4, shape=(64, 256), rounding="stochastic"),
        second=QuantizeCase(format=formats.MXFP8_E4M3, shape=(64, 256), axis=-2),
    ),
    # Nothing to do.
    _both(formats.MXFP4, (0, 64)),
)


def check_quantize_both(backend: Backend, case: QuantizeBothCase) -> None:
    """Compare both results with the reference's single ones, on all kinds of floats."""
    call = case.call
    calls = (call.first, call.second)
    rng = np.random.default_rng(0)
    x = jnp.asarray(draw_any_bits(rng, call.first.shape, call.first.dtype))
    sizes = [(1 << single.random_bits, single.random_shape) for single in calls]
    bits = [rng.integers(0, n, shape, dtype=np.int32) if n > 1 else None for n, shape in sizes]

    @jax.jit
    def run(x, bits):
        expected = [
            quantize(x, c.format, c.blocks, c.scale_rule, rounding=c.rounding, random_bits=drawn)
            for c, drawn in zip(calls, bits, strict=True)
        ]
        return backend.run(call, x, tuple(bits), None), expected

    for actual, expected in zip(*run(x, bits), strict=True):
        assert_same(actual, expected)


def assert_same(actual: MXArray, expected: MXArray) -> None:
    """Raise unless two quantized arrays agree in every bit."""
    for fact in ("format", "blocks", "dtype"):
        assert getattr(actual, fact) == getattr(expected, fact), fact
    for name in ("codes", "scales", "tensor_scale"):
        left, right = getattr(actual, name), getattr(expected, name)
        assert (left is None) == (right is None), name
        if right is not None:
            assert_bitwise_equal(left, right, what=name)
