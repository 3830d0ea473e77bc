"""What every backend must give: codes and scales as the reference's, bit for bit, and products near
float64's. `check_quantize(backend, case)` and its like raise where one does not.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.backends import calls
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend, Target
from mx_jax.codecs.blocks import scales_shape
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import MXFP8_E4M3
from mx_jax.mxarray import MXArray
from mx_jax.reference.quantize import quantize
from mx_jax.reference.scale_rules import scale_rule_for
from mx_jax.testing import cases
from mx_jax.testing.compare import assert_bitwise_equal, exact_product, exact_values
from mx_jax.testing.draw import draw_any_bits, draw_few_octaves


def check_quantize(backend: Backend, case: cases.QuantizeCase) -> None:
    """Compare codes and scales with the reference's, on all kinds of floats."""
    call = case.call
    rng = np.random.default_rng(0)
    x = jnp.asarray(draw_any_bits(rng, case.shape, call.dtype))
    compare_casts(backend, call, x, rng)
    if call.format.tensor_scale and case.scale_rule is None:
        tame = jnp.asarray(draw_few_octaves(rng, case.shape).astype(call.dtype))
        tensor_scale = jnp.full((1,) * x.ndim, 0.01, jnp.float32)
        compare_casts(backend, call, tame, rng, tensor_scale)


def compare_casts(
    backend: Backend,
    call: calls.QuantizeCall,
    x: jax.Array,
    rng: np.random.Generator,
    tensor_scale: jax.Array | None = None,
) -> None:
    """Compare codes and scales of given values with the reference's."""
    num_bits = call.random_bits
    drawn = rng.integers(0, 1 << num_bits, call.random_shape, dtype=np.int32) if num_bits else None
    operands = x, drawn, tensor_scale
    assert_same(_compiled(backend, call)(*operands), _compiled(REFERENCE, call)(*operands))


def _compiled(backend: Backend, call: calls.Call) -> Callable[..., Any]:
    """By itself, so that a cache of programs has the reference's for every backend."""

    @jax.jit
    def run(*operands: object) -> Any:
        return backend.run(call, *operands)

    return run


def check_quantize_both(backend: Backend, case: cases.QuantizeBothCase) -> None:
    """Compare both results with the reference's single ones, on all kinds of floats."""
    call = case.call
    both = (call.first, call.second)
    rng = np.random.default_rng(0)
    x = jnp.asarray(draw_any_bits(rng, call.first.shape, call.first.dtype))
    sizes = [(1 << single.random_bits, single.random_shape) for single in both]
    bits = [rng.integers(0, n, shape, dtype=np.int32) if n > 1 else None for n, shape in sizes]

    arrays = _compiled(backend, call)(x, tuple(bits), None)
    for actual, single, drawn in zip(arrays, both, bits, strict=True):
        assert_same(actual, _compiled(REFERENCE, single)(x, drawn, None))


def assert_same(actual: MXArray, expected: MXArray) -> None:
    """Raise unless two quantized arrays agree in every bit."""
    for fact in ("format", "blocks", "dtype"):
        assert getattr(actual, fact) == getattr(expected, fact), fact
    for name in ("codes", "scales", "tensor_scale"):
        left, right = getattr(actual, name), getattr(expected, name)
        assert (left is None) == (right is None), name
        if right is not None:
            assert_bitwise_equal(left, right, what=name)


def check_dequantize(backend: Backend, case: cases.QuantizeCase) -> None:
    """Compare values with the reference's: every code, under every kind of scale."""
    call = cases.dequantize_call(case)
    x = draw_any_codes(np.random.default_rng(0), call)
    actual, expected = (_compiled(each, call)(x) for each in (backend, REFERENCE))
    assert_bitwise_equal(actual, expected, what="values")


def draw_any_codes(rng: np.random.Generator, call: calls.DequantizeCall) -> MXArray:
    """Uniformly drawn codes and scales: NaN too, and the smallest and the largest."""
    format, counts = call.format, scales_shape(call.shape, call.blocks)
    if format.scale.is_float32:
        scales = (2.0 ** rng.uniform(-30, 30, counts)).astype(np.float32)
    else:
        scales = rng.integers(0, 256, counts, np.uint8)
    tensor_scale = None
    if format.tensor_scale:
        tensor_scale = jnp.full((1,) * len(call.shape), 0.01, jnp.float32)
    return MXArray(
        codes=jnp.asarray(rng.integers(0, 1 << format.element.bits, call.shape, np.uint8)),
        scales=jnp.asarray(scales),
        tensor_scale=tensor_scale,
        format=format,
        blocks=call.blocks,
        dtype=call.dtype,
    )


# Half a unit in the last place of float32, relative to the value.
HALF_ULP = 2.0**-24


def _bound(backend: Backend, added: int) -> float:
    """Of the error of as many added products, over the sum of their magnitudes."""
    return backend.epsilon_bound * math.sqrt(added) * HALF_ULP + 2 * backend.value_error


def check_matmul(backend: Backend, case: cases.MatmulCase) -> None:
    """Compare products with float64's: codes of all kinds, and sums that nearly cancel.

    Rounding errors point either way here, so they stay within the backend's
    `epsilon_bound * 2^-24 * sqrt(k) * sum |a b|`, plus the rounding to the product's dtype and of
    the values, if it rounds those.
    """
    call = case.call
    run = jax.jit(lambda lhs, rhs: backend.run(call, lhs, rhs))
    bound = _bound(backend, max(case.num_products, 1))
    rng = np.random.default_rng(0)
    for lhs, rhs in (case.operands(rng), case.cancelling_operands(rng)):
        _compare_product(run(lhs, rhs), call, lhs, rhs, bound)


def check_stagnating_sum(backend: Backend, case: cases.MatmulCase = cases.STAGNATING_CASE) -> None:
    """The worst order of summands: one large, then many ones that a short accumulator loses.

    After 2^24, float32 loses them too: every rounding error points the same way and `sqrt(k)` does
    not hold. Nothing may exceed `2^-24 * k * sum |a b|`, which float32 additions in any order keep.
    """
    call = case.call
    run = jax.jit(lambda lhs, rhs: backend.run(call, lhs, rhs))
    ones = np.full(call.lhs.shape, 0x38, np.uint8)
    alone = ones.copy()
    alone[:, 1:32] = 0
    rhs = _mxfp8(ones, 0)
    for exponent in (8, 11, 14, 24):
        lhs = _mxfp8(alone, exponent)
        _compare_product(run(lhs, rhs), call, lhs, rhs, case.num_products * HALF_ULP)


def _mxfp8(codes: np.ndarray, exponent: int) -> MXArray:
    """Codes under scales of one, but for 2^exponent over each row's first block."""
    scales = np.full((codes.shape[0], codes.shape[1] // 32), 127, np.uint8)
    scales[:, 0] += exponent
    return MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales),
        format=MXFP8_E4M3,
        blocks=((-1, 32),),
        dtype=jnp.dtype("float32"),
    )


def _compare_product(
    product: jax.Array,
    call: calls.MatmulCall,
    lhs: calls.Operand,
    rhs: calls.Operand,
    bound: float,
    flushed: float = 0.0,
) -> None:
    left, right = exact_values(lhs), exact_values(rhs)
    exact = exact_product(call, left, right)
    magnitude = exact_product(call, np.abs(left), np.abs(right))
    assert product.dtype == call.out_dtype and product.shape == exact.shape
    allowed = bound * magnitude
    if flushed:
        low, high = (np.where(np.abs(x) < flushed, np.abs(x), 0) for x in (left, right))
        allowed += exact_product(call, low, np.abs(right)) + exact_product(call, np.abs(left), high)
        allowed += 4 * flushed
    assert_near(product, exact, allowed)


def assert_near(product: jax.Array, exact: np.ndarray, allowed: np.ndarray) -> None:
    """Compare float32 sums within what is allowed, and what rounding to another dtype adds."""
    if product.dtype != np.float32:
        info = jnp.finfo(product.dtype)
        allowed = allowed + float(info.eps) / 2 * (np.abs(exact) + allowed)
        allowed = allowed + float(info.smallest_normal)
    actual = np.asarray(product).astype(np.float64)
    error = np.abs(actual - exact)
    # A NaN is not larger than what is allowed, either.
    excess = (error > allowed) | (np.isnan(actual) & ~np.isnan(exact))
    with np.errstate(divide="ignore"):
        # Where a zero is due nothing is allowed.
        worst = np.max(error[excess] / allowed[excess], initial=0)
    assert not excess.any(), (
        f"{excess.sum()} of {exact.size} products are too far from the exact ones, "
        f"the worst by {worst} times what is allowed"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtremeCase:
    """A product whose rhs is quantized from values at one end of float32."""

    rhs: formats.BlockFormat  # of E8M0 scales
    quantized_lhs: bool  # whether lhs has the same format; else it is float32
    scale_rule: str
    exponent: int  # rhs is about this power of two, and lhs about its inverse, up to 2^100

    @property
    def call(self) -> calls.MatmulCall:
        """What backends see of it."""
        lhs = self.rhs if self.quantized_lhs else None
        return cases.MatmulCase(lhs=lhs, rhs=self.rhs).call

    def operands(self) -> tuple[calls.Operand, calls.Operand]:
        """Both operands; some of lhs's values are zeros, and a row of rhs is of ordinary size."""
        rng, call = np.random.default_rng(0), self.call
        lhs, rhs = (rng.uniform(0.5, 1, shape) for shape in (call.lhs.shape, call.rhs.shape))
        rhs = np.where(rng.random(rhs.shape) < 0.1, 1.0, rhs) * rng.choice([-1, 1], rhs.shape)
        rhs = np.minimum(np.abs(rhs) * 2.0**self.exponent, 3.4028234e38) * np.sign(rhs)
        lhs = np.where(rng.random(lhs.shape) < 0.2, 0.0, lhs)
        # Backends may add lhs times codes before scaling: for float32 that has its end at 2^128.
        lhs *= 2.0 ** np.clip(-self.exponent, -120, _LARGEST_LHS)
        rhs[0] = 2.0 ** (self.exponent // 2)
        quantized = self._quantized(rhs)
        left = lhs.astype(np.float32)
        return self._quantized(left) if self.quantized_lhs else jnp.asarray(left), quantized

    def _quantized(self, x: np.ndarray) -> MXArray:
        rule = scale_rule_for(self.scale_rule, self.rhs)
        values = jnp.asarray(x.astype(np.float32))
        return _quantize(values, self.rhs, ((-1, 32),), rule, NEAREST, None, None)

    def __str__(self) -> str:
        lhs = self.rhs.name if self.quantized_lhs else "float32"
        return f"{lhs}-{self.rhs.name}-{self.scale_rule}-2^{self.exponent}"


_quantize = jax.jit(quantize, static_argnums=(1, 2, 3, 4))

# Values that round up to 2^128, and values that are subnormal or near it.
EXTREME_CASES = tuple(
    ExtremeCase(rhs=rhs, quantized_lhs=both, scale_rule=rule, exponent=exponent)
    for rhs, rule in (
        (formats.MXFP8_E4M3, "rceil"),
        (formats.MXFP6_E2M3, "ceil"),
        (formats.MXFP4, "even"),
        (formats.MXINT8, "floor"),
    )
    for both in (False, True)
    for exponent in (128, -119, -124)
)

# A float32 lhs times codes up to 2^16, 2^12 of them, stays finite.
_LARGEST_LHS = 100

# Below this a value of an operand may count as zero.
FLUSHED = 2.0**-124


def check_extremes(backend: Backend, case: ExtremeCase) -> None:
    """Finite blocks give finite products, whatever their codes round up to, and right ones.

    Values below 2^-124 may be flushed, and products below 2^-122; XLA does so below 2^-126.
    """
    lhs, rhs = case.operands()
    product = jax.jit(lambda lhs, rhs: backend.run(case.call, lhs, rhs))(lhs, rhs)
    assert np.isfinite(np.asarray(product)).all(), f"{case}: not finite, got {product}"
    bound = _bound(backend, case.call.lhs.shape[-1])
    _compare_product(product, case.call, lhs, rhs, bound, FLUSHED)


def check_ragged(backend: Backend, case: cases.RaggedCase) -> None:
    """Compare a product with float64's within the backend's bound: see `check_matmul`."""
    call = case.call
    lhs, rhs, sizes = case.operands(np.random.default_rng(0))
    product = jax.jit(lambda lhs, rhs, sizes: backend.run(call, lhs, rhs, sizes))(lhs, rhs, sizes)
    left, right = exact_values(lhs), exact_values(rhs)
    exact, magnitude = case.exact(left, right), case.exact(np.abs(left), np.abs(right))
    assert product.dtype == call.out_dtype and product.shape == exact.shape
    added = case.rows if case.contracts_rows else case.k
    assert_near(product, exact, _bound(backend, added) * magnitude)
    if not case.contracts_rows:
        unused = np.asarray(product)[sum(case.sizes) :]
        assert not unused.any(), f"{case}: rows of no group are not zeros"


def check_attend(backend: Backend, case: cases.AttendCase) -> None:
    """Compare with float64, within what float32 sums may lose.

    A score of terms of size s is off by `2^-24 (4 + features) s` at most, and its weight by as
    much of itself.
    """
    call, rng = case.call, np.random.default_rng(0)
    queries = jnp.asarray(rng.standard_normal(call.queries), case.dtype)
    (keys, exact_keys), (values, exact_values_) = case.rows(rng), case.rows(rng)
    run = jax.jit(lambda *operands: backend.run(call, *operands))
    actual = run(queries, keys, values, np.int32(case.position))
    assert actual.shape == call.queries, f"{actual.shape} is not {call.queries}"
    last = case.position + np.tile(np.arange(case.tokens), case.heads)
    unseen = np.arange(case.length) > last[:, None]
    terms = np.asarray(queries, np.float64)[:, :, None] * exact_keys[:, None]
    terms *= case.features**-0.5
    scores = np.where(unseen, -np.inf, terms.sum(-1))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = weights @ exact_values_
    sizes = np.where(unseen, 0, np.abs(terms).sum(-1)).max(-1, keepdims=True)
    lost = 2.0**-24 * (32 + case.length + 2 * (4 + case.features) * sizes)
    allowed = lost * (weights @ np.abs(exact_values_))
    far = ~(np.abs(actual - expected) <= allowed)
    assert not far.any(), (
        f"{far.sum()} of {far.size} are too far from the exact ones, the first at "
        f"{np.argwhere(far)[0].tolist()}"
    )


Promise = Callable[[calls.Call, Target], bool]


def check_answer(backend: Backend, promise: Promise, call: calls.Call, target: Target) -> bool:
    """Whether the backend takes a call; fails if it breaks its promise or gives no reason."""
    reason = backend.rejects(call, target)
    if reason is None:
        return True
    assert isinstance(reason, str) and reason, f"{backend.name} rejects {call} with {reason!r}"
    assert not promise(call, target), f"{backend.name} must take {call} on {target}: {reason}"
    return False
