"""What ragged_dot takes: group sizes, shapes, and recipes that can be had group by group."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import Operand
from mx_jax.formats import Whole
from mx_jax.specs import MatmulRecipe


def as_group_sizes(group_sizes: Any) -> jax.Array:
    """Group sizes as an array of integers.

    Raises:
      TypeError: they are no integers.
      ValueError: numbers known here that are negative, or larger than JAX's integers.
    """
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(group_sizes)):
        _check_numbers(np.asarray(group_sizes))
    sizes = group_sizes if isinstance(group_sizes, jax.Array) else jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"ragged_dot: group_sizes must be integers, got dtype={sizes.dtype}, "
            f"shape={sizes.shape}; convert them, e.g. group_sizes.astype(jnp.int32)"
        )
    return sizes


def _check_numbers(sizes: np.ndarray) -> None:
    """JAX would wrap what is larger than its integers, without a word."""
    if sizes.dtype.kind not in "iuO" or not sizes.size:
        return
    largest = jnp.iinfo(jnp.asarray(0).dtype).max
    for size in sizes.flat:
        if isinstance(size, int | np.integer) and not 0 <= size <= largest:
            raise ValueError(
                f"ragged_dot: group_sizes must lie in 0..{largest}, got {size} among "
                f"{sizes.size}; what exceeds the rows of lhs is cut off: "
                "numpy.clip(group_sizes, 0, lhs.shape[0])"
            )


def at_most(sizes: jax.Array, num_rows: int) -> jax.Array:
    """Sizes as int32: no group has more than all rows.

    Narrow integers would overflow when sizes are added up, wide ones when they are made narrow.
    """
    if sizes.dtype.itemsize >= 4:
        sizes = jnp.minimum(sizes, jnp.asarray(num_rows, sizes.dtype))
    return sizes.astype(jnp.int32)


def check_shapes(lhs: Operand, rhs: Operand, sizes: jax.Array) -> None:
    """Raise ValueError unless the shapes are those of a ragged product."""
    if lhs.ndim != 2 or rhs.ndim != 3 or sizes.ndim != 1:
        rule = "needs lhs [m, k], rhs [g, k, n] and group_sizes [g] (jax.vmap adds a batch)"
    elif lhs.shape[1] != rhs.shape[1]:
        rule = f"contracting sizes must agree, here k={lhs.shape[1]} and k={rhs.shape[1]}"
    elif rhs.shape[0] != sizes.shape[0]:
        rule = f"every group needs a matrix, here g={sizes.shape[0]} and g={rhs.shape[0]}"
    else:
        return
    raise ValueError(
        f"ragged_dot: {rule}; got lhs.shape={lhs.shape}, rhs.shape={rhs.shape}, "
        f"group_sizes.shape={sizes.shape}"
    )


def check_rows(recipe: MatmulRecipe) -> None:
    """Raise for what a recipe asks of the ragged axis and cannot have."""
    fwd, dlhs, drhs = recipe.fwd, recipe.dlhs, recipe.drhs
    over_rows = [("fwd.lhs", fwd.lhs, 0), ("dlhs.lhs", dlhs.lhs, 0)]
    over_rows += [("drhs.lhs", drhs.lhs, 1), ("drhs.rhs", drhs.rhs, 1)]
    for name, spec, axis in over_rows:
        if spec is None or not isinstance(spec.format.block[axis], Whole):
            continue
        # Such a rule cannot be split into peaks and scales.
        if spec.scale_rule.reads_values:
            raise ValueError(
                f"ragged_dot: {name} of recipe {recipe.name!r} has one block for all rows of a "
                f"group, got block={spec.format.block} of format={spec.format.name}, which "
                f"scale_rule={spec.scale_rule.name!r} cannot fill, since it looks at more than "
                "the largest value; use another rule, or blocks of a fixed size (a function of "
                "one's own that looks at amax alone: FromAmax(function))"
            )
    if recipe.mask_clipped and fwd.lhs is not None and fwd.lhs.format.block[0] != 1:
        raise ValueError(
            f"ragged_dot: mask_clipped=True of recipe {recipe.name!r} needs blocks of one row in "
            f"fwd.lhs, got block={fwd.lhs.format.block} of format={fwd.lhs.format.name}; use such "
            "a format, or mask_clipped=False"
        )
