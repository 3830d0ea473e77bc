"""What is known of Flax's layers before they are called; a trace shows what they multiply."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mx_jax.axes import Axes
from mx_jax.convert.products import conv_obstacle, shape_in_product
from mx_jax.recipes import Recipe

# What layers multiply with, unless a user put something else there, which then stays.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "dot_general": (None, lax.dot_general),
    "conv_general_dilated": (None, lax.conv_general_dilated),
    "einsum_op": (jnp.einsum,),
}


def users_choice(layer: object) -> str | None:
    """Why a layer keeps its products, as its user chose; None if nothing was chosen."""
    # First: a property of our own layers draws a key when it is read.
    if isinstance(getattr(layer, "recipe", None), Recipe):
        return "has its own recipe"
    fields = layer.__dataclass_fields__ if isinstance(layer, nn.Module) else vars(layer)
    attribute = next((name for name in _DEFAULTS if name in fields), None)
    if attribute is None:
        return None
    if getattr(layer, f"{attribute}_cls", None) is not None:
        return f"has its own {attribute}_cls"
    value = getattr(layer, attribute)
    is_default = any(value is default for default in _DEFAULTS[attribute])
    return None if is_default else f"has its own {attribute}"


@dataclasses.dataclass(frozen=True)
class KnownLayer:
    """A layer of flax.nnx whose kernel is known.

    Attributes:
      kernel: its variable.
      stack: the leading axes of a stack of such layers, of nnx.vmap.
      facts: fields of `Layer`.
    """

    kernel: Any
    stack: tuple[int, ...]
    facts: dict[str, Any]


def known_layer(layer: object) -> KnownLayer | None:
    """What is known of a layer of flax.nnx; None if its call alone shows its products."""
    kernel: Any = getattr(layer, "kernel", None)
    named_only, obstacle = False, None
    if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
        sizes = (getattr(layer, "batch_axis", ()), layer.in_features, layer.out_features)
        batch, contracting, kept = (1 if isinstance(x, int) else len(x) for x in sizes)
        ndim = batch + contracting + kept
        axes = Axes.ordered(batch=batch, kept=kept, contracting=contracting, k_first=True)
        axes = axes if contracting else None
    elif isinstance(layer, nnx.Einsum):
        ndim = len(layer.kernel_shape)
        axes = einsum_axes(layer.einsum_str, tuple(layer.kernel_shape))
    elif isinstance(layer, nnx.Conv):
        ndim, named_only = len(layer.kernel_shape), True
        axes = Axes.ordered(contracting=ndim - 1, k_first=True)
        obstacle = conv_obstacle(layer.feature_group_count, layer.input_dilation)
    elif isinstance(layer, nnx.Embed):
        ndim, named_only, kernel = 2, True, layer.embedding
        axes = Axes.ordered()
    else:
        return None
    stored = tuple(kernel.shape)
    split = len(stored) - ndim
    single = stored[split:]
    shape = shape_in_product(axes, single)
    if shape is not None and isinstance(layer, nnx.Conv):
        shape = (math.prod(single[:-2]), *single[-2:])
    facts = {
        "kernel": stored,
        "shape": shape,
        "named_only": named_only,
        "obstacle": (obstacle if shape else "contracts no axis") or users_choice(layer),
        "axes": axes,
    }
    return KnownLayer(kernel, stored[:split], facts)


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
    # Blocks run along the last contracted letter in the input's order.
    contracting = tuple(letters.index(c) for c in left if c in letters and c not in out)
    return Axes(batch, kept, contracting) if contracting else None
