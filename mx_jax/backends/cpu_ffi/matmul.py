"""Products by the compiled handlers: which calls they take, and how they are called."""

import jax

from mx_jax.backends.base import MatmulCall, Operand


def rejects(call: MatmulCall) -> str | None:
    """Why no handler takes a call, or None."""
    return "quantizes only: it has no products yet"


def scaled_matmul(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    """Never asked: `rejects` sends every call on."""
    raise AssertionError("the cpu_ffi backend rejects every MatmulCall")
