"""What a GPU computes, by NumPy: XLA on CPUs flushes subnormals, which GPUs and NumPy have."""

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
    "neg": np.negative,
    "eq": np.equal,
    "lt": np.less,
    "gt": np.greater,
    "ge": np.greater_equal,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
}
NUMPY_TYPED = {
    "bitcast_convert_type": np.ndarray.view,
    "convert_element_type": np.ndarray.astype,
}


@np.errstate(all="ignore")
def by_numpy(function: Callable[..., jax.Array], *operands: np.ndarray) -> np.ndarray:
    """What a function of few primitives computes where subnormals are numbers."""
    (result,) = _evaluated(jax.make_jaxpr(function)(*operands).jaxpr, operands)
    return result


def _evaluated(jaxpr: Any, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    values: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        given = list(map(read, equation.invars))
        name, (result,) = equation.primitive.name, equation.outvars
        if name in NUMPY_TYPED:
            values[result] = NUMPY_TYPED[name](*given, equation.params["new_dtype"])
        elif name == "broadcast_in_dim":
            values[result] = np.broadcast_to(*given, equation.params["shape"])
        else:
            values[result] = NUMPY[name](*given)
    return list(map(read, jaxpr.outvars))
