"""What selection sees of a call and of the machine, and what a backend has to answer."""

import dataclasses
from typing import Any, Literal, Protocol

import jax
import numpy as np

from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.rounding import Rounding
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference.scale_rules import ScaleRule

Operand = jax.Array | MXArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that will run a call.

    Attributes:
      platform: jax's name, `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
      compute_capability: e.g. `(9, 0)` on an H200; None where there is none.
      num_devices: between how many devices `jit` may split the call.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    num_devices: int = 1


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
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    format: BlockFormat
    blocks: Blocks
    scale_rule: ScaleRule
    rounding: Rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeCall:
    """An MXArray whose values are wanted.

    Attributes:
      shape: logical shape.
      dtype: of the values.
      format: block format.
      blocks: axes from the end with block sizes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    format: BlockFormat
    blocks: Blocks


Call = MatmulCall | QuantizeCall | DequantizeCall


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

    def quantize(
        self,
        x: jax.Array,
        call: QuantizeCall,
        random_bits: jax.Array | None,
        tensor_scale: jax.Array | None,
    ) -> MXArray:
        """x quantized, without a gradient link."""
        ...

    def dequantize(self, x: MXArray, call: DequantizeCall) -> jax.Array:
        """The values of x in `call.dtype`, without a gradient link."""
        ...
