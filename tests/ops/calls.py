"""The products by name, of up to 4 rows by a matrix, for tests of what all of them take."""

from collections.abc import Callable
from typing import Any

import mx_jax

PLAIN = (((1,), (0,)), ((), ()))
CALLS: dict[str, Callable[..., Any]] = {
    "matmul": mx_jax.matmul,
    "dot_general": lambda x, w, **options: mx_jax.dot_general(x, w, PLAIN, **options),
    "einsum": lambda x, w, **options: mx_jax.einsum("mk,kn->mn", x, w, **options),
    "ragged_dot": lambda x, w, **options: mx_jax.ragged_dot(x, w[None], [4], **options),
}
