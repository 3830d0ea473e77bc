"""The backends, in order of preference. The only list: adding one is one file and one line."""

from mx_jax.backends.base import Backend
from mx_jax.backends.cpu_ffi import CpuFfiBackend
from mx_jax.backends.cudnn import CudnnBackend
from mx_jax.backends.pallas_gpu import PallasGpuBackend
from mx_jax.backends.reference import ReferenceBackend
from mx_jax.backends.xla import XlaBackend

# The GPU kernels and cuDNN stand behind the reference, which takes everything, until they have been
# measured on hardware: only `only_backend` reaches them. Their places are the first.
BACKENDS: tuple[Backend, ...] = (
    XlaBackend(),
    CpuFfiBackend(),
    ReferenceBackend(),
    PallasGpuBackend(),
    CudnnBackend(),
)
