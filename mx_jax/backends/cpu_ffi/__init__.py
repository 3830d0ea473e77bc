"""Handlers in C++ for the CPU, called through XLA's foreign function interface.

Optional: where the library is not built, every call is rejected with that reason, and the reference
computes it.
"""

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
from mx_jax.backends.cpu_ffi import (
    dequantize,
    library,
    matmul,
    packed_product,
    quantize,
    quantize_both,
    weights,
)
from mx_jax.codecs.explicit_axes import has_explicit_axes
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


@dataclasses.dataclass(frozen=True)
class CpuFfiBackend:
    """Quantize and multiply in `custom_calls/`, by the widest vectors that the machine has."""

    name: str = "cpu_ffi"
    epsilon_bound: float = 2.0

    def rejects(self, call: Call, target: Target) -> str | None:
        """Why not: another platform, no library, or a call that no handler computes."""
        if target.platform != "cpu":
            return f"runs on platform=cpu, got platform={target.platform}"
        if target.num_devices > 1:
            # Shardings that cut a mesh axis in two, as reshapes make them, reach no custom call:
            # jax.experimental.custom_partitioning fails to name them. The reference takes any.
            return (
                "runs on one device: JAX cannot hand a custom call every sharding, got "
                f"num_devices={target.num_devices}; only_backend('cpu_ffi') insists"
            )
        if has_explicit_axes():
            return "takes no mesh with explicit axes: types would have to say where results lie"
        loaded = library.load()
        if isinstance(loaded, str):
            library.say_once(loaded)
            return loaded
        if isinstance(call, QuantizeCall):
            return quantize.rejects(call)
        if isinstance(call, QuantizeBothCall):
            return quantize_both.rejects(call)
        if isinstance(call, DequantizeCall):
            return dequantize.rejects(call)
        if isinstance(call, PackCall):
            return weights.rejects(call)
        return matmul.rejects(call)

    def scaled_matmul(self, lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
        """See `matmul.scaled_matmul`."""
        return matmul.scaled_matmul(lhs, rhs, call)

    def packed_matmul(self, lhs: Operand, rhs: PackedMXArray, call: MatmulCall) -> jax.Array:
        """See `packed_product.packed_matmul`."""
        assert isinstance(rhs, weights.PackedWeights)
        return packed_product.packed_matmul(lhs, rhs, call)

    def quantize(
        self,
        x: jax.Array,
        call: QuantizeCall,
        random_bits: jax.Array | None,
        tensor_scale: jax.Array | None,
    ) -> MXArray:
        """See `quantize.quantize`."""
        return quantize.quantize(x, call, random_bits, tensor_scale)

    def quantize_both(
        self,
        x: jax.Array,
        call: QuantizeBothCall,
        random_bits: tuple[jax.Array | None, jax.Array | None],
        tensor_scale: jax.Array | None,
    ) -> tuple[MXArray, MXArray]:
        """See `quantize_both.quantize_both`."""
        return quantize_both.quantize_both(x, call, random_bits, tensor_scale)

    def dequantize(self, x: MXArray, call: DequantizeCall) -> jax.Array:
        """See `dequantize.dequantize`."""
        return dequantize.dequantize(x, call)

    def pack(self, x: MXArray, call: PackCall) -> weights.PackedWeights:
        """See `weights.pack`."""
        return weights.pack(x, call)
