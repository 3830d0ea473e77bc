"""What a test needs that a machine may lack: the test is skipped there, and says why."""

import pytest

from mx_jax.backends.cpu_ffi import library

LOADED = library.load()
needs_library = pytest.mark.skipif(isinstance(LOADED, str), reason=f"no CPU library: {LOADED}")
# The two backends of a CPU, to parametrize a test by.
CPU_BACKENDS = ["reference", pytest.param("cpu_ffi", marks=needs_library)]
