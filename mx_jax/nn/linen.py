"""flax.linen layers that hand a recipe to the matmul; parameters, names and shapes are Flax's.

A layer of the same name loads the checkpoint of Flax's own. A kernel may also be an `MXArray`
blocked along its contracting axis, or what `pack_weights` makes of it, and is used as it is.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Unpack

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax import config
from flax.core import meta
from flax.core.scope import LazyRng
from flax.errors import ScopeParamShapeError
from flax.linen import module as flax_module
from flax.linen.dtypes import promote_dtype
from jax.core import Tracer
from jax.sharding import PartitionSpec

from mx_jax.codecs.rounding import DerivedKey
from mx_jax.formats.removed import missing_attribute
from mx_jax.nn.layers import RNG_STREAM as RNG_STREAM
from mx_jax.nn.layers import layer_recipe, on_mesh, recipe_of
from mx_jax.ops.arguments import as_recipe
from mx_jax.ops.dot_general import ProductOptions, dot_general, einsum
from mx_jax.packed import Quantized, with_dtype
from mx_jax.recipes import Recipe
from mx_jax.specs import MatmulRecipe


def promote_operands(
    *args: jax.Array | Quantized | None, dtype: object = None, inexact: bool = True
) -> list[Any]:
    """Flax's `promote_dtype`, which leaves MXArrays codes, to be read in the dtype."""
    plain = (jnp.zeros((), x.dtype) if isinstance(x, Quantized) else x for x in args)
    return [
        with_dtype(x, value.dtype) if isinstance(x, Quantized) else value
        for x, value in zip(args, promote_dtype(*plain, dtype=dtype, inexact=inexact), strict=True)
    ]


def multiplied(
    layer: flax_nn.Module,
    recipe: Recipe,
    operation: Callable[..., jax.Array],
    *args: object,
    **options: object,
) -> jax.Array:
    """A product of a bound layer, by its recipe and with a key from its stream; its errors name the
    layer."""
    try:
        if recipe.gather is not None and recipe.gather.rhs is None:
            recipe = recipe_of(recipe, linen_spec(layer, "kernel"))
        return operation(*args, **options, recipe=recipe, key=layer_key(layer, recipe))
    except (TypeError, ValueError) as error:
        error.add_note(f"in layer {'/'.join(layer.path)!r} ({type(layer).__name__})")
        raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayerDotGeneral:
    """The recipe's dot_general with a key from the layer's stream. Equal if the recipes are."""

    recipe: Recipe
    layer: Any = dataclasses.field(compare=False, repr=False)

    def __call__(self, *args: object, **options: Unpack[ProductOptions]) -> jax.Array:
        """See `mx_jax.dot_general`."""
        return multiplied(self.layer, self.recipe, dot_general, *args, **options)


def linen_spec(layer: flax_nn.Module, name: str) -> PartitionSpec | None:
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
    return None if spec is None else on_mesh(spec(), getattr(box, "rules", None))


def layer_key(
    layer: flax_nn.Module,
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


def _next_key(layer: flax_nn.Module, stream: str) -> DerivedKey:
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
    from mx_jax.jaxpr.read import equations  # late: few recipes draw

    del separates  # read by Flax
    root = jax.eval_shape(jax.random.key, 0)
    (equation,) = equations(jax.make_jaxpr(lambda key: LazyRng(key, suffix).as_jax_rng())(root))
    number: Any = equation.invars[1]
    return int(number.val)


# Quantized weights as parameters -----------------------------------------------------------------


# The module of JAX's own initializers.
_OF_JAX = jax.nn.initializers.lecun_normal().__module__


def stored_param(
    layer: flax_nn.Module,
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
    # Within Flax's boxes or without.
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    if scope is None or len(leaves) != 1 or not isinstance(leaves[0], Quantized):
        return param(name, init_fn, *init_args, **options)
    unbox = options.pop("unbox", True)
    if init_args and getattr(init_fn, "__module__", None) == _OF_JAX:
        # Those take it as it is; their random numbers take longer to trace than the layer.
        shape = init_args[0]
    else:
        declared = jax.eval_shape(lambda: init_fn(jax.random.key(0), *init_args, **options))
        (shape,) = (leaf.shape for leaf in jax.tree.leaves(declared))
    if leaves[0].shape != shape:
        raise ScopeParamShapeError(name, scope.path_text, leaves[0].shape, shape)
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

    @flax_nn.nowrap
    def param(
        self, name: str, init_fn: Callable[..., Any], *init_args: object, **options: object
    ) -> Any:
        """See `flax.linen.Module.param`."""
        layer: Any = self
        return stored_param(layer, super().param, name, init_fn, *init_args, **options)  # pyright: ignore[reportAttributeAccessIssue]


# Layers -------------------------------------------------------------------------------------------


class _WithRecipe(StoredParams, flax_nn.Module):
    """What these layers have beside the fields of Flax's."""

    promote_dtype: Any = promote_operands
    recipe: Recipe | str = dataclasses.field(kw_only=True)
    gather: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        # A name gives way to its recipe, so that equal layers have equal fields.
        if self.gather is not None or not isinstance(self.recipe, Recipe):
            self.recipe = layer_recipe(self.recipe, self.gather, type(self).__name__)
        chosen = getattr(self, "dot_general", self), getattr(self, "dot_general_cls", None)
        # Not past a user's own. Flax clones a layer, attributes and all, when it binds it: a
        # clone's callable must draw from the clone.
        if chosen[1] is None and isinstance(chosen[0], _LayerDotGeneral | types.NoneType):
            self.dot_general = _LayerDotGeneral(recipe=self.recipe, layer=self)
        super().__post_init__()


class Dense(_WithRecipe, flax_nn.Dense):
    """`flax.linen.Dense` with a recipe.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      gather: as the recipe's own, in place of it: see `mx_jax.sharding.Gather`.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.nn.linen.Dense(8, recipe=mx_jax.recipes.mxfp8())
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 64)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (8,), 'kernel': (64, 8)}}
    """


class DenseGeneral(_WithRecipe, flax_nn.DenseGeneral):
    """`flax.linen.DenseGeneral` with a recipe; blocks run along the last of its `axis`.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      gather: as the recipe's own, in place of it: see `mx_jax.sharding.Gather`.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> heads = mx_jax.nn.linen.DenseGeneral((4, 8), recipe="mxfp8")
      >>> variables = jax.eval_shape(heads.init, jax.random.key(0), jnp.ones((2, 64)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (4, 8), 'kernel': (64, 4, 8)}}
    """


class Einsum(_WithRecipe, flax_nn.Einsum):
    """`flax.linen.Einsum` with a recipe.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      gather: as the recipe's own, in place of it: see `mx_jax.sharding.Gather`.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.nn.linen.Einsum((4, 64, 8), "bgd,gdf->bgf", recipe="mxfp8")
      >>> y, _ = jax.eval_shape(layer.init_with_output, jax.random.key(0), jnp.ones((2, 4, 64)))
      >>> y.shape
      (2, 4, 8)
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Apply the einsum to inputs and kernel.

        Flax's own method calls jnp.einsum by name, so it cannot be injected and is restated here.

        Args:
          inputs: left operand.
          einsum_str: subscripts, unless given to the constructor.

        Returns:
          The product, plus the bias.
        """
        subscripts = flax_module.merge_param("einsum_str", self.einsum_str, einsum_str)
        subscripts = subscripts.replace(" ", "")
        assert isinstance(self.recipe, Recipe)
        if "->" not in subscripts:
            raise ValueError(f"Einsum: needs explicit subscripts with '->', got {subscripts!r}")
        if subscripts.count(",") != 1:
            raise ValueError(f"Einsum: needs exactly two operands, got {subscripts!r}")
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = broadcast_shape = None
        if self.use_bias:
            shape, broadcast_shape = self._get_bias_shape(subscripts, inputs, kernel)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        product = multiplied(
            self,
            self.recipe,
            einsum,
            subscripts,
            inputs,
            kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )
        return product if bias is None else product + jnp.reshape(bias, broadcast_shape)


class Operation(flax_nn.Module):
    """A product for Flax's own layers that owns its random stream.

    Flax calls what its `*_cls` arguments hold to make the product, and then calls that. Here both
    are one module: called without arguments it gives itself.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      stream: name of the stream that keys come from; a stack that hands its modules no stream of
        that name may have another, such as `"params"`.
    """

    recipe: Recipe | str
    stream: str = RNG_STREAM

    _multiplies: ClassVar[Callable[..., jax.Array]]

    def __post_init__(self):
        # A name gives way to its recipe, so that equal layers have equal fields.
        self.recipe = as_recipe(self.recipe, type(self).__name__, Recipe)
        super().__post_init__()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `mx_jax`'s function of that name; without arguments, the module itself."""
        if not args and not options:
            return self
        assert isinstance(self.recipe, Recipe)
        key = layer_key(self, self.recipe, self.stream)
        return self._multiplies(*args, **options, recipe=self.recipe, key=key)


class DotGeneral(Operation):
    """A `dot_general_cls` for Flax's own linen layers, for stochastic recipes too.

    `recipe.dot_general` has no stream; this has one of its own, `"quantize"`, at its place in the
    model. Give it as it is: equal recipes make equal modules, so that a rebuilt model is not
    retraced. It has no parameters; a checkpoint is the one of the layer without it.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      stream: name of the stream that keys come from.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> recipe = mx_jax.recipes.mxfp4_stochastic()
      >>> layer = nn.Dense(8, dot_general_cls=mx_jax.nn.linen.DotGeneral(recipe))
      >>> x = jnp.ones((2, 64))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x, rngs={"quantize": jax.random.key(1)}).shape
      (2, 8)
    """

    _multiplies = staticmethod(dot_general)


class EinsumOp(Operation):
    """An einsum for Flax's own linen layers, for stochastic recipes too.

    Flax's attention takes it as `qk_attn_weights_einsum_cls` and `attn_weights_value_einsum_cls`.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      stream: name of the stream that keys come from.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> einsum = mx_jax.nn.linen.EinsumOp(mx_jax.recipes.mxfp8())
      >>> attention = nn.MultiHeadDotProductAttention(
      ...     num_heads=2, qk_attn_weights_einsum_cls=einsum, attn_weights_value_einsum_cls=einsum
      ... )
      >>> attention.init_with_output(jax.random.key(0), jnp.ones((1, 5, 64)))[0].shape
      (1, 5, 64)
    """

    _multiplies = staticmethod(einsum)


def __getattr__(name: str) -> NoReturn:
    raise missing_attribute(__name__, name)
