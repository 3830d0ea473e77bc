"""Experts of ragged products on a mesh: gathered as codes, on automatic axes and explicit ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mx_jax.backends.calls import Operand
from mx_jax.codecs.explicit_axes import has_explicit_axes
from mx_jax.ops.explicit_axes import stored
from mx_jax.ops.operands import reuse_moved
from mx_jax.ops.placing import given_moves
from mx_jax.ops.product import Given
from mx_jax.ops.ragged_operands import LAST
from mx_jax.sharding.movement import Movement, spec_of
from mx_jax.specs import MatmulRecipe, MatmulSpec


def experts_move(recipe: MatmulRecipe, lhs: Any, rhs: Any) -> Movement | None:
    """How the matrices get to their products: as their recipe gathers them; None: not at all.

    Raises:
      ValueError: rows that would be gathered, whose groups no gather would put together.
    """
    if recipe.gather is not None and recipe.gather.lhs is not None:
        raise ValueError(
            f"ragged_dot: gather brings experts to their rows, not rows together, whose groups "
            f"would be torn apart, got lhs={recipe.gather.lhs} with lhs.shape={lhs.shape}; leave "
            "lhs out, or send rows to their experts with mx_jax.expert_ragged_dot"
        )
    return given_moves(recipe, lhs, rhs)[1]


def matrices_back(
    rhs: Operand, move: Movement | None, spec: MatmulSpec
) -> tuple[Operand, Movement | None]:
    """Saved matrices as the rows' gradient multiplies them, and how they get there."""
    return reuse_moved(rhs, move, spec, LAST)


def on_automatic_axes(
    multiply: Callable[..., jax.Array], lhs: Given, rhs: Given, extra: Any, recipe: MatmulRecipe
) -> jax.Array:
    """A ragged product, on explicit mesh axes as on automatic ones.

    JAX infers no types of ragged products. Types say where operands lie, and the product's rows
    lie as those of lhs do, its columns as those of rhs that are not gathered.
    """
    if not has_explicit_axes():
        return multiply(lhs, rhs, extra, recipe)
    rows, lies = stored(lhs.operand)[0], stored(rhs.operand)
    gathered = frozenset[str]()
    if recipe.gather is not None:
        gathered = recipe.gather.on_mesh()
        own = dataclasses.replace(recipe.gather, rhs=spec_of(lies))
        recipe = dataclasses.replace(recipe, gather=own)
    columns = tuple(name for name in lies[2] if name not in {*gathered, *rows})
    run: Any = jax.sharding.auto_axes(
        lambda *operands: multiply(*operands, recipe),
        out_sharding=PartitionSpec(rows or None, columns or None),
    )
    return run(lhs, rhs, extra)
