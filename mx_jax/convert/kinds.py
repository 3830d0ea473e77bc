"""Kinds of layers: the one table of what they multiply with, and what conversion puts there.

Where a layer's product is an attribute, its row says all: conversion puts another product there, in
linen for the length of a call (`linen_model.py`), in nnx in a copy (`nnx_model.py`). What linen
calls by name is answered in its place. All other products show in a trace (`jaxpr.py`).
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from mx_jax.axes import Axes
from mx_jax.convert import operations
from mx_jax.convert.rules import Shape
from mx_jax.nn.nnx import RecipeEinsum


@dataclasses.dataclass(frozen=True)
class Slot:
    """The attribute that layers multiply with.

    Attributes:
      types: class of the layers, or classes.
      attribute: its name.
      defaults: what is there unless a user put something else, which then stays; the last is what
        such a layer multiplies with.

    Examples:
      >>> import flax.linen as nn, jax
      >>> from mx_jax import convert
      >>> slot = convert.Slot(nn.Dense, "dot_general", (None, jax.lax.dot_general))
      >>> slot.holds(nn.Dense(8)), slot.holds(nn.Embed(8, 4))
      (True, False)
      >>> slot.obstacle(nn.Dense(8, dot_general=print), ours=())
      'has its own dot_general'
    """

    types: type | tuple[type, ...]
    attribute: str
    defaults: tuple[Any, ...]

    def holds(self, layer: Any) -> bool:
        """Whether a layer has the slot; for a linen module, whether it is one of its fields."""
        if not isinstance(layer, self.types):
            return False
        return not isinstance(layer, nn.Module) or self.attribute in layer.__dataclass_fields__

    def obstacle(self, layer: Any, ours: type | tuple[type, ...]) -> str | None:
        """Why the slot of a layer is not to be filled, or None.

        Args:
          layer: a layer with the slot.
          ours: classes of what conversion puts there.
        """
        if getattr(layer, f"{self.attribute}_cls", None) is not None:
            return f"has its own {self.attribute}_cls"
        value = getattr(layer, self.attribute)
        if isinstance(value, ours) or any(value is default for default in self.defaults):
            return None
        return f"has its own {self.attribute}"


def _by_axes(axes: Axes | None, kernel: tuple[int, ...]) -> Shape:
    """The shape that filters see; None if nothing is contracted: nothing to lay blocks along."""
    if axes is None:
        return None
    _, kept, contracting = axes.sizes(kernel)
    return (*contracting, math.prod(kept))


def _in_out(layer: Any, kernel: tuple[int, ...], *call: Any) -> Axes | None:
    return Axes.ordered(k_first=True) if len(kernel) == 2 else None


def _as_stored(layer: Any, kernel: tuple[int, ...], *call: Any) -> Shape:
    return kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """How layers of one kind are converted. What the report says of them follows from it.

    Attributes:
      linen: where flax.linen modules of this kind hold each of their products.
      nnx: where flax.nnx modules do; several products may be made by one thing.
      tree: class of nodes of a pytree, or classes, whose call `convert.tree` traces.
      operation: from the recipe of each product, None for high precision, to what goes there. It is
        called as what was there before, and with `key` if a recipe draws random bits. In a tree it
        takes the place of `jax.lax.dot_general`, with the kernel on the right.
      products: names of the products, if there are several.
      shape: from the layer, the shape of its kernel and, in linen, what its product is called with
        after the operands, to the kernel as filters see it; None if nothing is contracted. Left
        out: `[in, out]`, or as `axes` say. None in its place: there is no kernel.
      axes: the same to the kernel's axes in the product; None where they are not known, so that
        no kernel is stored quantized. Left out: `[in, out]`, if `shape` is so too.
      kernel: the parameter whose leading axes tell a stack of nnx layers, or of nodes.
      kernel_ndim: how many axes it has in a single layer.
      named_only: whether only a rule that names the type converts it.
      obstacle: why this layer cannot be converted, or None.
      reads_stored: whether a quantized kernel is multiplied as it is where no rule decides, or by
        its values.
      rhs_is_kernel: whether the right operand is the kernel as it is stored, so that metadata say
        how it is sharded.

    Examples:
      >>> import flax.linen as nn, jax
      >>> from mx_jax import convert
      >>> slot = convert.Slot(nn.Dense, "dot_general", (None, jax.lax.dot_general))
      >>> kind = convert.Kind(linen=(slot,), operation=lambda recipe: recipe.dot_general)
      >>> facts = kind.facts(nn.Dense(8), (64, 8))
      >>> facts["shape"], facts["axes"].contracting
      ((64, 8), (0,))
    """

    linen: tuple[Slot, ...] = ()
    nnx: Slot | None = None
    tree: type | tuple[type, ...] = ()
    operation: Callable[..., Callable[..., Any]] = lambda recipe: recipe.dot_general
    products: tuple[str | None, ...] = (None,)
    shape: Callable[..., Shape] | None = _as_stored
    axes: Callable[..., Axes | None] | None = None
    kernel: Callable[[Any], Any] = lambda layer: layer.kernel
    kernel_ndim: Callable[[Any], int] = lambda layer: 2
    named_only: bool = False
    obstacle: Callable[[Any], str | None] = lambda layer: None
    reads_stored: bool = False
    rhs_is_kernel: bool = False

    def facts(self, layer: Any, kernel: tuple[int, ...], *call: Any) -> dict[str, Any]:
        """Fields of `Layer` that rules judge by.

        Args:
          layer: the layer.
          kernel: shape of its kernel in a single layer.
          *call: what the product is called with after the operands, where that is known.
        """
        if self.shape is None:
            own = {"named_only": self.named_only, "obstacle": self.obstacle(layer)}
            return own | {"of_activations": True}
        if self.shape is not _as_stored:
            axes = None if self.axes is None else self.axes(layer, kernel, *call)
            shape = self.shape(layer, kernel, *call)
        elif self.axes is not None:
            axes = self.axes(layer, kernel, *call)
            shape = _by_axes(axes, kernel)
        else:
            axes, shape = _in_out(layer, kernel), kernel
        return {
            "kernel": kernel,
            "shape": shape,
            "named_only": self.named_only,
            "obstacle": self.obstacle(layer) if shape else "contracts no axis",
            "axes": axes,
        }


def einsum_axes(subscripts: str, kernel: tuple[int, ...]) -> Axes | None:
    """A kernel's axes in an einsum of inputs and kernel; None if it contracts none of them."""
    inputs, _, out = subscripts.replace(" ", "").partition("->")
    left, _, letters = inputs.partition(",")
    # An ellipsis stands for axes that nothing contracts, in all operands that have it.
    ellipsis = len(kernel) - len(letters.replace("...", ""))
    letters = letters.replace("...", "." * ellipsis)
    left = left.replace("...", "." if "." in letters else "")
    if len(letters) != len(kernel):
        return None
    batch = tuple(i for i, c in enumerate(letters) if c in left and c in out)
    kept = tuple(i for i, c in enumerate(letters) if c not in left and c in out)
    # Blocks lie along the last contracted letter in the input's order.
    contracting = tuple(letters.index(c) for c in left if c in letters and c not in out)
    return Axes(batch, kept, contracting) if contracting else None


def _dense_counts(layer: Any) -> tuple[int, int, int]:
    """How many batch, contracting and kept axes the kernel of an nnx layer has."""
    sizes = (getattr(layer, "batch_axis", ()), layer.in_features, layer.out_features)
    batch, contracting, kept = (1 if isinstance(x, int) else len(x) for x in sizes)
    return batch, contracting, kept


def _dense_axes(
    layer: Any, kernel: tuple[int, ...], dimensions: Any = None, *_: Any
) -> Axes | None:
    if dimensions is None:
        num_batch, num_contracting, _kept = _dense_counts(layer)
        dimensions = ((), range(num_batch, num_batch + num_contracting)), ((), range(num_batch))
    (_, contracting), (_, batch) = dimensions
    kept = (axis for axis in range(len(kernel)) if axis not in (*contracting, *batch))
    return Axes(tuple(batch), tuple(kept), tuple(contracting)) if contracting else None


# In linen, whatever module has the attribute.
DENSE = Kind(
    linen=(Slot(nn.Module, "dot_general", (None, lax.dot_general)),),
    nnx=Slot((nnx.Linear, nnx.LinearGeneral), "dot_general", (None, lax.dot_general)),
    axes=_dense_axes,
    kernel_ndim=lambda layer: sum(_dense_counts(layer)),
    reads_stored=True,
    rhs_is_kernel=True,
)
EINSUM = Kind(
    nnx=Slot(nnx.Einsum, "einsum_op", (jnp.einsum,)),
    operation=lambda recipe: RecipeEinsum(recipe=recipe),
    axes=lambda layer, kernel, subscripts=None: einsum_axes(subscripts or layer.einsum_str, kernel),
    kernel_ndim=lambda layer: len(layer.kernel_shape),
    rhs_is_kernel=True,
)
CONV = Kind(
    linen=(Slot(nn.Conv, "conv_general_dilated", (None, lax.conv_general_dilated)),),
    nnx=Slot(nnx.Conv, "conv_general_dilated", (lax.conv_general_dilated,)),
    operation=lambda recipe: operations.ConvOfDotGeneral(dot_general=recipe.dot_general),
    shape=lambda layer, kernel, *call: (math.prod(kernel[:-2]), *kernel[-2:]),
    axes=lambda layer, kernel, *call: Axes.ordered(contracting=len(kernel) - 1, k_first=True),
    kernel_ndim=lambda layer: len(layer.kernel_shape),
    named_only=True,
    obstacle=lambda layer: operations.conv_obstacle(
        layer.feature_group_count, layer.input_dilation
    ),
)
EMBED = Kind(
    nnx=Slot(nnx.Embed, "promote_dtype", (promote_dtype,)),
    operation=lambda recipe: operations.TablePromotion(recipe=recipe, promote=promote_dtype),
    axes=lambda layer, kernel: Axes.ordered(),
    kernel=lambda layer: layer.embedding,
    named_only=True,
)
ATTENTION = Kind(
    linen=tuple(
        Slot(nn.Module, f"{name}_cls", (None,))
        for name in ("qk_attn_weights_einsum", "attn_weights_value_einsum")
    ),
    nnx=Slot(nnx.MultiHeadAttention, "attention_fn", (nnx.dot_product_attention,)),
    operation=lambda qk, av: operations.Attention(qk=qk, av=av),
    products=("qk", "av"),
    shape=None,
    kernel=lambda layer: layer.query.kernel,
    kernel_ndim=lambda layer: 3,
)

_KINDS: list[Kind] = [DENSE, EINSUM, CONV, EMBED, ATTENTION]


def register(kind: Kind) -> None:
    """Tell conversion how layers of a kind multiply, Flax's or anybody's.

    What is registered last is asked first. Without it, the products of a layer of somebody's own
    are found by tracing the model's call, and cannot read stored weights.

    Args:
      kind: where the layers hold their product, and what takes its place.

    Examples:
      >>> import functools, flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax import convert
      >>> class Project(nn.Module):
      ...     multiply: object = jnp.matmul
      ...
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         w = self.param("w", nn.initializers.ones, (x.shape[-1], 8))
      ...         return self.multiply(x, w)
      >>> convert.register(
      ...     convert.Kind(
      ...         linen=(convert.Slot(Project, "multiply", (jnp.matmul,)),),
      ...         operation=lambda recipe: functools.partial(mx_jax.matmul, recipe=recipe),
      ...     )
      ... )
      >>> print(convert.report(Project(), convert.Rule(".*", "mxfp8"), jnp.ones((4, 64))))
      layer  type     kernel  rule  recipe
      .      Project  64x8    0     mxfp8
      1 of 1 layers converted
    """
    _KINDS.insert(0, kind)


def _of_equinox() -> tuple[Kind, ...]:
    """Equinox's layers, where somebody has imported it. They store kernels `[out, in]`."""
    return _rows_of_equinox(sys.modules["equinox"].nn) if "equinox" in sys.modules else ()


@functools.cache
def _rows_of_equinox(layers: Any) -> tuple[Kind, ...]:
    row = functools.partial(Kind, shape=lambda layer, kernel: kernel[::-1])
    return (
        row(tree=layers.Linear, kernel=lambda layer: layer.weight),
        row(tree=(layers.LSTMCell, layers.GRUCell), kernel=lambda layer: layer.weight_hh),
    )


def kind_of(layer: Any) -> Kind | None:
    """The kind of a layer that holds its products in attributes, or is a known node of a tree."""
    for kind in (*_KINDS, *_of_equinox()):
        if kind.tree and isinstance(layer, kind.tree):
            return kind
        slots = kind.linen if isinstance(layer, nn.Module) else (kind.nnx,)
        if slots and all(slot is not None and slot.holds(layer) for slot in slots):
            return kind
    return None
