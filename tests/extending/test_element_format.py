"""FP5 of `fp5.py` everywhere that a format goes; nothing of mx_jax knows of it.

Places to touch: one, that file (before: 12, for a row of the library's own; from outside, a dtype
had to be made up and codes of five bits were packed wrongly). What it must give is computed from a
table of its values, by the oracle of the library's own formats.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.codecs import element as element_codec
from mx_jax.codecs import packing
from mx_jax.formats import E2M1, ElementFormat
from mx_jax.testing.compare import assert_bitwise_equal
from tests.extending.fp5 import FP5, MXFP5
from tests.quantize import oracle
from tests.quick import quick

# Codes 0 to 15; those with the sign bit, 16, stand for the same with a minus.
VALUES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)


def rows(rng: np.random.Generator) -> np.ndarray:
    """Ordinary, tied, huge, tiny and special numbers; the second block of a row is not full."""
    x = rng.standard_normal((6, 40)).astype(np.float32)
    ties = np.array([(a + b) / 2 for a, b in itertools.pairwise(VALUES)], np.float32)
    x[1, :15], x[1, 15:32], x[1, 32] = ties, -7, 15  # where EVEN takes the next exponent
    x[2] *= np.float32(2.0**126)
    x[3] *= np.float32(2.0**-130)
    x[4, :32], x[4, 32:] = 0, (-0.0, 7, 7.5, 8, 15, 15.5, -15.5, 1e-30)
    x[5, 3], x[5, 35] = np.nan, np.inf
    return x


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_casts(rule: str, rng: np.random.Generator):
    x = rows(rng)
    q = mx_jax.quantize(x, MXFP5, scale_rule=rule)
    expected = oracle.quantize(x, MXFP5, axis=-1, block_size=32, scale_rule=rule)
    np.testing.assert_array_equal(q.scales, expected.scales)
    np.testing.assert_array_equal(q.codes, expected.codes)
    assert_bitwise_equal(np.asarray(q.dequantize()), expected.values)


def test_facts():
    assert (FP5.bits, FP5.max, FP5.emax) == (5, 7.0, 2)
    assert (FP5.smallest_normal, FP5.smallest_subnormal, FP5.nan_code) == (1.0, 0.25, None)
    assert [FP5.value(code) for code in range(32)] == [*VALUES, *(-value for value in VALUES)]
    assert MXFP5.bits_per_element == 5.25
    assert repr(MXFP5) == "BlockFormat(mxfp5, block=(1, 32))"
    with pytest.raises(TypeError, match=r"ElementFormat e2m2: no dtype.*dtype_name=None"):
        _ = FP5.dtype


def test_printing_and_other_forms():
    q = mx_jax.quantize(jnp.arange(16.0), MXFP5)
    assert repr(q) == (
        "MXArray(mxfp5, shape=(16,), dtype=float32, blocks={-1: 32}, nbytes=17,\n"
        "[ 0.,  1.,  2.,  3.,  4.,  5.,  6.,  7.,  8.,  8., 10., 12., 12., 12., 14.,\n14.])"
    )
    with pytest.raises(TypeError, match=r"ElementFormat\(e2m2\).*format=mxfp5; use codes"):
        _ = q.elements


def test_packed_codes():
    """Eight codes in five bytes, the first in the lowest bits."""
    q = mx_jax.quantize(np.linspace(-7, 7, 3 * 43, dtype=np.float32).reshape(3, 43), MXFP5)
    rows = quick(lambda q: q.packed_codes)(q)
    assert rows.shape == (3, 30) and q.packed_nbytes == 3 * 30 + 3 * 2
    for codes, packed in zip(np.asarray(q.codes), np.asarray(rows), strict=True):
        together = sum(int(code) << (5 * place) for place, code in enumerate(codes))
        assert packed.tobytes() == together.to_bytes(30, "little")
    assert_bitwise_equal(quick(lambda rows: packing.unpack(rows, 5, 43))(rows), q.codes)


def test_packed_weights_and_layers(rng: np.random.Generator):
    """Where no backend has a layout for it, packing leaves weights as they are."""
    recipe = recipes.weight_only(MXFP5)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    layer = mx_jax.nn.linen.Dense(8, recipe=recipe, use_bias=False)
    variables = quick(layer.init)(jax.random.key(0), x)
    weights = mx_jax.quantize(variables["params"]["kernel"], MXFP5, axis=0)
    packed = mx_jax.pack_weights(weights)
    expected = mx_jax.matmul(x, packed, recipe=recipe)
    assert_bitwise_equal(layer.apply(variables, x), expected)
    stored = {"params": {"kernel": packed}}
    assert_bitwise_equal(layer.apply(stored, x), expected)


# Other shapes of codes ----------------------------------------------------------------------------

LAYOUTS = (
    ElementFormat(name="e3m0", exponent_bits=3, mantissa_bits=0, bias=3),
    ElementFormat(name="e1m0", exponent_bits=1, mantissa_bits=0, bias=1),
    ElementFormat(name="e1m2", exponent_bits=1, mantissa_bits=2, bias=0),
    ElementFormat(name="e3m3", exponent_bits=3, mantissa_bits=3, bias=3, num_reserved_codes=1),
    ElementFormat(
        name="e4m2", exponent_bits=4, mantissa_bits=2, bias=7, num_reserved_codes=4, has_inf=True
    ),
    ElementFormat(
        name="e2m2fnuz", exponent_bits=2, mantissa_bits=2, bias=2, has_negative_zero=False
    ),
    ElementFormat(name="int4", kind="int", exponent_bits=1, mantissa_bits=2, bias=1),
)


def test_every_code_of_other_layouts():
    @jax.jit
    def both_ways():
        every = {e.name: jnp.arange(1 << e.bits, dtype=jnp.uint8) for e in LAYOUTS}
        values = {e.name: element_codec.decode(every[e.name], e) for e in LAYOUTS}
        return values, {
            e.name: element_codec.encode(values[e.name], e, saturate=False) for e in LAYOUTS
        }

    values, codes = both_ways()
    for element in LAYOUTS:
        expected = np.array([element.value(code) for code in range(1 << element.bits)], np.float32)
        np.testing.assert_array_equal(values[element.name], expected)
        kept = np.isfinite(expected)
        if element.kind == "int":
            kept[element.sign_code] = False  # -2^n is read, and not written
        every = np.arange(1 << element.bits)
        np.testing.assert_array_equal(np.asarray(codes[element.name])[kept], every[kept])


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (dict(kind="fixed"), "needs kind='float' or 'int', got kind='fixed'"),
        (dict(mantissa_bits=6), "in at most 8 bits, got exponent_bits=2, mantissa_bits=6"),
        (dict(exponent_bits=0), "needs a sign, an exponent and a mantissa"),
        (dict(kind="int"), "needs exponent_bits=1, as fixed point has"),
        (dict(num_reserved_codes=7), "needs 0 to 6 reserved codes, got num_reserved_codes=7"),
        (dict(num_reserved_codes=-1), "needs 0 to 6 reserved codes, got num_reserved_codes=-1"),
        (dict(has_inf=True, num_reserved_codes=1), "needs 2 to 6 reserved codes"),
        (dict(has_negative_zero=False, num_reserved_codes=1), "needs 0 to 0 reserved codes"),
        (dict(bias=23), "got smallest_subnormal=.*, bias=23; choose another bias"),
        (dict(bias=-14), "needs values from 2\\^-22 to below 2\\^17"),
    ],
)
def test_facts_that_make_no_format(facts: dict, message: str):
    with pytest.raises(ValueError, match=rf"^ElementFormat e2m1: .*{message}"):
        dataclasses.replace(E2M1, **facts)


def test_the_ends_of_what_float32_holds():
    """Under the smallest and the largest scale both ends are float32 numbers, or beyond them."""
    for bias, end in ((22, 2.0**-149), (-13, np.inf)):
        element = dataclasses.replace(E2M1, bias=bias)
        byte, code = (0, 1) if bias > 0 else (254, element.max_code)
        q = dataclasses.replace(
            mx_jax.quantize(jnp.zeros(1), dataclasses.replace(MXFP5, element=element)),
            codes=jnp.full(1, code, jnp.uint8),
            scales=jnp.full(1, byte, jnp.uint8),
        )
        assert np.asarray(q.dequantize())[0] == np.float32(end)
