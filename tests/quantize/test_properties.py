"""What holds of `quantize` for any input: equality with an exact oracle, and laws."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mx_jax
from mx_jax.codecs.blocks import scales_shape
from mx_jax.formats import BLOCK_FORMATS, FLOAT8_TENSORWISE_E4M3, MXFP4, NVFP4
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quantize import oracle
from tests.quantize.inputs import CONFIGS, Config, compiled, tensors

EXAMPLES = settings(max_examples=40)
FEW_EXAMPLES = settings(max_examples=20)
ALL = pytest.mark.parametrize("config", CONFIGS, ids=str)
FLOAT32 = [config for config in CONFIGS if config.dtype == "float32"]
# The programs that test_equals_the_oracle runs on every Python.
follows = pytest.mark.one_python(reason="a law of codes that equal the oracle's on every Python")
NEAREST = [config for config in CONFIGS if config.rounding == "nearest"]


def assert_same(actual, expected, what: str = "") -> None:
    for name, left, right in zip(("codes", "scales", "values"), actual, expected, strict=True):
        assert_bitwise_equal(left, right, what=f"{name} {what}", any_nan=True)


@pytest.mark.by_default(
    "mxfp8_e4m3-floor|mxfp8_e5m2-ceil|mxfp6_e2m3-even|mxfp6_e3m2-rceil|mxfp4-[er]|mxint8-[rc]"
)
@ALL
def test_equals_the_oracle(config: Config):
    @EXAMPLES
    @given(tensors(config.shape, config.dtype))
    def check(x: np.ndarray):
        expected = oracle.quantize(x, config.format, **config.options)
        assert_same(compiled(config)(x), (expected.codes, expected.scales, expected.values))

    check()


@follows
@pytest.mark.parametrize("config", NEAREST, ids=str)
def test_quantizing_twice_changes_nothing(config: Config):
    """FLOOR and EVEN give the same codes and scales again. RCEIL and CEIL may halve a scale whose
    largest element became a power of two; the values stay."""

    @FEW_EXAMPLES
    @given(tensors(config.shape, config.dtype, finite=True))
    def check(x: np.ndarray):
        once = compiled(config)(x)
        if np.isinf(once[2]).any():
            return  # amax was rounded up to 2^128, which float32 does not have.
        # Values that bfloat16 or float16 hold would do as well, but not all are.
        again = compiled(dataclasses.replace(config, dtype="float32"))(once[2])
        if config.scale_rule in ("floor", "even"):
            assert_same(again, once)
        else:
            assert_bitwise_equal(again[2], once[2], any_nan=True)

    check()


@follows
@ALL
def test_negation_flips_signs_only(config: Config):
    @FEW_EXAMPLES
    @given(tensors(config.shape, config.dtype))
    def check(x: np.ndarray):
        codes, scales, values = compiled(config)(x)
        negated = compiled(config)(-x)
        assert_bitwise_equal(negated[1], scales)
        number = ~np.isnan(values)
        if config.format.element.kind == "int":
            assert_bitwise_equal(negated[0][number], (-codes.view(np.int8)[number]).view(np.uint8))
        else:
            assert_bitwise_equal(negated[2][number], -values[number])
            flipped = codes ^ np.uint8(config.format.element.sign_code)
            assert_bitwise_equal(negated[0][number], flipped[number])

    check()


@follows
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.dtype != "float32"], ids=str)
def test_narrow_floats_equal_their_widening(config: Config):
    @FEW_EXAMPLES
    @given(tensors(config.shape, config.dtype))
    def check(x: np.ndarray):
        with np.errstate(invalid="ignore"):
            wide = x.astype(np.float32)
        assert_same(
            compiled(config)(x), compiled(dataclasses.replace(config, dtype="float32"))(wide)
        )

    check()


@pytest.mark.by_default("mxfp8_e4m3-floor|mxfp6_e3m2|mxfp4-even|mxint8-floor")
@follows
@pytest.mark.parametrize("config", FLOAT32, ids=str)
def test_padding_is_invisible(config: Config):
    """Zeros up to whole blocks change neither codes nor scales, and shapes do not show them."""
    length = config.shape[config.axis]
    whole = -(-length // config.block_size) * config.block_size
    kept = [slice(None)] * len(config.shape)
    kept[config.axis] = slice(length)

    @FEW_EXAMPLES
    @given(tensors(config.shape, config.dtype))
    def check(x: np.ndarray):
        widths = [(0, 0)] * x.ndim
        widths[config.axis] = (0, whole - length)
        codes, scales, values = compiled(config)(x)
        padded = compiled(config)(np.pad(x, widths))
        assert codes.shape == values.shape == x.shape
        assert scales.shape[config.axis] == whole // config.block_size
        assert_same(
            (padded[0][tuple(kept)], padded[1], padded[2][tuple(kept)]), (codes, scales, values)
        )

    check()


@pytest.mark.by_default("mxfp4")
@follows
@pytest.mark.parametrize("config", [c for c in FLOAT32 if len(c.shape) > 2], ids=str)
def test_permuting_axes_commutes(config: Config):
    ndim = len(config.shape)
    orders = list(itertools.islice(itertools.permutations(range(ndim)), 1, 4))

    @settings(max_examples=24)
    @given(tensors(config.shape, config.dtype), st.sampled_from(orders))
    def check(x: np.ndarray, order: tuple[int, ...]):
        shape = tuple(config.shape[axis] for axis in order)
        moved = dataclasses.replace(config, shape=shape, axis=order.index(config.axis % ndim))
        expected = [part.transpose(order) for part in compiled(config)(x)]
        assert_same(compiled(moved)(x.transpose(order)), expected, str(order))

    check()


@follows
@pytest.mark.parametrize("config", [c for c in FLOAT32 if c.block_size < 32], ids=str)
def test_blocks_are_independent(config: Config):
    """Whatever stands in one block, NaN and Inf included, no other block sees it."""
    axis = config.axis % len(config.shape)
    blocks = -(-config.shape[axis] // config.block_size)

    @FEW_EXAMPLES
    @given(
        tensors(config.shape, config.dtype),
        tensors(config.shape, config.dtype),
        st.integers(0, blocks - 1),
    )
    def check(x: np.ndarray, other: np.ndarray, block: int):
        inside = np.arange(config.shape[axis]) // config.block_size == block
        shape = [1] * x.ndim
        shape[axis] = -1
        mixed = np.where(inside.reshape(shape), other, x)
        before, after = compiled(config)(x), compiled(config)(mixed)
        outside = np.flatnonzero(~inside)
        blocks_outside = np.delete(np.arange(blocks), block)
        picks = (outside, blocks_outside, outside)
        for left, right, pick in zip(after, before, picks, strict=True):
            pair = left.take(pick, axis), right.take(pick, axis)
            assert_bitwise_equal(*pair, any_nan=True)

    check()


@follows
@pytest.mark.parametrize("config", FLOAT32, ids=str)
def test_a_power_of_two_moves_scales_only(config: Config):
    @FEW_EXAMPLES
    @given(st.integers(0, 2**32 - 1), st.integers(-60, 60))
    def check(seed: int, exponent: int):
        x = np.random.default_rng(seed).normal(size=config.shape).astype(np.float32)
        codes, scales, values = compiled(config)(x)
        moved = compiled(config)(np.ldexp(x, exponent))
        shifted = (scales.astype(np.int64) + exponent).astype(np.uint8)
        assert_same(moved, (codes, shifted, np.ldexp(values, exponent)))

    check()


@follows
@pytest.mark.parametrize("config", NEAREST, ids=str)
def test_error_is_at_most_half_a_step(config: Config):
    """Of every value that its block's scale can represent: |Q(x) - x| <= 2^-(p+1) |x|, or half the
    smallest subnormal."""
    element = config.format.element

    @FEW_EXAMPLES
    @given(tensors(config.shape, config.dtype, finite=True))
    def check(x: np.ndarray):
        _, scales, values = compiled(config)(x)
        length = config.shape[config.axis]
        spread = scales.repeat(config.block_size, config.axis).take(range(length), config.axis)
        scale = np.ldexp(1.0, spread.astype(np.int64) - 127)
        exact = x.astype(np.float64)
        inside = np.abs(exact) <= element.max * scale
        relative = np.abs(exact) * 2.0 ** -(element.mantissa_bits + 1)
        bound = np.maximum(relative, element.smallest_subnormal * scale / 2)
        with np.errstate(invalid="ignore"):
            error = np.abs(values.astype(np.float64) - exact)
        finite = np.isfinite(values)
        assert (error <= bound)[inside & finite].all()
        # What is outside became the largest value, and Inf only where float32 ends.
        saturated = np.abs(values) == element.max * scale
        assert saturated[~inside & finite].all()
        assert (np.abs(exact) > 2.0**127)[~finite].all()

    check()


@pytest.mark.slow
def test_arrays_without_elements():
    shapes = [(0,), (0, 64), (3, 0), (2, 0, 3)]
    cases = [
        (format, shape, axis)
        for format in (MXFP4, NVFP4, FLOAT8_TENSORWISE_E4M3)
        for shape in shapes
        for axis in range(len(shape))
    ]

    @jax.jit
    def all_of_them():
        zeros = ((format, jnp.zeros(shape, jnp.bfloat16), axis) for format, shape, axis in cases)
        quantized = [mx_jax.quantize(x, format, axis=axis) for format, x, axis in zeros]
        return quantized, [x.dequantize() for x in quantized]

    for case, x, values in zip(cases, *all_of_them(), strict=True):
        format, shape, axis = case
        assert x.shape == x.codes.shape == shape, case
        assert x.scales.shape == scales_shape(shape, x.blocks), case
        assert dict(x.blocks)[axis - len(shape)] == format.block[1], case
        assert x.size == 0, case
        assert (values.shape, values.dtype) == (shape, jnp.bfloat16), case
    # Outside jit too.
    assert mx_jax.quantize(jnp.zeros((0, 64)), MXFP4).dequantize().shape == (0, 64)


@pytest.mark.parametrize("format", BLOCK_FORMATS, ids=lambda format: format.name)
def test_a_scalar_has_no_axis(format):
    message = r"axis=-1 is out of range for shape=\(\); a scalar has no axis for blocks"
    with pytest.raises(ValueError, match=message):
        mx_jax.quantize(jnp.float32(1), format)
