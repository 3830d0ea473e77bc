"""What a test needs: a library, or time. Where it lacks, the test is skipped, and says why."""

from typing import Any

import pytest

from mx_jax.backends.cpu_ffi import library

LOADED = library.load()
needs_library = pytest.mark.skipif(isinstance(LOADED, str), reason=f"no CPU library: {LOADED}")
# The two backends of a CPU, to parametrize a test by.
CPU_BACKENDS = ["reference", pytest.param("cpu_ffi", marks=needs_library)]


def slow(*case: Any) -> Any:
    """A case of a parametrized test that is left out by default."""
    return pytest.param(*case, marks=pytest.mark.slow)
