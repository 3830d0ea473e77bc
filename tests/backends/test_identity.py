"""Rules, elements, scales and roundings are known by their value: a known name gives none of it.

What only looks like the library's own goes to the reference, so the default way and the reference
agree in every bit.
"""

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.axes import Axes
from mx_jax.backends.calls import DequantizeCall, MatmulCall, OperandType, PackCall
from mx_jax.backends.select import BACKENDS, select
from mx_jax.backends.target import Target
from mx_jax.codecs.rounding import NEAREST, ROUNDINGS, TOWARD_ZERO, Rounding, stochastic
from mx_jax.formats import E2M1, E4M3, MXFP4, MXFP8_E4M3, MXINT8, NVFP4
from mx_jax.reference.scale_rules import (
    AMAX,
    FLOOR,
    FOUR_OVER_SIX,
    SCALE_RULES,
    FromAmax,
    ScaleRule,
    power_of_two,
)
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
BIASED = dataclasses.replace(E2M1, bias=2)


def ones(data) -> jax.Array:
    """A scale of 2^-5 for every block."""
    return jnp.full_like(data.amax, 122).astype(jnp.uint8)


def smallest(data) -> jax.Array:
    """E4M3's code of 1 for every block."""
    return jnp.full_like(data.amax, 56).astype(jnp.uint8)


def one_third_up(element) -> int:
    return (1 << 23) // 3


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Stores twice the scales that elements were divided by."""

    rounding: Rounding = NEAREST

    def __call__(self, data, scales, codes, random_bits) -> jax.Array:
        assert codes.shape == data.values.shape and random_bits is None
        return scales + (1 if data.format.scale.kind == "exponent" else 8)


RULES = {
    "amax": ("nvfp4", ScaleRule(name="amax", kinds=("element",), scales=smallest)),
    "threshold": ("mxfp8_e4m3", power_of_two("floor", one_third_up)),
    "largest_scale": ("nvfp4", dataclasses.replace(AMAX, largest_scale=256.0)),
    "corrected": ("mxfp4", dataclasses.replace(FLOOR, correction=Doubled())),
}


def as_the_reference(x: np.ndarray, format: Any, **how: Any) -> mx_jax.MXArray:
    """A cast of the default way, which has the reference's codes and scales."""
    ours = mx_jax.quantize(x, format, **how)
    with mx_jax.only_backend("reference"):
        jax.tree.map(assert_bitwise_equal, ours, mx_jax.quantize(x, format, **how))
    return ours


@pytest.mark.parametrize(("format", "rule"), RULES.values(), ids=RULES)
def test_a_custom_rule_under_a_known_name(format: str, rule: ScaleRule):
    known = mx_jax.quantize(X, format, scale_rule=rule.name)
    ours = as_the_reference(X, format, scale_rule=rule)
    assert not np.array_equal(ours.dequantize(), known.dequantize())


@needs_library
def test_custom_thresholds_reach_the_kernels():

    def backend(format: formats.BlockFormat, rule: ScaleRule) -> str:
        call = QuantizeCase(format=format, shape=(4, 64), scale_rule=rule).call
        return select(call, Target(platform="cpu")).backend.name

    assert backend(MXFP4, power_of_two("mine", one_third_up)) == "cpu_ffi"
    assert backend(NVFP4, dataclasses.replace(AMAX, name="mine")) == "cpu_ffi"
    assert backend(MXFP4, power_of_two("floor", lambda element: 0)) == "reference"
    assert backend(MXFP4, dataclasses.replace(FLOOR, scales=ones)) == "reference"


CUSTOM = {
    "element": dataclasses.replace(MXFP4, element=BIASED),
    "bias of 5": dataclasses.replace(MXFP4, element=dataclasses.replace(E2M1, bias=5)),
    "scale": dataclasses.replace(
        NVFP4,
        scale=dataclasses.replace(formats.E4M3_SCALE, element=dataclasses.replace(E4M3, bias=8)),
    ),
}


@pytest.mark.parametrize("format", CUSTOM.values(), ids=CUSTOM)
def test_custom_elements_and_scales_under_known_names(format: formats.BlockFormat):
    """Casts are the reference's, and products those of the values, packed or not."""
    recipe = recipes.weight_only(format)
    q = as_the_reference(X.T, format, axis=0)
    exact = X.astype(np.float64) @ np.asarray(q.dequantize(), np.float64)
    for w in (q, mx_jax.pack_weights(q)):
        np.testing.assert_allclose(mx_jax.matmul(X, w, recipe=recipe), exact, rtol=1e-5, atol=1e-5)


GPUS = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
TARGETS = [
    *(Target(platform=platform) for platform in ("cpu", "rocm")),
    *(Target(platform="cuda", compute_capability=capability) for capability in GPUS),
]


def calls_with(format: formats.BlockFormat) -> list:
    """Every kind of call that a format may be in."""
    block = format.block[1]
    shape, blocks = (64, 64), ((-1, block),)
    bfloat16 = np.dtype(jnp.bfloat16)
    quantized = OperandType(shape=shape, axes=Axes.ordered(), format=format)
    plain = OperandType(shape=shape, axes=Axes.ordered(), dtype=bfloat16)
    product = MatmulCall(lhs=quantized, rhs=quantized, out_dtype=np.dtype("float32"))
    return [
        product,
        dataclasses.replace(product, lhs=plain),
        dataclasses.replace(product, rhs=plain),
        QuantizeCase(format=format, shape=shape, dtype="bfloat16").call,
        DequantizeCall(shape=shape, dtype=bfloat16, format=format, blocks=blocks),
        PackCall(weights=quantized, blocks=blocks),
    ]


STRANGERS = {
    "element": CUSTOM["element"],
    "element_of_8_bits": dataclasses.replace(
        MXFP8_E4M3, element=dataclasses.replace(E4M3, num_reserved_codes=2)
    ),
    "integers": dataclasses.replace(
        MXINT8, element=dataclasses.replace(formats.INT8, mantissa_bits=5)
    ),
    "whole": dataclasses.replace(
        formats.FLOAT8_ROWWISE_E4M3, element=dataclasses.replace(E4M3, bias=8)
    ),
    "scale": CUSTOM["scale"],
}


@pytest.mark.parametrize("format", STRANGERS.values(), ids=STRANGERS)
def test_only_plain_code_takes_what_nobody_else_knows(format: formats.BlockFormat):
    """The reference, and for products on accelerators XLA's bfloat16 dot, which counts digits."""
    for target in TARGETS:
        for call in calls_with(format):
            takers = [each.name for each in BACKENDS if each.rejects(call, target) is None]
            product = isinstance(call, MatmulCall) and target.platform != "cpu"
            assert takers == ["xla_bfloat16"] * product + ["reference"], (call, target)


@needs_library
@pytest.mark.parametrize("format", [MXFP4, MXFP8_E4M3, NVFP4], ids=lambda format: format.name)
def test_another_name_is_no_other_value(format: formats.BlockFormat):
    """A renamed copy has the same kernels, on CPUs and GPUs, and the same products."""
    scale, element = format.scale, dataclasses.replace(format.element, name="mine")
    renamed = dataclasses.replace(
        format, name="mine", element=element, scale=dataclasses.replace(scale, name="s")
    )
    for target in (Target(platform="cpu"), Target(platform="cuda", compute_capability=(10, 0))):
        for ours, theirs in zip(calls_with(renamed), calls_with(format), strict=True):
            for backend in BACKENDS:
                accepts = [backend.rejects(call, target) is None for call in (ours, theirs)]
                assert accepts[0] == accepts[1], (backend.name, ours)
    product, same = (
        mx_jax.matmul(X, mx_jax.quantize(X.T, each, axis=0), recipe=recipes.weight_only(each))
        for each in (renamed, dataclasses.replace(renamed, name=format.name))
    )
    assert_bitwise_equal(product, same)


ROUNDING_STRANGERS = (
    Rounding(name="nearest", random_bits=0, apply=TOWARD_ZERO.apply),
    Rounding(name="stochastic", random_bits=4, apply=TOWARD_ZERO.apply),
)


@pytest.mark.parametrize("rounding", ROUNDING_STRANGERS, ids=lambda rounding: rounding.name)
def test_a_custom_rounding_under_a_known_name(rounding: Rounding):
    key = jax.random.key(0) if rounding.random_bits else None
    ours = mx_jax.quantize(X, "mxfp4", rounding=rounding, key=key)
    expected = mx_jax.quantize(X, "mxfp4", rounding="toward_zero")
    assert_bitwise_equal(ours.codes, expected.codes)


# Pickling and copying -----------------------------------------------------------------------------


def test_a_copy_is_equal():
    """A value of one's own under a known name does not become the library's."""
    rules = [*SCALE_RULES, *(rule for _, rule in RULES.values())]
    renamed = dataclasses.replace(FOUR_OVER_SIX, name="mine")
    for value in (*rules, renamed, *ROUNDINGS, stochastic(5), *ROUNDING_STRANGERS):
        for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
            assert other == value and hash(other) == hash(value)
            assert type(other) is type(value) and other.name == value.name


def test_known_values_are_pickled_by_name():
    """So that what lies on a disk outlives a change of the functions inside."""
    for value in (*SCALE_RULES, *ROUNDINGS):
        assert b"apply" not in pickle.dumps(value) and b"threshold" not in pickle.dumps(value)


# Rules that look at more than the largest value ---------------------------------------------------


def test_reads_values():
    names = {rule.name for rule in SCALE_RULES if rule.reads_values}
    assert names == {"four_over_six"}
    # Codes are values of the block, whatever the scales were made of.
    assert dataclasses.replace(FLOOR, correction=Doubled()).reads_values
    # Nobody knows what a function of one's own looks at, unless it cannot.
    assert ScaleRule(name="amax", kinds=("element",), scales=smallest).reads_values
    assert not ScaleRule(name="mine", kinds=("element",), scales=FromAmax(smallest)).reads_values
    assert dataclasses.replace(AMAX, scales=smallest).reads_values


def test_a_function_of_amax_sees_no_values():
    seen = []

    def watch(data):
        seen.append(data.values)
        return ones(data)

    mx_jax.quantize(
        X, "mxfp4", scale_rule=ScaleRule(name="w", kinds=("exponent",), scales=FromAmax(watch))
    )
    assert seen == [None]
