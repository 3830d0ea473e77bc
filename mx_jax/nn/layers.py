"""What layers of flax.linen and flax.nnx share: their recipes, operands and errors."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from flax.core import meta, spmd
from jax.sharding import PartitionSpec

from mx_jax.ops.arguments import as_recipe
from mx_jax.recipes import Recipe
from mx_jax.sharding.movement import GatherLike
from mx_jax.specs import MatmulRecipe

AnyRecipe = TypeVar("AnyRecipe", bound=MatmulRecipe)


def layer_recipe(given: Any, gather: GatherLike, layer: str) -> Recipe:
    """A layer's recipe by what its fields say; a `gather` of None leaves the recipe's own."""
    recipe = as_recipe(given, layer, Recipe)
    return recipe if gather is None else dataclasses.replace(recipe, gather=gather)


def recipe_of(recipe: AnyRecipe, spec: PartitionSpec | None) -> AnyRecipe:
    """A layer's recipe, which knows where the layer's kernel lies.

    What a `Gather` says itself stays. A kernel without metadata is not sharded, and not gathered,
    except on a mesh with explicit axes, where its type says where it lies.
    """
    gather = recipe.gather
    if gather is None or gather.rhs is not None:
        return recipe
    where = dataclasses.replace(gather, rhs=PartitionSpec() if spec is None else spec)
    return dataclasses.replace(recipe, gather=where)


def linen_recipe(layer: Any, recipe: AnyRecipe, name: str = "kernel") -> AnyRecipe:
    """The recipe of a bound flax.linen layer, which knows where its kernel lies."""
    if recipe.gather is None or recipe.gather.rhs is not None:
        return recipe
    return recipe_of(recipe, linen_spec(layer, name))


def ungathered(layer: Any, recipe: AnyRecipe) -> AnyRecipe:
    """The recipe of a product whose right operand is no kernel, or not as it is stored."""
    del layer
    return recipe_of(recipe, None)


def linen_spec(layer: Any, name: str) -> PartitionSpec | None:
    """Where a parameter of a bound flax.linen layer lies: by its box, else by its initializer's.

    Training states often hold unboxed parameters; what `nn.with_partitioning` made of the
    initializer still knows.
    """
    box: Any = layer.get_variable("params", name) if layer.scope is not None else None
    if not isinstance(box, meta.AxisMetadata):
        init = getattr(layer, f"{name}_init", None)
        # Only what Flax wraps initializers in makes boxes.
        if init is None or not hasattr(init, "__wrapped__"):
            return None
        shape = tuple(getattr(box, "shape", None) or (1, 1))
        box = jax.eval_shape(lambda: init(jax.random.key(0), shape, "float32"))
    spec: Any = getattr(box, "get_partition_spec", None)
    return None if spec is None else _on_mesh(spec(), getattr(box, "rules", None))


def nnx_spec(variable: Any) -> PartitionSpec | None:
    """Where an nnx variable lies, by its sharding metadata."""
    get = getattr(variable, "get_metadata", None)
    if get is None:
        return None
    metadata = get()
    sharding = metadata.get("out_sharding") or metadata.get("sharding_names")
    return None if not sharding else _on_mesh(sharding, metadata.get("sharding_rules"))


def _on_mesh(names: Any, rules: Any) -> PartitionSpec:
    """Names of axes as mesh axes, by the rules of the variable and those in context."""
    spec = spmd.apply_rules(tuple(getattr(names, "spec", names)), rules)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return PartitionSpec(*spec)
    # A logical name without a rule shards nothing.
    return PartitionSpec(*(part if _known(part, mesh.axis_names) else None for part in spec))


def _known(part: Any, names: tuple[str, ...]) -> bool:
    return all(name in names for name in (part if isinstance(part, tuple) else (part,)))


@contextlib.contextmanager
def named_in_errors(layer: str) -> Iterator[None]:
    """Add a note to the errors of a product: a kernel that its recipe cannot use, a missing key.

    Args:
      layer: what the layer is called.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(f"in layer {layer}")
        raise
