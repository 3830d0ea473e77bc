"""What selection sees of a call and of the machine, and what a backend has to answer."""

import dataclasses
from typing import Any, Literal, Protocol

import jax
import numpy as np

from mx_jax.backends.target import Target as Target
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.rounding import Rounding
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.reference.scale_rules import ScaleRule

Operand = jax.Array | MXArray
AnyOperand = Operand | PackedMXArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """A product in canonical order: `[*batch, *m, *k]` by `[*batch, *n, *k]` to `[*batch, *m, *n]`.

    An operand may also come with its last two groups exchanged, as BLAS calls a transposed one:
    moving data is left to the backend, which may not need to. Blocks lie along the last axis of
    the contracting group.

    Attributes:
      lhs_shape: shape of the left operand.
      rhs_shape: shape of the right operand.
      num_batch: how many leading axes are batch axes.
      num_contracting: how many axes are contracted.
      lhs_k_first: whether lhs is `[*batch, *k, *m]`.
      rhs_k_first: whether rhs is `[*batch, *k, *n]`.
      lhs_format: block format of the left operand, None for high precision.
      rhs_format: block format of the right operand, None for high precision.
      lhs_dtype: dtype of a left operand in high precision; None if it is quantized, or unknown.
      rhs_dtype: likewise, of the right operand.
      lhs_scale_axes: axes of the left operand whose positions have tensor scales of their own.
      rhs_scale_axes: likewise, of the right operand.
      out_dtype: dtype of the product.
      precision: what `jax.lax.dot_general` takes, for high-precision operands.
      fast_accumulation: whether a native kernel may add in lower precision.
      out_sharding: where the product lies, as `jax.lax.dot_general` takes it: only on a mesh with
        explicit axes, else None.
    """

    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    num_batch: int
    num_contracting: int
    lhs_format: BlockFormat | None
    rhs_format: BlockFormat | None
    out_dtype: np.dtype
    precision: Any = None
    fast_accumulation: bool = False
    out_sharding: Any = None
    lhs_k_first: bool = False
    rhs_k_first: bool = False
    lhs_dtype: np.dtype | None = None
    rhs_dtype: np.dtype | None = None
    lhs_scale_axes: tuple[int, ...] = ()
    rhs_scale_axes: tuple[int, ...] = ()

    @property
    def dimension_numbers(self) -> jax.lax.DotDimensionNumbers:
        """Dimension numbers of `jax.lax.dot_general` for this order."""
        batch = tuple(range(self.num_batch))
        return (self.contracting_axes("lhs"), self.contracting_axes("rhs")), (batch, batch)

    def contracting_axes(self, side: Literal["lhs", "rhs"]) -> tuple[int, ...]:
        """Axes of one operand that are contracted."""
        left = side == "lhs"
        first = self.lhs_k_first if left else self.rhs_k_first
        ndim = len(self.lhs_shape if left else self.rhs_shape)
        start = self.num_batch if first else ndim - self.num_contracting
        return tuple(range(start, start + self.num_contracting))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeCall:
    """A tensor to be quantized.

    Attributes:
      shape: logical shape.
      dtype: float32, bfloat16 or float16.
      format: block format.
      blocks: axes from the end with block sizes.
      scale_rule: from amax to the stored scale.
      rounding: how dropped bits decide.
      scale_axes: the first axes whose positions are given tensor scales of their own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    format: BlockFormat
    blocks: Blocks
    scale_rule: ScaleRule
    rounding: Rounding
    scale_axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeBothCall:
    """A tensor to be quantized twice, along different axes.

    Attributes:
      first: one cast.
      second: the other, of the same shape and dtype.
    """

    first: QuantizeCall
    second: QuantizeCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeCall:
    """An MXArray whose values are wanted.

    Attributes:
      shape: logical shape.
      dtype: of the values.
      format: block format.
      blocks: axes from the end with block sizes.
      scale_axes: axes whose positions have tensor scales of their own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    format: BlockFormat
    blocks: Blocks
    scale_axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackCall:
    """Weights to be laid out once, for products in which they are rhs.

    Attributes:
      shape: logical shape.
      format: block format.
      blocks: axes from the end with block sizes.
      num_batch: how many leading axes are batch axes of the products.
      contracting: the axes that the products contract, in ascending order.
      lhs_format: block format of the activations; None for high precision, or if it is not known.
      scale_axes: axes whose positions have tensor scales of their own.
    """

    shape: tuple[int, ...]
    format: BlockFormat
    blocks: Blocks
    num_batch: int
    contracting: tuple[int, ...]
    lhs_format: BlockFormat | None = None
    scale_axes: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """The axes that stay."""
        axes = range(self.num_batch, len(self.shape))
        return tuple(axis for axis in axes if axis not in self.contracting)

    @property
    def k_first(self) -> bool:
        """Whether the contracted axes come before all kept ones."""
        axes = range(self.num_batch, self.num_batch + len(self.contracting))
        return self.contracting == tuple(axes) and bool(self.kept)

    def rejects_layout(self) -> str | None:
        """Why the axes make no matrices `[n, k]` with blocks along k, or None."""
        if len(self.blocks) != 1:
            return f"packs blocks along one axis, got blocks={self.blocks}"
        ((axis, block),) = self.blocks
        k = self.contracting
        if not self.kept or axis % len(self.shape) != k[-1]:
            return f"packs blocks along the last contracted axis, got {self}"
        if not self.k_first and (*self.kept, *k) != tuple(range(self.num_batch, len(self.shape))):
            return f"packs contracted axes before or after all kept ones, got {self}"
        if isinstance(block, int) and len(k) > 1 and self.shape[k[-1]] % block:
            return f"needs whole blocks along the last of several contracted axes, got {self}"
        return None


Call = MatmulCall | QuantizeCall | QuantizeBothCall | DequantizeCall | PackCall


def rejects_symbolic(call: Call) -> str | None:
    """Why a kernel of constant sizes does not take a call whose sizes `jax.export` leaves open."""
    calls = (call.first, call.second) if isinstance(call, QuantizeBothCall) else (call,)
    for each in calls:
        both = isinstance(each, MatmulCall)
        for shape in (each.lhs_shape, each.rhs_shape) if both else (each.shape,):
            if not all(isinstance(size, int) for size in shape):
                return f"needs constant sizes, got shape={shape}"
    return None


class Backend(Protocol):
    """One way to compute. Every backend gives the reference's codes, scales and values bit for bit,
    and products within its stated bound of the exact ones."""

    @property
    def name(self) -> str:
        """What `only_backend` and `explain` call it."""
        ...

    @property
    def epsilon_bound(self) -> float:
        """c in `|C - exact| <= c * 2^-24 * sqrt(k) * sum |a b|` for float32 products."""
        ...

    def rejects(self, call: Call, target: Target) -> str | None:
        """Why this call cannot be taken on this machine, e.g. `"needs k % 128 == 0, got k=96"`;
        None to accept. Decided from the description alone, before anything runs."""
        ...

    def scaled_matmul(self, lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
        """The product `[*batch, *m, *n]` in `call.out_dtype`."""
        ...

    def packed_matmul(self, lhs: Operand, rhs: PackedMXArray, call: MatmulCall) -> jax.Array:
        """The same, of weights that this backend packed for a product of these axes."""
        ...

    def quantize(
        self,
        x: jax.Array,
        call: QuantizeCall,
        random_bits: jax.Array | None,
        tensor_scale: jax.Array | None,
    ) -> MXArray:
        """x quantized, without a gradient link."""
        ...

    def quantize_both(
        self,
        x: jax.Array,
        call: QuantizeBothCall,
        random_bits: tuple[jax.Array | None, jax.Array | None],
        tensor_scale: jax.Array | None,
    ) -> tuple[MXArray, MXArray]:
        """x quantized twice, as two calls of `quantize` would."""
        ...

    def dequantize(self, x: MXArray, call: DequantizeCall) -> jax.Array:
        """The values of x in `call.dtype`, without a gradient link."""
        ...

    def pack(self, x: MXArray, call: PackCall) -> MXArray | PackedMXArray:
        """x in this backend's own layout."""
        ...


class ProductsOnly:
    """What a backend answers that casts nothing and has no layout of its own for weights."""

    name: str

    def rejects_other(self, call: Call) -> str | None:
        """Why a call that is no product is not taken."""
        if isinstance(call, QuantizeCall | QuantizeBothCall):
            return "quantizes nothing: XLA fuses the reference's own code"
        if isinstance(call, DequantizeCall):
            return "dequantizes nothing: XLA fuses the reference's own code"
        return None if isinstance(call, MatmulCall) else "has no layout of its own for weights"

    def quantize(
        self,
        x: jax.Array,
        call: QuantizeCall,
        random_bits: jax.Array | None,
        tensor_scale: jax.Array | None,
    ) -> MXArray:
        """Never asked: `rejects` sends the call on."""
        raise AssertionError(f"the {self.name} backend rejects every QuantizeCall")

    def quantize_both(
        self,
        x: jax.Array,
        call: QuantizeBothCall,
        random_bits: tuple[jax.Array | None, jax.Array | None],
        tensor_scale: jax.Array | None,
    ) -> tuple[MXArray, MXArray]:
        """Never asked: `rejects` sends the call on."""
        raise AssertionError(f"the {self.name} backend rejects every QuantizeBothCall")

    def dequantize(self, x: MXArray, call: DequantizeCall) -> jax.Array:
        """Never asked: `rejects` sends the call on."""
        raise AssertionError(f"the {self.name} backend rejects every DequantizeCall")

    def pack(self, x: MXArray, call: PackCall) -> MXArray | PackedMXArray:
        """Never asked: `rejects` sends the call on."""
        raise AssertionError(f"the {self.name} backend rejects every PackCall")

    def packed_matmul(self, lhs: Operand, rhs: PackedMXArray, call: MatmulCall) -> jax.Array:
        """Never asked: only who packed weights multiplies them."""
        raise AssertionError(f"the {self.name} backend packs no weights")
