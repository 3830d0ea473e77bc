"""What an accelerator computes, by NumPy: XLA on CPUs flushes subnormals, which NumPy has.

GPUs have them too. TPUs flush them in every operation of floats.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

NUMPY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "neg": np.negative,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "not": np.invert,
    "eq": np.equal,
    "lt": np.less,
    "gt": np.greater,
    "ge": np.greater_equal,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
}
# What moves bits, and flushes nothing.
MOVES = ("select_n", "broadcast_in_dim", "bitcast_convert_type")
NUMPY_TYPED = {"bitcast_convert_type": np.ndarray.view, "convert_element_type": np.ndarray.astype}


@np.errstate(all="ignore")
def by_numpy(
    function: Callable[..., jax.Array], *operands: np.ndarray, flushes: bool = False
) -> np.ndarray:
    """What a function of few primitives computes where subnormals are numbers, or count as 0."""
    (result,) = _evaluated(jax.make_jaxpr(function)(*operands).jaxpr, operands, flushes)
    return result


def _flushed(x: Any) -> Any:
    if not isinstance(x, np.ndarray | np.generic) or x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _evaluated(jaxpr: Any, operands: Sequence[np.ndarray], flushes: bool) -> list[np.ndarray]:
    values: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = list(map(read, equation.invars))
        name, (result,) = equation.primitive.name, equation.outvars
        flushed = _flushed if flushes and name not in MOVES else lambda x: x
        inputs = list(map(flushed, inputs))
        if name in NUMPY_TYPED:
            values[result] = NUMPY_TYPED[name](*inputs, equation.params["new_dtype"])
        elif name == "broadcast_in_dim":
            values[result] = np.broadcast_to(*inputs, equation.params["shape"])
        else:
            values[result] = NUMPY[name](*inputs)
        values[result] = flushed(values[result])
    return list(map(read, jaxpr.outvars))
