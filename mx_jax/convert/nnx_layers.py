"""flax.nnx: which attribute of a layer is its product, and what a rule needs to know of it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from mx_jax.convert import conv
from mx_jax.convert.nnx_foreign import Foreign, is_foreign
from mx_jax.convert.nnx_products import (
    Attention,
    Injected,
    KeyedInjected,
    OperandPromotion,
    TablePromotion,
)
from mx_jax.convert.products import einsum_shape
from mx_jax.nn.nnx import RecipeEinsum
from mx_jax.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    """The attribute that a kind of layer multiplies with.

    Attributes:
      type: the layer's class.
      attribute: name of the attribute.
      defaults: what Flax puts there; anything else is the user's, and stays.
      facts: fields of `Layer` that rules judge by.
      operation: from the layer and the recipe of each product to what goes there instead.
      products: names of the products, if there is more than one.
      kernel: the parameter whose leading axes tell a stack of layers.
      kernel_ndim: how many axes it has in a single layer.
    """

    type: type
    attribute: str
    defaults: tuple[Any, ...]
    facts: Callable[[Any], dict[str, Any]]
    operation: Callable[[Any, tuple[Recipe | None, ...]], Callable[..., Any]]
    products: tuple[str | None, ...] = (None,)
    kernel: Callable[[Any], Any] = lambda layer: layer.kernel
    kernel_ndim: Callable[[Any], int]

    def obstacle(self, layer: Any) -> str | None:
        """Why the attribute is not ours to set, or None."""
        # First: a property of our own layers draws a key when it is read.
        if isinstance(getattr(layer, "recipe", None), Recipe):
            return "has its own recipe"
        value = getattr(layer, self.attribute)
        ours = isinstance(value, Injected | KeyedInjected)
        if not ours and not any(value is default for default in self.defaults):
            return f"has its own {self.attribute}"
        if getattr(layer, f"{self.attribute}_cls", None) is not None:
            return f"has its own {self.attribute}_cls"
        return None

    def replaced(self, layer: Any) -> Any:
        """What `put` will take the place of."""
        return getattr(layer, self.attribute)

    def put(self, layer: Any, product: Injected | KeyedInjected) -> None:
        """Make a layer multiply by a product."""
        # Static values are a part of the graph definition; a stream is data.
        wrap = nnx.static if isinstance(product, Injected) else nnx.data
        setattr(layer, self.attribute, wrap(product))
        if getattr(layer, "promote_dtype", None) is promote_dtype:
            # A kernel may be an MXArray, which is then used as it is.
            layer.promote_dtype = nnx.static(OperandPromotion(replaced=promote_dtype))

    def take_back(self, layer: Any) -> None:
        """Undo `put`, if it was done."""
        if self.obstacle(layer) is None:
            value = getattr(layer, self.attribute)
            if isinstance(value, Injected | KeyedInjected):
                setattr(layer, self.attribute, nnx.static(value.replaced))
        promotion = getattr(layer, "promote_dtype", None)
        if isinstance(promotion, OperandPromotion):
            layer.promote_dtype = nnx.static(promotion.replaced)

    def stack(self, layer: Any) -> tuple[int, ...]:
        """The leading axes of a stack of layers made by nnx.vmap; () for a single one."""
        shape = self.kernel(layer).shape
        return tuple(shape[: len(shape) - self.kernel_ndim(layer)])


def _dot_general(layer: Any, recipes: tuple[Recipe | None, ...]) -> Callable[..., Any]:
    assert recipes[0] is not None
    return recipes[0].dot_general


def _einsum(layer: Any, recipes: tuple[Recipe | None, ...]) -> Callable[..., Any]:
    assert recipes[0] is not None
    return RecipeEinsum(recipe=recipes[0])


def _conv(layer: Any, recipes: tuple[Recipe | None, ...]) -> Callable[..., Any]:
    assert recipes[0] is not None
    return conv.ConvOfDotGeneral(dot_general=recipes[0].dot_general)


def _embed(layer: Any, recipes: tuple[Recipe | None, ...]) -> Callable[..., Any]:
    assert recipes[0] is not None
    return TablePromotion(recipe=recipes[0], promote=promote_dtype)


def _attention(layer: Any, recipes: tuple[Recipe | None, ...]) -> Callable[..., Any]:
    return Attention(qk=recipes[0], av=recipes[1])


def _general_facts(layer: Any) -> dict[str, Any]:
    shape = (*layer.in_features, math.prod(layer.out_features))
    return {"kernel": layer.kernel.shape, "shape": shape}


def _einsum_facts(layer: Any) -> dict[str, Any]:
    shape = einsum_shape(layer.einsum_str, tuple(layer.kernel_shape))
    return {
        "kernel": layer.kernel.shape,
        "shape": shape,
        "obstacle": "contracts no axis" if shape is None else None,
    }


def _conv_facts(layer: Any) -> dict[str, Any]:
    *taps, features, out = layer.kernel_shape
    return {
        "kernel": layer.kernel.shape,
        "shape": (math.prod(taps), features, out),
        "named_only": True,
        "obstacle": conv.obstacle(layer.feature_group_count, layer.input_dilation),
    }


def _embed_facts(layer: Any) -> dict[str, Any]:
    return {
        "kernel": layer.embedding.shape,
        "shape": (layer.features, layer.num_embeddings),
        "named_only": True,
    }


HOOKS: tuple[Hook, ...] = (
    Hook(
        type=nnx.Linear,
        attribute="dot_general",
        defaults=(lax.dot_general,),
        facts=lambda layer: {
            "kernel": layer.kernel.shape,
            "shape": (layer.in_features, layer.out_features),
        },
        operation=_dot_general,
        kernel_ndim=lambda layer: 2,
    ),
    Hook(
        type=nnx.LinearGeneral,
        attribute="dot_general",
        defaults=(None, lax.dot_general),
        facts=_general_facts,
        operation=_dot_general,
        kernel_ndim=lambda layer: sum(
            map(len, (layer.batch_axis, layer.in_features, layer.out_features))
        ),
    ),
    Hook(
        type=nnx.Einsum,
        attribute="einsum_op",
        defaults=(jnp.einsum,),
        facts=_einsum_facts,
        operation=_einsum,
        kernel_ndim=lambda layer: len(layer.kernel_shape),
    ),
    Hook(
        type=nnx.Conv,
        attribute="conv_general_dilated",
        defaults=(lax.conv_general_dilated,),
        facts=_conv_facts,
        operation=_conv,
        kernel_ndim=lambda layer: len(layer.kernel_shape),
    ),
    Hook(
        type=nnx.Embed,
        attribute="promote_dtype",
        defaults=(promote_dtype,),
        facts=_embed_facts,
        operation=_embed,
        kernel=lambda layer: layer.embedding,
        kernel_ndim=lambda layer: 2,
    ),
    Hook(
        type=nnx.MultiHeadAttention,
        attribute="attention_fn",
        defaults=(nnx.dot_product_attention,),
        facts=lambda layer: {},
        operation=_attention,
        products=("qk", "av"),
        kernel=lambda layer: layer.query.kernel,
        kernel_ndim=lambda layer: 3,
    ),
)


def hook_of(layer: Any) -> Hook | Foreign | None:
    """The hook of a layer; None if there is nothing to multiply with."""
    hook = next((hook for hook in HOOKS if isinstance(layer, hook.type)), None)
    return Foreign() if hook is None and is_foreign(layer) else hook
