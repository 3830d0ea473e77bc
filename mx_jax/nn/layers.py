"""What layers of flax.linen and flax.nnx share: recipes, operands, random keys, errors; and weights
that stay in their format: in trees, in linen's parameters, in `flax.serialization`.

Codes have no gradient: `jax.grad` of a tree that holds them fails on their integers. So the tree is
split, and the gradient is taken of the part of floating-point arrays.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import serialization
from flax.core import spmd
from flax.typing import LogicalRules, PathParts
from jax.sharding import PartitionSpec

from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import as_recipe
from mx_jax.packed import Quantized
from mx_jax.recipes import Recipe
from mx_jax.sharding.movement import GatherLike
from mx_jax.specs import MatmulRecipe

# Flax's name of the stream that stochastic recipes draw from.
RNG_STREAM = "quantize"

AnyRecipe = TypeVar("AnyRecipe", bound=MatmulRecipe)


def layer_recipe(recipe: object, gather: GatherLike, layer: str) -> Recipe:
    """A layer's recipe by what its fields say; a `gather` of None leaves the recipe's own."""
    recipe = as_recipe(recipe, layer, Recipe)
    return recipe if gather is None else dataclasses.replace(recipe, gather=gather)


def recipe_of(recipe: AnyRecipe, spec: PartitionSpec | None) -> AnyRecipe:
    """A layer's recipe, which knows how the layer's kernel is sharded.

    What a `Gather` says itself stays. A kernel without metadata is not sharded, and not gathered,
    except on a mesh with explicit axes, where its type has its sharding.
    """
    gather = recipe.gather
    if gather is None or gather.rhs is not None:
        return recipe
    where = dataclasses.replace(gather, rhs=PartitionSpec() if spec is None else spec)
    return dataclasses.replace(recipe, gather=where)


def nnx_spec(variable: object) -> PartitionSpec | None:
    """Sharding of an nnx variable, by its metadata."""
    get = getattr(variable, "get_metadata", None)
    if get is None:
        return None
    metadata = get()
    sharding = metadata.get("out_sharding") or metadata.get("sharding_names")
    return None if not sharding else on_mesh(sharding, metadata.get("sharding_rules"))


def on_mesh(
    names: PartitionSpec | Sequence[str | None], rules: LogicalRules | None
) -> PartitionSpec:
    """Names of axes as mesh axes, by the rules of the variable and those in context."""
    spec: Any = spmd.apply_rules(tuple(getattr(names, "spec", names)), rules)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return PartitionSpec(*spec)
    # A logical name without a rule shards nothing.
    known = {*mesh.axis_names}
    names_of = (part if isinstance(part, tuple) else (part,) for part in spec)
    pairs = zip(spec, names_of, strict=True)
    return PartitionSpec(*(part if {*names} <= known else None for part, names in pairs))


@contextlib.contextmanager
def named_in_errors(layer: str) -> Iterator[None]:
    """Add a note to the errors of a product: a kernel that its recipe cannot use, a missing key."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(f"in layer {layer}")
        raise


def split_stored(params: object) -> tuple[Any, Any]:
    """Parameters as two trees of their structure: arrays to train, and quantized weights.

    Args:
      params: a tree whose quantized weights are `MXArray` or `PackedMXArray`, as `convert.weights`
        gives it.

    Returns:
      (trained, stored), with None in each where the other has something. Optimizers and `jax.grad`
      take the first as it is.

    Raises:
      ValueError: nothing to train.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> kernel = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> trained, stored = mx_jax.nn.split_stored({"kernel": kernel, "bias": jnp.zeros(8)})
      >>> def loss(trained):
      ...     params = mx_jax.nn.join_stored(trained, stored)
      ...     recipe = mx_jax.recipes.weight_only("mxfp4")
      ...     x = jnp.ones((2, 64))
      ...     return (mx_jax.matmul(x, params["kernel"], recipe=recipe) + params["bias"]).sum()
      >>> jax.grad(loss)(trained)["bias"]
      Array([2., 2., 2., 2., 2., 2., 2., 2.], dtype=float32)
    """
    trained = jax.tree.map(lambda x: None if _is_stored(x) else x, params, is_leaf=_is_stored)
    stored = jax.tree.map(lambda x: x if _is_stored(x) else None, params, is_leaf=_is_stored)
    if not jax.tree.leaves(trained):
        count = len(jax.tree.leaves(stored, is_leaf=_is_stored))
        raise ValueError(
            f"split_stored: nothing to train, all {count} parameters are quantized weights, which "
            "have no gradient; add adapters (nnx.LoRA), leave some layers to no rule of "
            "convert.weights, or train arrays straight through their cast, by a recipe "
            "weight_only(format)"
        )
    return trained, stored


def join_stored(trained: object, stored: object) -> Any:
    """The parameters of which `split_stored` made two trees.

    Raises:
      ValueError: trees of two structures.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> kernel = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> trained, stored = mx_jax.nn.split_stored({"kernel": kernel, "bias": jnp.zeros(8)})
      >>> stepped = jax.tree.map(lambda x: x + 1, trained)
      >>> params = mx_jax.nn.join_stored(stepped, stored)
      >>> params["kernel"] is kernel, float(params["bias"][0])
      (True, 1.0)
    """

    def is_leaf(x: object) -> bool:
        return x is None or _is_stored(x)

    places, other = (jax.tree.structure(tree, is_leaf=is_leaf) for tree in (trained, stored))
    if places != other:
        raise ValueError(
            "join_stored: both trees must come from one split_stored, got structures "
            f"trained={places} and stored={other}"
        )
    return jax.tree.map(lambda x, y: y if x is None else x, trained, stored, is_leaf=is_leaf)


def trainable(path: PathParts, value: object) -> bool:
    """A filter of nnx: parameters that have a gradient, so all but quantized weights.

    Examples:
      >>> import jax.numpy as jnp, mx_jax, optax
      >>> from flax import nnx
      >>> rule = mx_jax.convert.Rule(".*", mx_jax.recipes.weight_only("mxfp4"))
      >>> model = mx_jax.convert.weights(nnx.LoRALinear(64, 8, lora_rank=2, rngs=nnx.Rngs(0)), rule)
      >>> trained = mx_jax.nn.nnx.trainable
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=trained)
      >>> loss = lambda model: model(jnp.ones((2, 64))).sum()
      >>> gradients = nnx.grad(loss, argnums=nnx.DiffState(0, trained))(model)
      >>> sorted(gradients)
      ['bias', 'lora']
    """
    # Late: programs of flax.linen alone need not wait for it.
    from flax import nnx

    leaves = jax.tree.leaves(value, is_leaf=_is_stored)
    return nnx.OfType(nnx.Param)(path, value) and not any(map(_is_stored, leaves))


def _is_stored(x: object) -> bool:
    return isinstance(x, Quantized)


# flax.serialization -------------------------------------------------------------------------------
#
# State dicts hold the arrays of MXArrays, and what they are. Linen takes every attribute of a
# module apart and puts it together again this way, also while it is traced: so nothing is computed
# here, and codes are one in a byte.


def _state(x: MXArray) -> dict[str, Any]:
    # Late, as below: importing the layers loads no reader of checkpoints.
    from mx_jax.checkpoint import wire

    state = {
        wire.DESCRIPTION: wire.description(x, packed=False),
        wire.CODES: x.codes,
        wire.SCALES: x.scales,
    }
    return state if x.tensor_scale is None else state | {wire.TENSOR_SCALE: x.tensor_scale}


def _restored(target: MXArray, state: Mapping[str, Any]) -> MXArray:
    """What was saved; its shape must be the target's, its format may be another."""
    from mx_jax.checkpoint import wire

    arrays = {
        wire.CODES: target.codes,
        wire.SCALES: target.scales,
        wire.TENSOR_SCALE: target.tensor_scale,
    }
    if all(state.get(name) is array for name, array in arrays.items()):
        return target
    restored = wire.from_wire(state)
    if not isinstance(restored, MXArray) or restored.shape != target.shape:
        raise ValueError(
            f"flax.serialization: needs the state of an MXArray of shape={target.shape}, got "
            f"{type(restored).__name__} of shape={getattr(restored, 'shape', None)}"
        )
    return restored


def register_serialization() -> None:
    """Register MXArrays with `flax.serialization`."""
    serialization.register_serialization_state(MXArray, _state, _restored, override=True)
