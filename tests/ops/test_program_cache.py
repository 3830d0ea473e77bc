"""Programs that JAX keeps in a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import mx_jax

OPTIONS = {"jax_compilation_cache_dir": None, "jax_persistent_cache_min_compile_time_secs": 0.0}


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A folder in which JAX keeps programs, for one test."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    compilation_cache.reset_cache()
    for name, value in OPTIONS.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    jax.clear_caches()


def test_programs_of_equal_shapes_and_other_formats_are_kept_apart(programs: Path):
    """Codes of these formats are arrays of the same shapes and dtypes."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    formats = ("mxfp8_e4m3", "mxint8")

    def run(format: str) -> Any:
        cast = jax.jit(lambda w: mx_jax.quantize(w, format, axis=1))
        pack = jax.jit(mx_jax.pack_weights)
        multiply = jax.jit(lambda x, w: mx_jax.matmul(x, w.T, recipe="high_precision"))
        codes = cast(w)
        return codes.codes, codes.scales, multiply(x, pack(codes))

    expected = {format: jax.tree.map(np.asarray, run(format)) for format in formats}
    assert len({parts[0].tobytes() for parts in expected.values()}) == 2
    assert len({str(jax.tree.map(np.shape, parts)) for parts in expected.values()}) == 1
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    jax.config.update("jax_compilation_cache_dir", str(programs))
    for again in (False, True):
        jax.clear_caches()
        for format in formats:
            jax.tree.map(np.testing.assert_array_equal, run(format), expected[format])
        kept = len([*programs.glob("*-cache")])
        result = sum("cache_hits" in name for name in hits)
        # Small programs, such as a transpose, may be the same for several formats.
        assert result >= 4 if again else kept >= 4, (result, kept)
        hits.clear()
