"""The backends, in order of preference. The only list: adding one is one file and one line."""

from mx_jax.backends.base import Backend
from mx_jax.backends.cpu_ffi import CpuFfiBackend
from mx_jax.backends.reference import ReferenceBackend
from mx_jax.backends.xla import XlaBackend

BACKENDS: tuple[Backend, ...] = (XlaBackend(), CpuFfiBackend(), ReferenceBackend())
