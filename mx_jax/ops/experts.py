"""ragged_dot with its experts on several devices: rows go to them as codes, and products back."""

from typing import Any

import jax
from jax import lax

from mx_jax.codecs.blocks import Blocks
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import Key, as_operand, as_recipe, check_matmul_key, product_key
from mx_jax.ops.operands import operand_keys
from mx_jax.ops.placing import agreed_scale
from mx_jax.ops.quantize import quantize_operand, with_primal
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.ops.ragged_operands import LAST, as_group_sizes, at_most
from mx_jax.packed import unpacked
from mx_jax.reference.ragged import ragged_rows
from mx_jax.sharding.dispatch import dispatch
from mx_jax.specs import MatmulRecipe, MatmulSpec


def expert_ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    axis_name: Any,
    *,
    recipe: MatmulRecipe | str,
    capacity: int | None = None,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`ragged_dot` with its experts sharded over a mesh axis; inside `jax.shard_map`.

    Each of d devices has rows of its own for all experts, and an equal part of the experts. Rows
    are quantized where they are, sent to the devices of their experts as codes at their real width
    and scales, multiplied there by `ragged_dot`, and the products sent back; gradients go the same
    way in high precision. Groups have any length. The product is that of
    `ragged_dot(quantize(lhs), all experts)` for all devices' rows; a group's rows lie by device.

    Sent as values, and quantized as they arrive, are rows that the recipe keeps in high precision,
    transforms, prescales, or quantizes in blocks of several rows. One tensor scale (NVFP4) is that
    of all devices' rows. `sharding.dispatch` is for several products between the two all-to-alls.

    Args:
      lhs: `[m, k]`, this device's rows, by expert: values, or an MXArray blocked along k.
      rhs: `[experts / d, k, n]`, this device's consecutive part, as `ragged_dot` takes it.
      group_sizes: integers `[experts]`, this device's rows for each of all experts.
      axis_name: mesh axis, or axes, of d devices.
      recipe: as `ragged_dot` takes it.
      capacity: as in `sharding.dispatch`: None loses no row.
      precision: as in `ragged_dot`.
      preferred_element_type: as in `ragged_dot`; products are sent back in it.
      key: as in `ragged_dot`, the same on all devices: each one's index is folded into it.

    Returns:
      The product of this device's rows, `[m, n]`; zeros in rows of no group.

    Raises:
      ValueError: what `ragged_dot` and `sharding.dispatch` raise.
      TypeError: likewise.

    Examples:
      >>> import functools, jax, jax.numpy as jnp, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> product = functools.partial(
      ...     mx_jax.expert_ragged_dot, axis_name="expert", recipe="mxfp4")
      >>> run = jax.shard_map(product, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> jax.jit(run)(jnp.ones((4, 64)), jnp.ones((2, 64, 8)), jnp.array([1, 2]))[:, 0]
      Array([64., 64., 64.,  0.], dtype=float32)
    """
    recipe = as_recipe(recipe, "expert_ragged_dot")
    lhs = as_operand(unpacked(lhs), "lhs", recipe, "expert_ragged_dot")
    sizes = at_most(as_group_sizes(group_sizes), lhs.shape[0])
    key = check_matmul_key(key, recipe)
    if key is not None:
        key = jax.random.fold_in(key, lax.axis_index(axis_name))
    given = isinstance(lhs, MXArray)
    rows = lhs if given else _quantized(lhs, recipe, sizes, axis_name, key)
    sent = dispatch(rows, sizes, axis_name, capacity=capacity, same_scale=not given)
    y = ragged_dot(
        sent.rows,
        rhs,
        sent.group_sizes,
        recipe=recipe,
        precision=precision,
        preferred_element_type=preferred_element_type,
        key=key,
    )
    return sent.send_back(y)


def _quantized(
    x: jax.Array, recipe: MatmulRecipe, sizes: jax.Array, axis_name: Any, key: Key
) -> jax.Array | MXArray:
    """Rows as the product takes them, unless it takes rows together, or changes them first."""
    if not goes_by_row(recipe.fwd):
        return x
    spec = recipe.fwd.lhs
    assert spec is not None
    if spec.format.tensor_scale:
        # The scale of all rows is that of those in groups.
        x = ragged_rows(sizes, x.shape[0], unit=1).place(x)
    blocks: Blocks = LAST.blocks(spec.format)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    drawn = operand_keys(product_key(recipe, "fwd", key))[0] if spec.random_bits else None
    tensor_scale = agreed_scale(x, spec, blocks, axes)
    return with_primal(quantize_operand(x, spec, blocks, drawn, tensor_scale), x)


def goes_by_row(spec: MatmulSpec) -> bool:
    """Whether a product takes its rows as they are quantized one by one, wherever they lie."""
    own = spec.lhs
    if own is None or own.prescale != 1.0 or spec.transform is not None:
        return False
    return own.format.block[0] == 1
