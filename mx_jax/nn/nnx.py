"""flax.nnx layers that hand a recipe to the matmul; parameters, names and shapes are Flax's.

A layer loads the state of Flax's own. A kernel may also be an `MXArray` blocked along its
contracting axis, or what `pack_weights` makes of it, and is used as it is.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from mx_jax.jaxpr.read import LayerName
from mx_jax.nn import linen
from mx_jax.nn.layers import RNG_STREAM as RNG_STREAM
from mx_jax.nn.layers import layer_recipe, named_in_errors, nnx_spec, recipe_of
from mx_jax.nn.layers import trainable as trainable
from mx_jax.ops.arguments import as_recipe
from mx_jax.ops.dot_general import RecipeDotGeneral, dot_general, einsum
from mx_jax.packed import OperandLike
from mx_jax.recipes import Recipe


def promote_operands(args: Sequence[Any], /, *, dtype: object = None, inexact: bool = True) -> Any:
    """Flax's `promote_dtype`, which leaves MXArrays codes, to be read in the dtype."""
    return tuple(linen.promote_operands(*args, dtype=dtype, inexact=inexact))


def missing_stream(layer: str, recipe: Recipe, rngs: nnx.Rngs | None) -> ValueError:
    """The error of a stochastic recipe whose layer has no stream."""
    streams = (
        "no rngs" if rngs is None else f"rngs with {', '.join(map(repr, rngs)) or 'no stream'}"
    )
    return ValueError(
        f"{layer}: recipe {recipe.name!r} draws random bits and needs the {RNG_STREAM!r} stream, "
        f"got {streams}; pass rngs=nnx.Rngs(..., {RNG_STREAM}=seed)"
    )


def next_key(stream: nnx.RngStream, layer: str) -> jax.Array:
    """A layer's next key; ValueError in a stack whose streams were not mapped with it."""
    if stacked := stream.key.shape:
        raise ValueError(
            f"{layer}: a layer of a stack got the streams {RNG_STREAM!r} of all its layers, of "
            f"shape={stacked}; where the stack is run, map them with the parameters, e.g. "
            "StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})"
        )
    return stream()


# Parts what is drawn for rounding from what the same stream gives its other users.
_ROUNDING = 0x6D78


def stream_of_layer(rngs: nnx.Rngs, layer: str, recipe: Recipe) -> nnx.RngStream | None:
    """A stream for one layer, unlike that of any other, made after the layer's parameters.

    What the model's other layers are initialized with must not depend on the recipe: only the
    stream `"quantize"`, which nothing else reads, is drawn from. The parameters' stream is looked
    at, not drawn from: each layer has moved it on, and each layer of a stack has its own, so that
    it distinguishes layers where the other stream is shared or stands still. Without a stream: None
    if only gradients would need it, else a ValueError.
    """
    if RNG_STREAM in rngs:
        key = rngs[RNG_STREAM]()
    elif "default" in rngs:
        key = _next_key(rngs["default"])
    elif not recipe.output.is_stochastic:
        return None
    else:
        raise missing_stream(layer, recipe, rngs)
    salt = jax.random.bits(_next_key(rngs["params"]), (), jnp.uint32)
    return nnx.RngStream(jax.random.fold_in(key, salt), tag=RNG_STREAM)


def _next_key(stream: nnx.RngStream) -> jax.Array:
    """A key from where a stream stands, which leaves it standing there."""
    key = jax.random.fold_in(stream.key[...], stream.count[...])
    return jax.random.fold_in(key, _ROUNDING)


M = TypeVar("M", bound=nnx.Module)


def name_layers(model: M) -> M:
    """Give the layers of this module in a model their paths, for captures, profiles and HLO.

    A module of nnx does not know where it is. Names are static and change no program, and equal
    layers still share what jit compiled. `convert.nnx` names the layers that it converts.

    Args:
      model: changed in place.

    Returns:
      The model.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.nn.nnx.Linear(64, 8, recipe="mxfp8", rngs=nnx.Rngs(0))
      >>> model = mx_jax.nn.nnx.name_layers(nnx.Sequential(layer, nnx.relu))
      >>> step = mx_jax.inspect.capture(lambda model, x: model(x), stats="amax")
      >>> _ = step(model, jnp.ones((2, 64)))
      >>> {tag.path for tag in step.records}
      {'layers/0'}
    """
    for path, layer in list(nnx.iter_modules(model)):
        if isinstance(layer, _Keyed):
            layer.layer_name = nnx.static(LayerName("/".join(map(str, path)) or "model"))
    return model


class _Keyed:
    """Hands what a layer multiplies with a fresh key at every use, if its recipe draws random bits.

    Attributes:
      multiplier: the argument of Flax's layer that multiplies.
    """

    multiplier: str
    recipe: Recipe
    kernel: Any
    # Of the class, so that models that were not named have what they had.
    layer_name: LayerName | None = None

    def __init__(
        self,
        *sizes: Any,
        recipe: Recipe | str,
        gather: object = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Make the layer.

        Args:
          *sizes: those of Flax's layer of the same name, by position or by name.
          recipe: what to quantize in the product and in its two gradients, or a recipe's name.
          gather: as the recipe's own, in place of it: see `mx_jax.sharding.Gather`.
          rngs: streams; a stochastic recipe draws from `"quantize"`.
          **options: those of Flax's layer of the same name.
        """
        flax_layer: Any = super()
        recipe = layer_recipe(recipe, gather, type(self).__name__)
        ours = RecipeEinsum(recipe=recipe) if self.multiplier == "einsum_op" else recipe.dot_general
        options = {self.multiplier: ours, "promote_dtype": promote_operands} | options
        flax_layer.__init__(*sizes, rngs=rngs, **options)
        self.recipe, stream = recipe, None
        if recipe.is_stochastic:
            stream = stream_of_layer(rngs, type(self).__name__, recipe)
        self.rngs = nnx.data(stream)

    def __call__(self, *args: object, **options: object) -> jax.Array:
        """See Flax's layer of the same name."""
        flax_layer: Any = super()
        name = self.layer_name
        below = contextlib.nullcontext() if name is None else name.context()
        with named_in_errors(type(self).__name__), below:
            return flax_layer.__call__(*args, **options)


def _keyed(name: str) -> Any:
    """The property that has an operation, and hands out the operation with a key."""

    def get(layer: Any) -> Any:
        operation = getattr(layer, f"_{name}")
        ours = isinstance(operation, RecipeDotGeneral | RecipeEinsum)
        if ours and operation.recipe.gather is not None and hasattr(layer, "kernel"):
            recipe = recipe_of(operation.recipe, nnx_spec(layer.kernel))
            operation = dataclasses.replace(operation, recipe=recipe)
        if not ours or not operation.recipe.is_stochastic or layer.rngs is None:
            return operation
        return functools.partial(operation, key=layer.rngs())

    def put(layer: Any, operation: object) -> None:
        setattr(layer, f"_{name}", operation)

    return property(get, put, doc="What the layer multiplies with.")


class _KeyedDotGeneral(_Keyed):
    """A layer that calls `self.dot_general`."""

    multiplier, dot_general = "dot_general", _keyed("dot_general")


class Linear(_KeyedDotGeneral, nnx.Linear):
    """`flax.nnx.Linear` with a recipe.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from flax import nnx
      >>> layer = mx_jax.nn.nnx.Linear(64, 8, recipe=mx_jax.recipes.mxfp8(), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 64))).shape, layer.kernel.shape
      ((2, 8), (64, 8))
    """


class LinearGeneral(_KeyedDotGeneral, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` with a recipe; blocks run along the last of its `axis`.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from flax import nnx
      >>> heads = mx_jax.nn.nnx.LinearGeneral(64, (4, 8), recipe="mxfp8", rngs=nnx.Rngs(0))
      >>> nnx.eval_shape(heads, jnp.ones((2, 64))).shape
      (2, 4, 8)
    """


class Einsum(_Keyed, nnx.Einsum):
    """`flax.nnx.Einsum` with a recipe.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from flax import nnx
      >>> shape, rngs = (4, 64, 8), nnx.Rngs(0)
      >>> layer = mx_jax.nn.nnx.Einsum("bgd,gdf->bgf", shape, recipe="mxfp8", rngs=rngs)
      >>> nnx.eval_shape(layer, jnp.ones((2, 4, 64))).shape
      (2, 4, 8)
    """

    multiplier, einsum_op = "einsum_op", _keyed("einsum_op")


class Operation(nnx.Module):
    """A product for Flax's own layers, which hand no key to what they multiply with.

    So it is a module, which keeps a stream and so is part of the model's state, as dropout is.

    Attributes:
      recipe: what to quantize in the product and in its two gradients.
      stream: where keys come from; None for a recipe that draws nothing.
    """

    def __init__(self, recipe: Recipe | str, *, rngs: nnx.Rngs | None = None):
        """Make it.

        Args:
          recipe: what to quantize in the product and in its two gradients, or a recipe's name.
          rngs: with a stream `"quantize"`, which is drawn from once; only a recipe that draws
            random bits needs it.

        Raises:
          ValueError: the recipe draws random bits, and there is no such stream.
        """
        name, stream = type(self).__name__, None
        self.recipe: Any = nnx.static(as_recipe(recipe, name, Recipe))
        if self.recipe.is_stochastic:
            # Nothing else draws from it: a default stream would give two operations one key.
            if rngs is None or RNG_STREAM not in rngs:
                raise missing_stream(name, self.recipe, rngs)
            stream = nnx.RngStream(rngs[RNG_STREAM](), tag=RNG_STREAM)
        self.stream = nnx.data(stream)

    _multiplies: ClassVar[Callable[..., jax.Array]]

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """See `mx_jax`'s function of that name."""
        key = None if self.stream is None else next_key(self.stream, type(self).__name__)
        return self._multiplies(*args, **options, recipe=self.recipe, key=key)


class DotGeneral(Operation):
    """A `dot_general` for Flax's own nnx layers, for stochastic recipes too.

    `recipe.dot_general` has no stream; this keeps one, and every use of it takes the next key.
    Where layers share one, as the projections of an attention do, no two products have the same.

    Attributes:
      recipe: what to quantize in the product and in its two gradients.
      stream: where keys come from; None for a recipe that draws nothing.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0, quantize=1)
      >>> product = mx_jax.nn.nnx.DotGeneral("mxfp4_stochastic", rngs=rngs)
      >>> layer = nnx.Linear(64, 8, dot_general=product, rngs=rngs)
      >>> layer(jnp.ones((2, 64))).shape, int(product.stream.count[...])
      ((2, 8), 1)
    """

    _multiplies = staticmethod(dot_general)


class EinsumOp(Operation):
    """An `einsum_op` for Flax's own `nnx.Einsum`, for stochastic recipes too.

    Attributes:
      recipe: what to quantize in the product and in its two gradients.
      stream: where keys come from; None for a recipe that draws nothing.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from flax import nnx
      >>> product = mx_jax.nn.nnx.EinsumOp("mxfp8")
      >>> layer = nnx.Einsum("td,dhk->thk", (64, 2, 4), einsum_op=product, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 64))).shape
      (5, 2, 4)
    """

    _multiplies = staticmethod(einsum)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeEinsum:
    """A drop-in for `jnp.einsum` of two operands; equal recipes make equal instances."""

    recipe: Recipe

    def __post_init__(self):
        object.__setattr__(self, "recipe", as_recipe(self.recipe, "RecipeEinsum", Recipe))

    def __call__(
        self, subscripts: str, lhs: OperandLike, rhs: OperandLike, **options: Any
    ) -> jax.Array:
        """See `mx_jax.einsum`."""
        return einsum(subscripts, lhs, rhs, recipe=self.recipe, **options)
