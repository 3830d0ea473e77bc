"""The reference as a backend: plain jnp, takes every single call on every platform."""

import dataclasses

import jax

from mx_jax.backends.base import (
    Call,
    DequantizeCall,
    MatmulCall,
    Operand,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    Target,
)
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.reference.quantize import dequantize, quantize


@dataclasses.dataclass(frozen=True)
class ReferenceBackend:
    """Dequantize to float32, then XLA's own dot. Defines what the others must give."""

    name: str = "reference"
    epsilon_bound: float = 2.0

    def rejects(self, call: Call, target: Target) -> str | None:
        """None, except for pairs: `ops` makes two casts of one that nobody does in one."""
        return "casts once at a time" if isinstance(call, QuantizeBothCall) else None

    def scaled_matmul(self, lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
        """See `reference.matmul.scaled_matmul`."""
        return scaled_matmul(
            lhs, rhs, call.dimension_numbers, call.out_dtype, call.precision, call.out_sharding
        )

    def quantize(
        self,
        x: jax.Array,
        call: QuantizeCall,
        random_bits: jax.Array | None,
        tensor_scale: jax.Array | None,
    ) -> MXArray:
        """See `reference.quantize.quantize`."""
        return quantize(
            x,
            call.format,
            call.blocks,
            call.scale_rule,
            call.rounding,
            random_bits,
            tensor_scale,
        )

    def quantize_both(
        self,
        x: jax.Array,
        call: QuantizeBothCall,
        random_bits: tuple[jax.Array | None, jax.Array | None],
        tensor_scale: jax.Array | None,
    ) -> tuple[MXArray, MXArray]:
        """Never asked: `rejects` sends every pair of casts on."""
        raise AssertionError("the reference backend rejects every QuantizeBothCall")

    def dequantize(self, x: MXArray, call: DequantizeCall) -> jax.Array:
        """See `MXArray.dequantize`."""
        return dequantize(dataclasses.replace(x, primal=None), call.dtype)

    def packed_matmul(self, lhs: Operand, rhs: PackedMXArray, call: MatmulCall) -> jax.Array:
        """Never asked: it packs nothing."""
        raise AssertionError("the reference packs no weights")

    def pack(self, x: MXArray, call: PackCall) -> MXArray:
        """x itself: what it reads is the MXArray."""
        return x
