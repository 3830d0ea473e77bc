"""What layers of flax.linen and flax.nnx share: recipes, operands, random keys, errors; and weights
that stay in their format: in trees, in linen's parameters, in `flax.serialization`.

Codes have no gradient: `jax.grad` of a tree that holds them fails on their integers. So the tree is
split, and the gradient is taken of the part of floating-point arrays.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import flax.linen
import jax
import jax.numpy as jnp
from flax import config, serialization
from flax.core import meta, spmd
from flax.core.scope import LazyRng
from flax.errors import ScopeParamShapeError
from flax.typing import LogicalRules, PathParts
from jax.core import Tracer
from jax.sharding import PartitionSpec

from mx_jax.codecs.rounding import DerivedKey
from mx_jax.jaxpr.read import equations
from mx_jax.mxarray import MXArray
from mx_jax.nn.cache import CacheRows, KVCache
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


def linen_recipe(layer: flax.linen.Module, recipe: AnyRecipe) -> AnyRecipe:
    """The recipe of a bound flax.linen layer, which knows how its kernel, a parameter, lies."""
    if recipe.gather is None or recipe.gather.rhs is not None:
        return recipe
    return recipe_of(recipe, linen_spec(layer, "kernel"))


def linen_spec(layer: flax.linen.Module, name: str) -> PartitionSpec | None:
    """Sharding of a bound flax.linen layer's parameter, by its box, else by its initializer's.

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
) -> DerivedKey | None:
    """A key from a bound flax.linen module's stream, if the recipe draws random bits.

    As everywhere in Flax, `"params"` stands in for a stream that is not there: nn.scan and nn.vmap
    pass on only the streams that they list, and every model lists that one. Without either it is
    None, where only the gradients draw: they raise an error when they are taken.
    """
    if not recipe.is_stochastic:
        return None
    if layer.has_rng(stream):
        return _next_key(layer, stream)
    if layer.is_initializing():
        # The values that init computes are thrown away. Drawing from "params" here would change
        # what the next parameter is drawn from.
        return DerivedKey.of(jax.random.key(0))
    if layer.has_rng("params"):
        return _next_key(layer, "params")
    if not recipe.output.is_stochastic:
        return None
    raise ValueError(
        f"{type(layer).__name__}: recipe {recipe.name!r} draws random bits and needs the "
        f"{stream!r} stream; call apply(..., rngs={{{stream!r}: key}}). Below nn.scan or nn.vmap, "
        f"list {stream!r} in split_rngs, or pass the key as 'params', a stream that they list "
        "already"
    )


def _next_key(layer: flax.linen.Module, stream: str) -> DerivedKey:
    """`layer.make_rng(stream)`, but derived where it is drawn from."""
    scope = layer.scope
    assert scope is not None
    lazy = LazyRng.create(scope.rngs[stream], scope.rng_counters[stream] + 1)
    key = DerivedKey.of(lazy.rng)
    if not isinstance(key.data, Tracer):
        # Equal layers share a program, of which a layer's name would be a part.
        return DerivedKey.of(layer.make_rng(stream))
    scope._check_valid()
    scope.rng_counters[stream] += 1
    return key.fold_in(_folded_in(lazy.suffix, config.flax_fix_rng_separator))


@functools.lru_cache(maxsize=4096)
def _folded_in(suffix: tuple[str | int, ...], separates: bool) -> int:
    """The number that Flax folds into a stream's root for names and counts."""
    del separates  # read by Flax
    root = jax.eval_shape(jax.random.key, 0)
    (equation,) = equations(jax.make_jaxpr(lambda key: LazyRng(key, suffix).as_jax_rng())(root))
    number: Any = equation.invars[1]
    return int(number.val)


@contextlib.contextmanager
def named_in_errors(layer: str) -> Iterator[None]:
    """Add a note to the errors of a product: a kernel that its recipe cannot use, a missing key."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(f"in layer {layer}")
        raise


def quantized_in(value: object) -> Quantized | None:
    """The quantized weights that a parameter is, within Flax's boxes or without; else None."""
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], Quantized) else None


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

    return nnx.OfType(nnx.Param)(path, value) and quantized_in(value) is None


# The module of JAX's own initializers.
_OF_JAX = jax.nn.initializers.lecun_normal().__module__


def _is_stored(x: object) -> bool:
    return isinstance(x, Quantized)


def stored_param(
    layer: flax.linen.Module,
    param: Callable[..., Any],
    name: str,
    init_fn: Callable[..., Any],
    *init_args: object,
    **options: object,
) -> Any:
    """`Module.param`, as Flax has it, whose value may be an MXArray or PackedMXArray.

    Flax compares the arrays that a value consists of with those of its initializer. Quantized
    weights consist of others, so it is their own shape that has to agree.

    Raises:
      flax.errors.ScopeParamShapeError: weights of another shape.
    """
    scope = layer.scope
    value = None
    if scope is not None and scope.has_variable("params", name):
        value = scope.get_variable("params", name)
    weights = quantized_in(value)
    if scope is None or weights is None:
        return param(name, init_fn, *init_args, **options)
    unbox = options.pop("unbox", True)
    if init_args and getattr(init_fn, "__module__", None) == _OF_JAX:
        # Those take it as it is; their random numbers take longer to trace than the layer.
        shape = init_args[0]
    else:
        declared = jax.eval_shape(lambda: init_fn(jax.random.key(0), *init_args, **options))
        (shape,) = (leaf.shape for leaf in jax.tree.leaves(declared))
    if weights.shape != shape:
        raise ScopeParamShapeError(name, scope.path_text, weights.shape, shape)
    return param(name, lambda key: value, unbox=unbox)


class StoredParams:
    """A mixin for linen modules that use quantized weights, packed or not, as they are.

    Put it before `flax.linen.Module` in the bases of a layer of your own whose parameters go to
    `mx_jax.matmul`, `dot_general` or `einsum`. Modules that `convert.linen` has converted, and all
    modules in them, need it not.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp, mx_jax
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> class Up(mx_jax.nn.linen.StoredParams, nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         kernel = self.param("kernel", nn.initializers.ones, (64, 8))
      ...         return mx_jax.matmul(x, kernel, recipe=recipe)
      >>> kernel = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0))
      >>> Up().apply({"params": {"kernel": kernel}}, jnp.ones((2, 64))).shape
      (2, 8)
    """

    @flax.linen.nowrap
    def param(
        self, name: str, init_fn: Callable[..., Any], *init_args: object, **options: object
    ) -> Any:
        """See `flax.linen.Module.param`."""
        layer: Any = self
        return stored_param(layer, super().param, name, init_fn, *init_args, **options)  # pyright: ignore[reportAttributeAccessIssue]


# flax.serialization -------------------------------------------------------------------------------
#
# State dicts hold the arrays of MXArrays and caches, and of MXArrays what they are: a cache needs a
# target. Linen takes every attribute of a module apart and puts it together again this way, also
# while it is traced: so nothing is computed here, and codes are one in a byte.


def _state(x: MXArray) -> dict[str, Any]:
    # Late, as below: whoever imports the layers pays for no reader of checkpoints.
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

    own = {
        wire.CODES: target.codes,
        wire.SCALES: target.scales,
        wire.TENSOR_SCALE: target.tensor_scale,
    }
    if all(state.get(name) is array for name, array in own.items()):
        return target
    found = wire.from_wire(state)
    if not isinstance(found, MXArray) or found.shape != target.shape:
        raise ValueError(
            f"flax.serialization: needs the state of an MXArray of shape={target.shape}, got "
            f"{type(found).__name__} of shape={getattr(found, 'shape', None)}"
        )
    return found


def _arrays(x: object) -> dict[str, Any]:
    """The state dict of a cache, or of its rows: what of it is arrays."""
    children, _ = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
    return {
        key.name: serialization.to_state_dict(child) for key, child in children if child is not None
    }


def _with_arrays(target: KVCache | CacheRows, state: Mapping[str, Any]) -> KVCache | CacheRows:
    """What was saved; the target's own fields say what it is."""
    own = _arrays(target)
    if own.keys() != state.keys():
        raise ValueError(
            f"flax.serialization: needs the state of a {type(target).__name__} with the fields "
            f"{sorted(own)}, got {sorted(state)}; take a target of the same format"
        )
    restored = {
        name: serialization.from_state_dict(getattr(target, name), part, name)
        for name, part in state.items()
    }
    return dataclasses.replace(target, **restored)


def register_serialization() -> None:
    """Register MXArrays and key-value caches with `flax.serialization`."""
    serialization.register_serialization_state(MXArray, _state, _restored, override=True)
    for own in (CacheRows, KVCache):
        serialization.register_serialization_state(own, _arrays, _with_arrays, override=True)
