"""flax.nnx: what a layer is, and how a product gets into it and out again."""

from typing import Any

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from mx_jax.convert import nnx_foreign
from mx_jax.convert.kind import Kind
from mx_jax.convert.kinds import FOREIGN, kind_of
from mx_jax.convert.nnx_products import Injected, KeyedInjected, OperandPromotion
from mx_jax.recipes import Recipe


def judged(layer: Any) -> tuple[Kind, dict[str, Any]] | None:
    """The kind of a layer, and the fields of `Layer` that rules judge it by; None: no product."""
    kind = kind_of(layer)
    if kind is None:
        facts = nnx_foreign.facts(layer)
        return None if facts is None else (FOREIGN, facts)
    stored = tuple(kind.kernel(layer).shape)
    facts = kind.facts(layer, stored[len(stack(layer, kind)) :])
    if "kernel" in facts:
        # With the axes of a stack.
        facts["kernel"] = stored
    return kind, facts | {"obstacle": facts["obstacle"] or _obstacle(layer, kind)}


def _obstacle(layer: Any, kind: Kind) -> str | None:
    # First: a property of our own layers draws a key when it is read.
    if isinstance(getattr(layer, "recipe", None), Recipe):
        return "has its own recipe"
    return kind.nnx and kind.nnx.obstacle(layer, (Injected, KeyedInjected))


def stack(layer: Any, kind: Kind) -> tuple[int, ...]:
    """The leading axes of a stack of layers made by nnx.vmap; () for a single one."""
    if kind is FOREIGN:
        # Such a layer does not tell them from others.
        return ()
    shape = kind.kernel(layer).shape
    return tuple(shape[: len(shape) - kind.kernel_ndim(layer)])


def replaced(layer: Any, kind: Kind) -> Any:
    """What `put` will take the place of."""
    return kind.nnx and getattr(layer, kind.nnx.attribute)


def put(layer: Any, kind: Kind, product: Injected | KeyedInjected) -> None:
    """Make a layer multiply by a product."""
    # Static values are a part of the graph definition; a stream is data.
    wrap = nnx.static if isinstance(product, Injected) else nnx.data
    if kind.nnx is None:
        nnx_foreign.put(layer, wrap(product))
        return
    setattr(layer, kind.nnx.attribute, wrap(product))
    if getattr(layer, "promote_dtype", None) is promote_dtype:
        # A kernel may be an MXArray, which is then used as it is.
        layer.promote_dtype = nnx.static(OperandPromotion(replaced=promote_dtype))


def take_back(layer: Any) -> None:
    """Undo `put`, if it was done."""
    nnx_foreign.take_back(layer)
    kind = kind_of(layer)
    if kind is None or kind.nnx is None:
        return
    if _obstacle(layer, kind) is None:
        value = getattr(layer, kind.nnx.attribute)
        if isinstance(value, Injected | KeyedInjected):
            setattr(layer, kind.nnx.attribute, nnx.static(value.replaced))
    promotion = getattr(layer, "promote_dtype", None)
    if isinstance(promotion, OperandPromotion):
        layer.promote_dtype = nnx.static(promotion.replaced)
