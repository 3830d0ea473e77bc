"""jit for tests: compiling is what takes their time, so it optimizes less.

Data that need no rounding come out the same.
"""

import functools

import jax

quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
