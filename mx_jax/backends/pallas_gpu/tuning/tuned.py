"""The tiles of a kernel: what `python -m mx_jax gpu` measured for a product, or its own."""

import dataclasses
from collections.abc import Callable

import jax

from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.tuning.tiles import Tuning
from mx_jax.backends.target import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement chose for one product.

    Attributes:
      kernel: name of the one that it is about.
      config: what it chose.
      tuning: the same, given what the kernel would do without; follows from the others.
    """

    kernel: str
    config: Config
    tuning: Callable[[Tuning], Tuning] = dataclasses.field(compare=False)


# In jit's cache key: what was traced for some tiles is not reused for others.
measured = jax.make_user_context(default_value=None)


def tuned(kernel: Kernel, code_bits: int) -> Tuning:
    """Tiles of a kernel: what was measured for the product that is traced, else its own."""
    own, chosen = kernel.tuning_of(code_bits), measured.value
    return own if chosen is None or chosen.kernel != kernel.name else chosen.tuning(own)
