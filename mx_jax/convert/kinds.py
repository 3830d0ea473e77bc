"""Kinds of layers: the one table of what they multiply with, which both frameworks' walks read.

Where a layer's product is an attribute, its row says all: the walks put another product there, in
linen for the length of a call (`linen_layers.py`), in nnx in a copy (`nnx_layers.py`). What linen
calls by name is answered in `linen_answers.py`; somebody's own layer is traced (`foreign.py`).
"""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from flax.linen.recurrent import DenseParams
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from mx_jax.axes import Axes
from mx_jax.convert import conv
from mx_jax.convert.foreign import ForeignProduct
from mx_jax.convert.kind import Kind, Slot
from mx_jax.convert.nnx_products import Attention, TablePromotion
from mx_jax.convert.products import einsum_axes, einsum_shape
from mx_jax.convert.rules import Shape
from mx_jax.nn.nnx import RecipeEinsum


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


def _dense_shape(layer: Any, kernel: tuple[int, ...], *call: Any) -> Shape:
    axes = _dense_axes(layer, kernel, *call)
    if axes is None:
        return None
    _, kept, contracting = axes.sizes(kernel)
    return (*contracting, math.prod(kept))


# In linen, whatever module has the attribute.
DENSE = Kind(
    linen=(Slot(nn.Module, "dot_general", (None, lax.dot_general)),),
    nnx=Slot((nnx.Linear, nnx.LinearGeneral), "dot_general", (None, lax.dot_general)),
    operation=lambda recipe: recipe.dot_general,
    shape=_dense_shape,
    axes=_dense_axes,
    kernel_ndim=lambda layer: sum(_dense_counts(layer)),
    reads_stored=True,
    rhs_is_kernel=True,
)
EINSUM = Kind(
    nnx=Slot(nnx.Einsum, "einsum_op", (jnp.einsum,)),
    operation=lambda recipe: RecipeEinsum(recipe=recipe),
    shape=lambda layer, kernel, subscripts=None: einsum_shape(
        subscripts or layer.einsum_str, kernel
    ),
    axes=lambda layer, kernel, subscripts=None: einsum_axes(subscripts or layer.einsum_str, kernel),
    kernel_ndim=lambda layer: len(layer.kernel_shape),
    rhs_is_kernel=True,
)
CONV = Kind(
    linen=(Slot(nn.Conv, "conv_general_dilated", (None, lax.conv_general_dilated)),),
    nnx=Slot(nnx.Conv, "conv_general_dilated", (lax.conv_general_dilated,)),
    operation=lambda recipe: conv.ConvOfDotGeneral(dot_general=recipe.dot_general),
    shape=lambda layer, kernel, *call: (math.prod(kernel[:-2]), *kernel[-2:]),
    axes=lambda layer, kernel, *call: Axes.ordered(contracting=len(kernel) - 1, k_first=True),
    kernel_ndim=lambda layer: len(layer.kernel_shape),
    named_only=True,
    obstacle=lambda layer: conv.obstacle(layer.feature_group_count, layer.input_dilation),
)
EMBED = Kind(
    nnx=Slot(nnx.Embed, "promote_dtype", (promote_dtype,)),
    operation=lambda recipe: TablePromotion(recipe=recipe, promote=promote_dtype),
    shape=lambda layer, kernel: kernel[::-1],
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
    operation=lambda qk, av: Attention(qk=qk, av=av),
    products=("qk", "av"),
    shape=None,
    kernel=lambda layer: layer.query.kernel,
    kernel_ndim=lambda layer: 3,
)
# Somebody's own layer, whose call is traced: `foreign_facts` says what rules judge by.
FOREIGN = Kind(operation=lambda recipe: ForeignProduct(recipe))

_KINDS: list[Kind] = [DENSE, EINSUM, CONV, EMBED, ATTENTION]

# Their parameters multiply elementwise.
_WITHOUT_PRODUCT = (nnx.BatchNorm, nnx.GroupNorm, nnx.LayerNorm, nnx.RMSNorm)
_WITHOUT_PATCHES = (nn.ConvTranspose, nn.ConvLocal, nnx.ConvTranspose)


def register(kind: Kind) -> None:
    """Tell conversion how layers of a kind multiply, Flax's or anybody's.

    What is registered last is asked first. Without it, a layer of somebody's own is converted only
    by a rule that names its type, and by tracing its call.

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


def foreign_facts(
    layer: Any, kernels: Sequence[tuple[int, ...]], inner: Sequence[str]
) -> dict[str, Any] | None:
    """Fields of `Layer` of somebody's own layer; None if it has nothing to multiply with.

    Args:
      layer: the layer.
      kernels: shapes of its own parameters of two axes and more.
      inner: names of its layers.
    """
    if not kernels or isinstance(layer, _WITHOUT_PRODUCT):
        return None
    obstacle = f"has layers of its own: {', '.join(inner)}" if inner else None
    if isinstance(layer, _WITHOUT_PATCHES):
        obstacle = "no product of patches and kernel"
    elif isinstance(layer, DenseParams):
        obstacle = (
            "OptimizedLSTMCell joins its parameters in a product of its own: LSTMCell has the same "
            "parameters and is converted, convert.function reaches either"
        )
    # Which axes it contracts is not known.
    return {"kernel": kernels[0], "named_only": True, "obstacle": obstacle}
