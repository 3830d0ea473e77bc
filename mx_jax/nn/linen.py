"""flax.linen layers that hand a recipe to the matmul; parameters, names and shapes are Flax's.

A layer of the same name loads the checkpoint of Flax's own. A kernel may also be an `MXArray`
blocked along its contracting axis, or what `pack_weights` makes of it, and is used as it is.
"""

import dataclasses
import types
from typing import Any, NoReturn, Unpack

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen import module as flax_module
from flax.linen.dtypes import promote_dtype

from mx_jax.codecs.rounding import DerivedKey
from mx_jax.formats.removed import missing_attribute
from mx_jax.nn.layers import RNG_STREAM as RNG_STREAM
from mx_jax.nn.layers import StoredParams as StoredParams
from mx_jax.nn.layers import layer_key, layer_recipe, linen_recipe, named_in_errors, promoted
from mx_jax.ops.arguments import as_recipe
from mx_jax.ops.dot_general import ProductOptions, RecipeDotGeneral, dot_general, einsum
from mx_jax.packed import OperandLike
from mx_jax.recipes import Recipe


def promote_operands(*args: object, dtype: object = None, inexact: bool = True) -> list[Any]:
    """Flax's `promote_dtype`, which leaves MXArrays codes, to be read in the dtype."""
    return promoted(lambda plain: promote_dtype(*plain, dtype=dtype, inexact=inexact), args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayerDotGeneral:
    """The recipe's dot_general with a key from the layer's stream. Equal if the recipes are."""

    recipe: Recipe
    layer: Any = dataclasses.field(compare=False, repr=False)

    def __call__(
        self,
        lhs: OperandLike,
        rhs: OperandLike,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        **options: Unpack[ProductOptions],
    ) -> jax.Array:
        with named_in_errors(_name(self.layer)):
            key = layer_key(self.layer, self.recipe)
            recipe = self.recipe
            if recipe.gather is not None:
                recipe = linen_recipe(self.layer, recipe)
            return dot_general(lhs, rhs, dimension_numbers, **options, recipe=recipe, key=key)


def _name(layer: flax_nn.Module) -> str:
    return f"{'/'.join(layer.path)!r} ({type(layer).__name__})"


class _WithRecipe(StoredParams, flax_nn.Module):
    """What these layers have beside the fields of Flax's."""

    promote_dtype: Any = promote_operands
    recipe: Recipe | str = dataclasses.field(kw_only=True)
    gather: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        # A name gives way to its recipe, so that equal layers have equal fields.
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
        with named_in_errors(_name(self)):
            product = einsum(
                subscripts,
                inputs,
                kernel,
                recipe=linen_recipe(self, self.recipe),
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
                key=layer_key(self, self.recipe),
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

    def __post_init__(self):
        # A name gives way to its recipe, so that equal layers have equal fields.
        self.recipe = as_recipe(self.recipe, type(self).__name__, Recipe)
        super().__post_init__()

    def _recipe_and_key(self) -> tuple[Recipe, DerivedKey | None]:
        assert isinstance(self.recipe, Recipe)
        return self.recipe, layer_key(self, self.recipe, self.stream)


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

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `mx_jax.dot_general`; without arguments, the module itself."""
        if not args and not options:
            return self
        recipe, key = self._recipe_and_key()
        return RecipeDotGeneral(recipe=recipe)(*args, **options, key=key)


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

    def __call__(self, *args: Any, **options: Unpack[ProductOptions]) -> Any:
        """See `mx_jax.einsum`; without arguments, the module itself."""
        if not args and not options:
            return self
        recipe, key = self._recipe_and_key()
        return einsum(*args, **options, recipe=recipe, key=key)


def __getattr__(name: str) -> NoReturn:
    raise missing_attribute(__name__, name)
