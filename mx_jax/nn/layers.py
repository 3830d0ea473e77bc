"""What layers of flax.linen and flax.nnx share: their recipes, operands, random keys and errors."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import flax.linen
import jax
import jax.numpy as jnp
from flax.core import meta, spmd
from flax.typing import LogicalRules
from jax.sharding import PartitionSpec

from mx_jax.ops.arguments import as_recipe
from mx_jax.packed import Quantized, with_dtype
from mx_jax.recipes import Recipe
from mx_jax.sharding.movement import GatherLike
from mx_jax.specs import MatmulRecipe

# Flax's name of the stream that stochastic recipes draw from.
RNG_STREAM = "quantize"

AnyRecipe = TypeVar("AnyRecipe", bound=MatmulRecipe)


def promoted(promote: Callable[[Any], Any], args: Sequence[Any]) -> list[Any]:
    """Operands in the dtype that Flax gives them; MXArrays stay codes, to be read in it."""
    plain = tuple(jnp.zeros((), arg.dtype) if isinstance(arg, Quantized) else arg for arg in args)
    return [
        with_dtype(arg, value.dtype) if isinstance(arg, Quantized) else value
        for arg, value in zip(args, promote(plain), strict=True)
    ]


def layer_recipe(given: object, gather: GatherLike, layer: str) -> Recipe:
    """A layer's recipe by what its fields say; a `gather` of None leaves the recipe's own."""
    recipe = as_recipe(given, layer, Recipe)
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


def linen_recipe(layer: flax.linen.Module, recipe: AnyRecipe, name: str = "kernel") -> AnyRecipe:
    """The recipe of a bound flax.linen layer, which knows how its kernel is sharded."""
    if recipe.gather is None or recipe.gather.rhs is not None:
        return recipe
    return recipe_of(recipe, linen_spec(layer, name))


def linen_spec(layer: flax.linen.Module, name: str) -> PartitionSpec | None:
    """Sharding of a parameter of a bound flax.linen layer: by its box, else by its initializer's.

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


def nnx_spec(variable: object) -> PartitionSpec | None:
    """Sharding of an nnx variable, by its metadata."""
    get = getattr(variable, "get_metadata", None)
    if get is None:
        return None
    metadata = get()
    sharding = metadata.get("out_sharding") or metadata.get("sharding_names")
    return None if not sharding else _on_mesh(sharding, metadata.get("sharding_rules"))


def _on_mesh(
    names: PartitionSpec | Sequence[str | None], rules: LogicalRules | None
) -> PartitionSpec:
    """Names of axes as mesh axes, by the rules of the variable and those in context."""
    spec = spmd.apply_rules(tuple(getattr(names, "spec", names)), rules)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return PartitionSpec(*spec)
    # A logical name without a rule shards nothing.
    axes = ((part, part if isinstance(part, tuple) else (part,)) for part in spec)
    return PartitionSpec(*(part if {*own} <= {*mesh.axis_names} else None for part, own in axes))


def layer_key(
    layer: flax.linen.Module,
    recipe: MatmulRecipe,
    stream: str = RNG_STREAM,
    *,
    name: str | None = None,
) -> jax.Array | None:
    """A key from a bound flax.linen module's stream, if the recipe draws random bits.

    As everywhere in Flax, `"params"` stands in for a stream that is not there: nn.scan and nn.vmap
    pass on only the streams that they list, and every model lists that one. Without either it is
    None, where only the gradients draw: they raise an error when they are taken. Errors call the
    layer by the name, else by its type.
    """
    if not recipe.is_stochastic:
        return None
    if layer.has_rng(stream):
        return layer.make_rng(stream)
    if layer.is_initializing():
        # The values that init computes are thrown away. Drawing from "params" here would change
        # what the next parameter is drawn from.
        return jax.random.key(0)
    if layer.has_rng("params"):
        return layer.make_rng("params")
    if not recipe.fwd.is_stochastic:
        return None
    raise ValueError(
        f"{name or type(layer).__name__}: recipe {recipe.name!r} draws random bits and needs the "
        f"{stream!r} stream; call apply(..., rngs={{{stream!r}: key}}). Below nn.scan or nn.vmap, "
        f"list {stream!r} in split_rngs, or pass the key as 'params', a stream that they list "
        "already"
    )


@contextlib.contextmanager
def named_in_errors(layer: str) -> Iterator[None]:
    """Add a note to the errors of a product: a kernel that its recipe cannot use, a missing key."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(f"in layer {layer}")
        raise
