"""The backends, in order of preference. The only list: adding one is one file and one line."""

from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.backends.cudnn import CUDNN
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend
from mx_jax.backends.xla import XLA
from mx_jax.backends.xla_bfloat16 import XLA_BFLOAT16
from mx_jax.backends.xla_scaled import XLA_SCALED

# What stands before the reference is checked on the hardware that it accepts; of `xla_scaled`, that
# XLA compiles it for that hardware. What stands behind the reference is not yet: `select` and
# `find` ask it only where `prefer_backends` or `only_backend` names it, also for calls that the
# reference refuses. Once measured, its place is the first.
BACKENDS: tuple[Backend, ...] = (
    XLA,
    CPU_FFI,
    XLA_SCALED,
    XLA_BFLOAT16,
    REFERENCE,
    PALLAS_GPU,
    CUDNN,
)
