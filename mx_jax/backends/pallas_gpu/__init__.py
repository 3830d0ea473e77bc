"""Block-scaled products on GPUs by Pallas kernels (Mosaic GPU), one file per architecture.

Optional: where JAX is too old or the GPU another, every call is rejected with that reason. Nothing
here imports Mosaic GPU before a call is taken.
"""

import dataclasses
from typing import Any

import jax

from mx_jax.backends.base import Call, MatmulCall, Operand, ProductsOnly, Target
from mx_jax.backends.pallas_gpu import matmul


@dataclasses.dataclass(frozen=True)
class PallasGpuBackend(ProductsOnly):
    """Weights of 4 or 8 bits, decoded in registers on their way to the tensor cores.

    Attributes:
      name: what `only_backend` calls it.
      epsilon_bound: wider than the reference's: wgmma truncates where it adds.
      interpret: parameters of Mosaic's interpreter, for tests on a CPU; None compiles.
    """

    name: str = "pallas_gpu"
    epsilon_bound: float = 4.0
    interpret: Any = None

    def rejects(self, call: Call, target: Target) -> str | None:
        """Why not: another machine, an older JAX, or a product that no kernel computes."""
        if not isinstance(call, MatmulCall):
            return self.rejects_other(call)
        return matmul.rejects(call, target)

    def scaled_matmul(self, lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
        """See `matmul.scaled_matmul`."""
        return matmul.scaled_matmul(lhs, rhs, call, interpret=self.interpret)
