"""Products against float64's: of any codes, of sums that cancel, and at the ends of float32."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.backends.calls import MatmulCall, Operand
from mx_jax.backends.target import Backend
from mx_jax.codecs.blocks import block_extent
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import MXFP8_E4M3
from mx_jax.mxarray import MXArray
from mx_jax.reference.quantize import quantize
from mx_jax.reference.scale_rules import scale_rule_for
from mx_jax.testing.cases import MatmulCase

# Half a unit in the last place of float32, relative to the value.
HALF_ULP = 2.0**-24

STAGNATING_CASE = MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP8_E4M3, m=(16,), n=(16,), k=(1024,))


def exact_values(operand: Operand) -> np.ndarray:
    """The values of an operand in float64, from the formats' tables alone, without codecs."""
    if not isinstance(operand, MXArray):
        return np.asarray(operand).astype(np.float64)
    element, scale = operand.format.element, operand.format.scale
    table = np.array([element.value(code) for code in range(1 << element.bits)])
    values = table[np.asarray(operand.codes)]
    scales = np.asarray(operand.scales)
    if not scale.is_float32:
        scales = np.array([scale.value(code) for code in range(256)])[scales]
    scales = scales.astype(np.float64)
    for axis, size in operand.blocks:
        length = operand.shape[axis]
        repeated = np.repeat(scales, block_extent(size, length), axis=axis)
        scales = np.take(repeated, range(length), axis=axis)
    if operand.tensor_scale is not None:
        scales = scales * np.asarray(operand.tensor_scale, np.float64)
    return values / scales if scale.kind == "divisor" else values * scales


def exact_product(call: MatmulCall, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """`[*batch, *m, *n]` of float64 values."""
    left, m = _as_matrices(lhs, call.num_batch, call.lhs.axes.contracting)
    right, n = _as_matrices(rhs, call.num_batch, call.rhs.axes.contracting)
    product = left @ np.swapaxes(right, -1, -2)
    return product.reshape(*lhs.shape[: call.num_batch], *m, *n)


def _as_matrices(
    x: np.ndarray, num_batch: int, contracting: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """`[batch, kept, k]`, and the lengths of the kept axes."""
    kept = [axis for axis in range(num_batch, x.ndim) if axis not in contracting]
    batch, lengths, ks = (
        [x.shape[axis] for axis in axes] for axes in (range(num_batch), kept, contracting)
    )
    moved = x.transpose(*range(num_batch), *kept, *contracting)
    sizes = (math.prod(batch), math.prod(lengths), math.prod(ks))
    return moved.reshape(sizes), tuple(lengths)


def check_matmul(backend: Backend, case: MatmulCase) -> None:
    """Compare products with float64's: codes of all kinds, and sums that nearly cancel.

    Rounding errors point either way here, so they stay within the backend's
    `epsilon_bound * 2^-24 * sqrt(k) * sum |a b|`, plus the rounding to the product's dtype.
    """
    call = case.call
    run = jax.jit(lambda lhs, rhs: backend.run(call, lhs, rhs))
    bound = backend.epsilon_bound * math.sqrt(max(case.num_products, 1)) * HALF_ULP
    rng = np.random.default_rng(0)
    for lhs, rhs in (case.operands(rng), case.cancelling_operands(rng)):
        _compare_product(run(lhs, rhs), call, lhs, rhs, bound)


def check_stagnating_sum(backend: Backend) -> None:
    """The worst order of summands: one large, then many ones that a short accumulator loses.

    After 2^24, float32 loses them too: every rounding error points the same way and `sqrt(k)` does
    not hold. Nothing may exceed `2^-24 * k * sum |a b|`, which float32 additions in any order keep.
    """
    case = STAGNATING_CASE
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
    call: MatmulCall,
    lhs: Operand,
    rhs: Operand,
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
    found = np.asarray(product).astype(np.float64)
    error = np.abs(found - exact)
    # A NaN is not larger than what is allowed, either.
    excess = (error > allowed) | (np.isnan(found) & ~np.isnan(exact))
    with np.errstate(divide="ignore"):
        # Where a zero is due nothing is allowed.
        worst = np.max(error[excess] / allowed[excess], initial=0)
    assert not excess.any(), (
        f"{excess.sum()} of {exact.size} products are too far from the exact ones, "
        f"the worst by {worst} times what is allowed"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtremeCase:
    """A product whose rhs is quantized from values at one end of float32.

    Attributes:
      rhs: block format, of E8M0 scales.
      quantized_lhs: whether lhs has the same format; else it is float32.
      scale_rule: name.
      exponent: rhs is about this power of two, and lhs about its inverse, up to 2^100.
    """

    rhs: formats.BlockFormat
    quantized_lhs: bool
    scale_rule: str
    exponent: int

    @property
    def call(self) -> MatmulCall:
        """What backends see of it."""
        lhs = self.rhs if self.quantized_lhs else None
        return MatmulCase(lhs=lhs, rhs=self.rhs).call

    def operands(self) -> tuple[Operand, Operand]:
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
    bound = backend.epsilon_bound * math.sqrt(case.call.lhs.shape[-1]) * HALF_ULP
    _compare_product(product, case.call, lhs, rhs, bound, FLUSHED)
