"""Products that GPUs are timed by: x by one weight after the other, each of its own; and whether
what they give is right."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mx_jax
from benchmarks.gpu_compare import PLAIN, copies_exceeding_cache
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_gpu import products as kernels
from mx_jax.backends.pallas_gpu.layouts import PackedWeights
from mx_jax.backends.target import Backend, Target
from mx_jax.backends.xla import XLA_BFLOAT16
from mx_jax.backends.xla_scaled import XLA_SCALED
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.testing.cases import MatmulCase

KERNEL, BASELINE = PALLAS_GPU.name, "bf16 dot"

# Bytes and bfloat16 operations a second, from NVIDIA's data sheets (dense).
PEAKS = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
}

# `x[m, k], weight -> [m, n]` in bfloat16.
Product = Callable[[jax.Array, Any], jax.Array]


def _batch(x: MXArray) -> MXArray:
    return jax.tree.map(lambda array: array[None], x)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """The baseline."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """The formats of a timed product.

    Attributes:
      lhs: x is quantized to it as a part of the time; None: x stays in bfloat16.
      rhs: of the weights.
    """

    lhs: BlockFormat | None = None
    rhs: BlockFormat

    def __str__(self) -> str:
        return f"{'bf16' if self.lhs is None else self.lhs.name} x {self.rhs.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A product that is timed: x `[m, k]` by weights `[n, k]`, which are quantized before."""

    pair: Pair
    m: int
    n: int
    k: int

    @property
    def copies(self) -> int:
        """Weights that together no cache holds, also in the format of fewest bits."""
        return copies_exceeding_cache(self.n * self.k * self.pair.rhs.bits_per_element)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"pair": str(self.pair), "m": self.m, "n": self.n, "k": self.k}

    def __str__(self) -> str:
        return f"{self.pair}, {self.m} x {self.n} x {self.k}"


def bound(facts: str, what: Timed, bits: float) -> float | None:
    """Seconds that a product takes at least; None on a GPU whose peaks are not known here.

    Args:
      facts: the GPU's name.
      what: the product.
      bits: of a weight.
    """
    peaks = next((peaks for name, peaks in PEAKS.items() if name in facts), None)
    if peaks is None:
        return None
    m, n, k = what.m, what.n, what.k
    return max((n * k * bits / 8 + 2 * m * (n + k)) / peaks[0], 2 * m * n * k / peaks[1])


def speed_bound(facts: str, what: Timed) -> float | None:
    """How many times bfloat16's speed a product has at most, if a GPU's peaks are known."""
    ours, base = (bound(facts, what, bits) for bits in (what.pair.rhs.bits_per_element, 16))
    return base / ours if base and ours else None


def kernel_product(pair: Pair) -> tuple[Callable[[MXArray], Any], Product]:
    """How the GPU's kernel wants quantized weights, and its product by them.

    Args:
      pair: the formats.
    """

    def product(x: jax.Array, w: Any) -> jax.Array:
        x = _cast(x, pair.lhs)
        return kernels.by_weights(x[None], w, jnp.bfloat16)[0]

    return lambda w: PackedWeights.of(_batch(w)), product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to multiply.

    Attributes:
      lay_out: from bfloat16 weights `[n, k]` to the operand of `product`; not a part of the time.
      product: `x[m, k], weights -> [m, n]` in bfloat16.
    """

    lay_out: Callable[[jax.Array], Any]
    product: Product

    def weights(self, n: int, k: int, copies: int) -> list[Any]:
        """As many as copies; so scaled, a product keeps the magnitude of x."""
        run = jax.jit(
            lambda key: self.lay_out(jax.random.normal(key, (n, k), jnp.bfloat16) / k**0.5)
        )
        return [run(key) for key in jax.random.split(jax.random.key(0), copies)]


def products(pair: Pair, n: int, k: int, target: Target) -> dict[str, Way]:
    """Ways to multiply by weights `[n, k]` on a machine, by name."""
    lay_out, kernel = kernel_product(pair)
    known: dict[str, tuple[Callable[[jax.Array], Any], Product]] = {
        KERNEL: (lambda w: lay_out(mx_jax.quantize(w, pair.rhs)), kernel),
        BASELINE: (lambda w: w, dot),
    }
    for name, backend in ((PLAIN, XLA_BFLOAT16), (XLA_SCALED.name, XLA_SCALED)):
        if backend.rejects(_case(pair, 1, n, k).call, target) is None:
            by = functools.partial(_by_backend, pair, backend)
            known[name] = functools.partial(mx_jax.quantize, format=pair.rhs), by
    return {name: Way(lay_out=way, product=of) for name, (way, of) in known.items()}


def _case(pair: Pair, m: int, n: int, k: int) -> MatmulCase:
    facts: dict[str, Any] = {"lhs": pair.lhs, "rhs": pair.rhs, "m": (m,), "n": (n,), "k": (k,)}
    return MatmulCase(dtype="bfloat16", out_dtype="bfloat16", **facts)


def _by_backend(pair: Pair, backend: Backend, x: jax.Array, w: MXArray) -> jax.Array:
    left = x if pair.lhs is None else mx_jax.quantize(x, pair.lhs)
    return backend.run(_case(pair, *x.shape[:1], *w.shape).call, left, w)


def _cast(x: jax.Array, format: BlockFormat | None) -> jax.Array:
    """x as the product sees it: rounded to a format's values, if it names one."""
    return x if format is None else mx_jax.quantize(x, format).dequantize(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=0)
def error(pair: Pair, out: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    """The largest error of a product by bfloat16 weights that were quantized, over what backends'
    bounds and one rounding to bfloat16 allow; Inf where one side alone is NaN."""
    left = _cast(x, pair.lhs).astype(jnp.float32)
    right = mx_jax.quantize(w, pair.rhs).dequantize(jnp.float32)
    multiply = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    expected, magnitude = multiply(left, right.T), multiply(abs(left), abs(right).T)
    # Twice: the reference has an error of its own.
    allowed = 2 * PALLAS_GPU.epsilon_bound * math.sqrt(x.shape[1]) * 2.0**-24 * magnitude
    info = jnp.finfo(out.dtype)
    allowed += float(info.eps) / 2 * (abs(expected) + allowed) + float(info.smallest_normal)
    actual = out.astype(jnp.float32)
    over = jnp.where(actual == expected, 0.0, abs(actual - expected) / allowed)
    return jnp.max(jnp.where(jnp.isnan(over), jnp.inf, over))
