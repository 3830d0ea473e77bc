"""What codecs do inside of a program that is lowered for one platform."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax.backends.xla import block_values
from mx_jax.codecs import float32
from mx_jax.codecs.blocks import scales_shape
from mx_jax.codecs.lowering import Lowering, by_halves, lowering
from mx_jax.codecs.rounding import Rounding
from mx_jax.codecs.scale import are_normal
from mx_jax.mxarray import MXArray, decode, values_p
from mx_jax.reference.quantize import quantize
from mx_jax.specs import operand
from mx_jax.testing.compare import assert_bitwise_equal

DTYPE = np.dtype(jnp.bfloat16)


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
    result = mx_jax.quantize(x, "mxfp8_e4m3", rounding=rounding).codes
    plain = mx_jax.quantize(x, "mxfp8_e4m3", rounding="toward_zero").codes
    np.testing.assert_array_equal(result, plain + np.arange(64, dtype=np.uint8) % 2)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxint8", "mxfp4", "nvfp4"])
def test_casts_on_tpus(name: str):
    """The same bits in blocks along both axes, the last partial: NaN, Inf and subnormals too. XLA
    flushes these here; what of floats a product reads is within its bound."""
    rng, spec = np.random.default_rng(0), operand(name)
    magnitudes = 2.0 ** rng.integers(-150, 127, (64, 1))
    with np.errstate(all="ignore"):
        x = (rng.standard_normal((64, 72)) * magnitudes).astype(jnp.bfloat16)
    x[:2, 40], x[2:4, 3], x[5:9] = np.inf, np.nan, 0
    for axis in (-1, -2):
        blocks = ((axis, spec.format.block[1]),)

        def cast(x: jax.Array, blocks: Any = blocks) -> Any:
            q = quantize(x, spec.format, blocks, spec.scale_rule)
            return q.codes, q.scales, block_values(q)[0].astype(jnp.float32)

        *wanted, values = jax.jit(cast)(x)
        for alone in (True, False):
            with lowering(Lowering("tpu", on_one_device=alone)):
                *result, on_tpus = jax.jit(lambda x, cast=cast: cast(x))(x)
            for one, other in zip(result, wanted, strict=True):
                assert_bitwise_equal(one, other)
            np.testing.assert_allclose(on_tpus, values, rtol=0, atol=2.0**-124)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "mxint8"])
def test_decoding_on_tpus(name: str, axis: int):
    """By products where values are normal numbers or zeros, else exactly: XLA flushes here too."""
    format, rng, shape, blocks = (
        operand(name).format,
        np.random.default_rng(0),
        (64, 72),
        (axis, 32),
    )
    element = format.element
    lowest = 1 - (element.emin - element.mantissa_bits)
    codes = rng.integers(0, 1 << element.bits, shape).astype(np.uint8)
    codes[:32, :32] = 0
    scales = rng.integers(lowest, 240, scales_shape(shape, (blocks,))).astype(np.uint8)

    def values(codes: jax.Array, scales: jax.Array) -> Any:
        x = MXArray(codes=codes, scales=scales, format=format, blocks=(blocks,), dtype=DTYPE)
        return decode(x, DTYPE), decode(x, "float32", exponent=-2), are_normal(x, 0)

    exact = jax.jit(values)
    with lowering(Lowering("tpu", on_one_device=True)):
        on_tpus = jax.jit(lambda *x: values(*x))
        # The first scale is of zeros, the last is not.
        for place, byte, normal in (
            (0, 0, True),
            (-1, lowest, True),
            (-1, lowest - 1, False),
            (0, 255, False),
        ):
            changed = scales.copy()
            changed[place, place] = byte
            *result, are = on_tpus(codes, changed)
            assert are == normal
            for one, other in zip(result, exact(codes, changed), strict=False):
                assert_bitwise_equal(one, other, any_nan=True)


@pytest.mark.parametrize("axis", [-1, -2])
def test_decoding_nvfp4_on_tpus(axis: int):
    """By products where neither a block is NaN nor the tensor tiny."""
    format, rng, blocks = operand("nvfp4").format, np.random.default_rng(0), ((axis, 16),)
    codes = rng.integers(0, 16, (64, 72)).astype(np.uint8)
    scales = rng.integers(0, 127, scales_shape(codes.shape, blocks)).astype(np.uint8)

    def values(codes: jax.Array, scales: jax.Array, tensor_scale: jax.Array | None) -> Any:
        arrays: Any = dict(codes=codes, scales=scales, tensor_scale=tensor_scale)
        x = MXArray(**arrays, format=format, blocks=blocks, dtype=DTYPE)
        return decode(x, DTYPE), decode(x, "float32"), are_normal(x, 0)

    exact = jax.jit(values)
    with lowering(Lowering("tpu", on_one_device=True)):
        on_tpus = jax.jit(lambda *x: values(*x))
        for byte, tensor_scale, normal in (
            (1, None, True),
            (1, 0.3, True),
            (127, 0.3, False),
            (1, 2.0**-120 / 3, False),
        ):
            scales[-1, -1] = byte
            tensor = None if tensor_scale is None else np.full((1, 1), tensor_scale, np.float32)
            *result, are = on_tpus(codes, scales, tensor)
            assert are == normal
            for one, other in zip(result, exact(codes, scales, tensor), strict=False):
                assert_bitwise_equal(one, other, any_nan=True)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxint8", "mxfp4"])
def test_every_stored_scale_on_tpus(name: str):
    """By every code: what products read is its value down to 2^-124, Inf beyond float32, or NaN."""
    format = operand(name).format
    codes = np.tile(np.arange(256, dtype=np.uint8) & ((1 << format.element.bits) - 1), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    stored = MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales),
        format=format,
        blocks=((-1, 32),),
        dtype=np.dtype(np.float32),
    )
    with lowering(Lowering("tpu", on_one_device=True)):
        values = jax.jit(lambda x: block_values(x)[0].astype(jnp.float32))(stored)
    elements = np.array([format.element.value(code) for code in codes[0].tolist()])
    with np.errstate(over="ignore"):
        wanted = np.ldexp(elements, scales[:, :1].astype(int) - 129).astype(np.float32)
    wanted[255] = np.nan
    np.testing.assert_allclose(values, wanted, rtol=0, atol=2.0**-126)


@pytest.mark.parametrize("implicit", [False, True])
def test_values_are_one_equation_that_knows_where_it_runs(implicit: bool):
    """Of a TPU alone the scales decide how it decodes; devices that share codes decode alike.
    float64 comes of tracing inside of `enable_x64`."""
    x = mx_jax.quantize(jnp.ones((4, 64, 32), jnp.bfloat16), "mxfp8")
    function = jnp.asarray if implicit else MXArray.dequantize
    (equation,) = jax.make_jaxpr(function)(x).eqns
    if equation.primitive.name == "jit":  # JAX 0.12 inlines it when it lowers
        (equation,) = equation.params["jaxpr"].eqns
    assert (equation.primitive, equation.params["implicit"]) == (values_p, implicit)

    def branches(run: Any, platform: str, *arguments: Any) -> int:
        return (
            jax.jit(run)
            .trace(*arguments)
            .lower(lowering_platforms=(platform,))
            .as_text()
            .count("stablehlo.case")
        )

    assert branches(function, "cpu", x) == 0
    assert branches(function, "tpu", x) == branches(jax.vmap(function), "tpu", x) == 2
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    place, spec = NamedSharding(mesh, PartitionSpec("a")), PartitionSpec("a")
    shared = jax.device_put(x, place)
    assert branches(function, "tpu", shared) == 0
    below = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    assert branches(below, "tpu", shared) == 2

    def wide(x: MXArray) -> jax.Array:
        with jax.enable_x64(True):
            return x.dequantize(np.float64).astype(np.float32)

    assert_bitwise_equal(jax.jit(wide)(x), x.dequantize(np.float32))
