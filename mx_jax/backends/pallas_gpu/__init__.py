"""Block-scaled products and casts on GPUs by Pallas kernels (Mosaic GPU).

Optional: where JAX is too old or the GPU another, every call is rejected with that reason. Nothing
here imports Mosaic GPU before a call is taken.
"""

import dataclasses
from typing import Any

import jax

from mx_jax.backends.base import (
    Call,
    MatmulCall,
    Operand,
    PackCall,
    ProductsOnly,
    QuantizeBothCall,
    QuantizeCall,
    Target,
    rejects_symbolic,
)
from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.pallas_gpu.casts import quantize
from mx_jax.backends.pallas_gpu.layouts.packed import GpuWeights
from mx_jax.backends.pallas_gpu.products import matmul, packing, rejections
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


@dataclasses.dataclass(frozen=True)
class PallasGpuBackend(ProductsOnly):
    """Weights decoded on their way to the tensor cores; on Blackwell, two operands as they are.

    Attributes:
      name: what `only_backend` calls it.
      epsilon_bound: wider than the reference's: tensor cores truncate where they add.
      architecture: the GPU, for tests; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter, for tests on a CPU; None compiles.
    """

    name: str = "pallas_gpu"
    epsilon_bound: float = 4.0
    architecture: Architecture | None = None
    interpret: Any = None

    def rejects(self, call: Call, target: Target) -> str | None:
        """Why not: another machine, an older JAX, or a product that no kernel computes."""
        reason = rejects_symbolic(call)
        if reason is not None:
            return reason
        if isinstance(call, PackCall):
            return packing.rejects(call, target)
        if isinstance(call, QuantizeCall | QuantizeBothCall):
            return quantize.rejects(call, target)
        if not isinstance(call, MatmulCall):
            return self.rejects_other(call)
        return rejections.rejects(call, target)

    def scaled_matmul(self, lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
        """See `matmul.scaled_matmul`."""
        return matmul.scaled_matmul(
            lhs, rhs, call, architecture=self.architecture, interpret=self.interpret
        )

    def packed_matmul(self, lhs: Operand, rhs: PackedMXArray, call: MatmulCall) -> jax.Array:
        """See `matmul.packed_matmul`."""
        assert isinstance(rhs, GpuWeights)
        return matmul.packed_matmul(
            lhs, rhs, call, architecture=self.architecture, interpret=self.interpret
        )

    def pack(self, x: MXArray, call: PackCall) -> PackedMXArray:
        """See `packing.pack_weights`."""
        return packing.pack_weights(x, call, architecture=self.architecture)

    def quantize(
        self,
        x: jax.Array,
        call: QuantizeCall,
        random_bits: jax.Array | None,
        tensor_scale: jax.Array | None,
    ) -> MXArray:
        """See `quantize.quantize`."""
        return quantize.quantize(
            x, call, tensor_scale, architecture=self.architecture, interpret=self.interpret
        )

    def quantize_both(
        self,
        x: jax.Array,
        call: QuantizeBothCall,
        random_bits: tuple[jax.Array | None, jax.Array | None],
        tensor_scale: jax.Array | None,
    ) -> tuple[MXArray, MXArray]:
        """See `quantize.quantize_both`."""
        return quantize.quantize_both(
            x, call, tensor_scale, architecture=self.architecture, interpret=self.interpret
        )
