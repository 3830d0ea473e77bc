"""The GPU's quantizing kernel in Mosaic's interpreter: the reference's bits, and no races."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends import select
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.pallas_gpu import backend_for, quantize
from mx_jax.backends.pallas_gpu.architecture import SM80, SM90, Architecture
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend
from mx_jax.formats import MX_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from mx_jax.reference.scale_rules import CEIL, EVEN, FLOOR, RCEIL
from mx_jax.testing.backend_suite import assert_same, check_quantize, check_quantize_both
from mx_jax.testing.cases import QuantizeBothCase, QuantizeCase
from mx_jax.testing.draw import draw_any_bits
from tests.backends.mosaic import interpreter, mostly_slow, needs_mosaic

pytestmark = needs_mosaic
RULES = tuple(rule.name for rule in (FLOOR, CEIL, EVEN, RCEIL))


def backend(architecture: Architecture = SM90) -> Backend:
    return backend_for(architecture=architecture, interpret=interpreter())


def case_of(format: formats.BlockFormat = MXFP8_E4M3, **facts: Any) -> QuantizeCase:
    return QuantizeCase(**{"format": format, "shape": (64, 64), "dtype": "bfloat16"} | facts)


# One row, partial blocks and tiles, other dtypes, blocks and axes, batches; rules of float scales;
# nothing at all.
SHAPES = [
    case_of(MXFP4, shape=(1, 40), dtype="float16"),
    case_of(MXFP4, shape=(70, 3), axis=0),
    case_of(MXFP8_E5M2, shape=(3, 40, 70), axis=1, dtype="float32"),
    case_of(MXFP8_E4M3, shape=(2, 3, 64), block_size=16),
    case_of(formats.MXFP6_E3M2, shape=(64, 256), axis=-2, block_size=16),
    case_of(MXFP4, shape=(70,)),
    case_of(NVFP4, shape=(3, 48, 5), axis=-2, dtype="float32"),
    case_of(formats.MXINT8, shape=(40, 1, 1), axis=0, dtype="float16"),
    *(case_of(NVFP4, scale_rule=rule, shape=(4, 256)) for rule in ("amax", "amax_subnormal")),
    case_of(formats.NVFP4_ONE_LEVEL, dtype="float32", shape=(4, 256)),
    case_of(MXFP4, shape=(0, 64)),
    case_of(NVFP4, shape=(3, 0)),
]


@pytest.mark.parametrize("case", mostly_slow(SHAPES, *SHAPES[:2], *SHAPES[-3:]), ids=str)
def test_shapes(case: QuantizeCase):
    check_quantize(backend(), case)


CONVERTED = [case_of(MXFP8_E4M3), case_of(MXFP8_E5M2, scale_rule="even")]


@pytest.mark.parametrize("case", mostly_slow(CONVERTED, CONVERTED[0]), ids=str)
def test_gpus_that_convert_by_additions(case: QuantizeCase):
    check_quantize(backend(SM80), case)


def both_of(format: formats.BlockFormat, axes: tuple[int, int] = (-1, -2), **facts: Any):
    first, second = (case_of(format, axis=axis, **facts) for axis in axes)
    return QuantizeBothCase(first=first, second=second)


BOTH = [
    both_of(MXFP4, axes=(-2, -1), shape=(2, 40, 70)),
    both_of(formats.MXINT8, dtype="float32", scale_rule="ceil"),
    both_of(NVFP4, shape=(3, 50, 80), dtype="float32"),
    both_of(MXFP4, shape=(16, 128), block_size=16),
    both_of(MXFP4, shape=(0, 64)),
    QuantizeBothCase(first=case_of(MXFP4), second=case_of(MXFP8_E5M2, axis=-2, scale_rule="even")),
]


@pytest.mark.parametrize("case", mostly_slow(BOTH, BOTH[0]), ids=str)
def test_both_directions(case: QuantizeBothCase):
    check_quantize_both(backend(), case)


def check(backend: Backend, x: jax.Array, call: QuantizeCall, *given: jax.Array) -> None:
    """Compare with the reference, given a tensor scale or none."""
    scale = given[0] if given else None

    @jax.jit
    def run(x: jax.Array) -> Any:
        return [b.run(call, x, None, scale) for b in (backend, REFERENCE)]

    assert_same(*run(x))


def edges(rng: np.random.Generator, threshold: int) -> np.ndarray:
    """float32 `[n, 32]`: in each block an amax at every exponent, at the mantissas where a rule
    changes its mind, over values of all magnitudes below it, ties among them; and any bits."""
    mantissas = sorted({0, threshold - 1, threshold & (1 << 23) - 1})
    tops = np.array([e << 23 | m for e in range(256) for m in mantissas], np.int64)
    below = tops[:, None] - rng.integers(0, 12 << 23, (tops.size, 31))
    few_bits = np.where(rng.random(below.shape) < 0.5, 0x7F000000 | 0xFC0000, 0x7FFFFFFF)
    patterns = np.concatenate([tops[:, None], np.maximum(below, 0) & few_bits], axis=1)
    signs = rng.integers(0, 2, patterns.shape) << 31
    any_bits = rng.integers(0, 1 << 32, (64, 32))
    return np.concatenate([patterns | signs, any_bits]).astype(np.uint32).view(np.float32)


# Every format, and every rule: a code follows from the scale, whatever rule gave that.
EXPONENTS = [
    case_of(format, dtype=("float32", "bfloat16")[i % 2], scale_rule=RULES[i % len(RULES)])
    for i, format in enumerate((*MX_FORMATS, *MX_FORMATS[:2]))
]


@pytest.mark.parametrize("case", mostly_slow(EXPONENTS, EXPONENTS[0]), ids=str)
def test_every_exponent(case: QuantizeCase, rng: np.random.Generator):
    rule = case.call.scale_rule
    assert rule.threshold is not None
    values = edges(rng, rule.threshold(case.format.element))
    if case.dtype == "bfloat16":
        # Cut off, not rounded: patterns stay where they are.
        values = (values.view(np.uint32) >> 16).astype(np.uint16).view(jnp.bfloat16)
    x = jnp.asarray(values)
    call = dataclasses.replace(case, shape=x.shape).call
    check(backend(), x, call)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 2.0**-100, 2.0**-120, -1.0, np.inf, np.nan])
def test_any_tensor_scale(scale: float, rng: np.random.Generator):
    call = case_of(NVFP4, shape=(4, 256), dtype="float32").call
    x = jnp.asarray(rng.standard_normal(call.shape).astype(np.float32)).at[0, :20].set(0)
    given = jnp.full((1, 1), scale, jnp.float32)
    check(backend(), x, call, given)


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted, as if this machine had an H200, and the only backend."""
    table = (*(b for b in select.BACKENDS if b.name != "pallas_gpu"), backend())
    monkeypatch.setattr(select, "BACKENDS", table)
    with mx_jax.testing.target("cuda", (9, 0)):
        yield
    # What was traced with this table must not serve another test.
    jax.clear_caches()


@pytest.mark.usefixtures("in_use")
def test_public_casts(rng: np.random.Generator):
    x = jnp.asarray(draw_any_bits(rng, (40, 64), np.dtype(jnp.bfloat16)))
    expected = [mx_jax.quantize(x, "mxfp8_e4m3", axis=axis) for axis in (-1, -2)]
    with select.only_backend("pallas_gpu"):
        text = jax.jit(lambda x: mx_jax.quantize(x, "mxfp8_e4m3")).lower(x).as_text()
        single = mx_jax.quantize(x, "mxfp8_e4m3", axis=-2)
        both = mx_jax.quantize_both(x, "mxfp8_e4m3")
        with pytest.raises(
            ValueError, match="pallas_gpu: rounds to nearest even, got rounding='aw"
        ):
            mx_jax.quantize(x, "mxfp4", rounding="away")
    assert "callback" in text, "the interpreter's"
    for actual, of in ((single, 1), (both[0], 0), (both[1], 1)):
        assert_same(actual, expected[of])


@pytest.mark.usefixtures("in_use")
def test_gradient_and_scan(rng: np.random.Generator):
    x = jnp.asarray(rng.standard_normal((2, 4, 64)).astype(np.float32))
    with select.only_backend("pallas_gpu"):
        gradient = jax.grad(lambda x: (mx_jax.quantize(x, "mxfp4").codes * x).sum())(x[0])
        _, scanned = jax.lax.scan(lambda c, x: (c, mx_jax.quantize(x, "mxfp4").codes), 0, x)
    expected = mx_jax.quantize(x, "mxfp4").codes
    np.testing.assert_array_equal(gradient, expected[0])
    np.testing.assert_array_equal(scanned, expected)


@pytest.mark.parametrize("format", mostly_slow([MXFP4, NVFP4], MXFP4), ids=str)
def test_vmap(format: formats.BlockFormat, rng: np.random.Generator):
    call = case_of(format, shape=(3, 64), dtype="float32").call
    x = jnp.asarray(rng.standard_normal((2, 3, 2, 64)).astype(np.float32))

    def twice(backend: Any) -> Any:
        mapped = jax.vmap(lambda x: backend.run(call, x, None, None), in_axes=1)
        return jax.jit(jax.vmap(mapped))(x)

    assert_same(twice(backend()), twice(REFERENCE))


@pytest.mark.parametrize("axis", [-1, -2])
def test_whole_tiles_are_not_copied(axis: int):
    call = case_of(shape=(3, 64, 512), axis=axis).call
    run = functools.partial(
        quantize.quantize, random_bits=None, tensor_scale=None, call=call, architecture=SM90
    )
    text = str(jax.make_jaxpr(run)(jax.ShapeDtypeStruct(call.shape, call.dtype)))
    before, after = text.split("mpmd_map", 1)
    assert " pad" not in before and "slice" not in after.rsplit("]", 1)[-1]
