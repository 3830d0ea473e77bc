"""jit for tests: compiling is what takes their time, so it optimizes less.

Data that need no rounding come out the same, and so do two runs of one program. Not for tests of
rounding, of speed, or of what XLA makes of a program: they keep a user's compiler.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

OPTIONS: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):
    # Emits LLVM's code without MLIR in between. Newer versions have no such option.
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

quick = functools.partial(jax.jit, compiler_options=OPTIONS)


def with_gradients(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The product and both cotangents of an operation, of its operands, a cotangent and more."""

    def run(x: Any, w: Any, g: Any, *more: Any) -> Any:
        product, pullback = jax.vjp(lambda x, w: operation(x, w, *more), x, w)
        return product, *pullback(g)

    return run


def lowered(run: Callable[..., Any], *operands: Any, platform: str = "cpu") -> str:
    """The program for a platform, which need not be there."""
    return jax.jit(run).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def handlers(run: Callable[..., Any], *operands: Any, platform: str = "cpu") -> list[str]:
    """The compiled handlers that the program for a platform calls, sorted, without their prefix."""
    return sorted(re.findall(r"@mx_jax_cpu_(\w+)\(", lowered(run, *operands, platform=platform)))


@contextlib.contextmanager
def compilation_cache_off() -> Iterator[None]:
    """Compile anew: tests share a cache of programs, from which nothing is compiled twice."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX looks at its flag once, at the first program of a process.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
