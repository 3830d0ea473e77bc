"""A product that waits for vmap: what it is mapped over becomes an axis of the operands.

Layers of Equinox take one example, and `jax.vmap` maps them over a batch. A product with a recipe
of its own gradients would then be made for each example: the gradient of a kernel `[k, n]` as one
for each example, `[batch, k, n]`, in blocks of one row. As a primitive of its own the product first
becomes the one of the batch, as `jax.lax.dot_general` does, and is differentiated then.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

_product_p = Primitive("mx_jax_product")


def waiting(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A product that is made once it is known what it is mapped over.

    Args:
      product: called like `jax.lax.dot_general`, and with `key`; hashable.

    Returns:
      A function of the same arguments, `out_sharding` apart.
    """

    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        if out_sharding is not None:
            # On axes of an explicit mesh JAX wants to be told at once.
            options = {"out_sharding": out_sharding, "key": key}
            return product(
                lhs, rhs, dimension_numbers, precision, preferred_element_type, **options
            )
        dtype = preferred_element_type or jnp.result_type(lhs.dtype, rhs.dtype)
        return _product_p.bind(
            lhs,
            rhs,
            *([] if key is None else [key]),
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=jnp.dtype(dtype),
            product=product,
        )

    return multiply


def _make(
    lhs: jax.Array,
    rhs: jax.Array,
    *key: jax.Array,
    dimension_numbers: Any,
    product: Callable[..., jax.Array],
    **options: Any,
) -> jax.Array:
    return product(lhs, rhs, dimension_numbers, **options, key=key[0] if key else None)


def _run(*operands: Any, **params: Any) -> jax.Array:
    return _compiled(tuple(params.items()))(*operands)


@functools.lru_cache(maxsize=256)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(_make, **dict(params)))


def _shaped(lhs: Any, rhs: Any, *key: Any, product: Callable[..., jax.Array], **params: Any) -> Any:
    shaped, _ = dot_general_p.abstract_eval(lhs, rhs, out_sharding=None, **params)
    return shaped


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    lhs, rhs, *key = primals
    own = tuple(ad.instantiate_zeros(tangent) for tangent in tangents[:2])
    return jax.jvp(lambda lhs, rhs: _make(lhs, rhs, *key, **params), (lhs, rhs), own)


def _mapped(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    lhs, rhs, *key = operands
    left, right, *others = axes
    if any(axis is not None for axis in others):
        # A key for each: then they are as many products.
        out = jax.vmap(functools.partial(_make, **params), tuple(axes))(*operands)
        return out, 0
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = params.pop("dimension_numbers")
    lhs_k, lhs_batch = _past(left, lhs_k), _past(left, lhs_batch)
    rhs_k, rhs_batch = _past(right, rhs_k), _past(right, rhs_batch)
    num_batch = len(lhs_batch)
    if left is not None and right is not None:
        lhs_batch, rhs_batch, place = (left, *lhs_batch), (right, *rhs_batch), 0
    elif left is not None:
        place = num_batch + _place(left, lhs_k, lhs_batch)
    else:
        assert right is not None
        kept = lhs.ndim - num_batch - len(lhs_k)
        place = num_batch + kept + _place(right, rhs_k, rhs_batch)
    numbers = (lhs_k, rhs_k), (lhs_batch, rhs_batch)
    return _product_p.bind(lhs, rhs, *key, dimension_numbers=numbers, **params), place


def _past(mapped: int | None, axes: Sequence[int]) -> tuple[int, ...]:
    """Axes of an operand as they are numbered with the mapped one."""
    return tuple(axis + (mapped is not None and axis >= mapped) for axis in axes)


def _place(mapped: int, contracting: Sequence[int], batch: Sequence[int]) -> int:
    """Where the mapped axis stands among those that are kept."""
    return sum(axis not in (*contracting, *batch) for axis in range(mapped))


_product_p.def_impl(_run)
_product_p.def_abstract_eval(_shaped)
ad.primitive_jvps[_product_p] = _differentiated
batching.primitive_batchers[_product_p] = _mapped
mlir.register_lowering(_product_p, mlir.lower_fun(_make, multiple_results=False))
