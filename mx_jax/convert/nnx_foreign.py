"""flax.nnx: layers that call jax.numpy themselves, as a subclass whose call is made anew."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from mx_jax.convert.foreign import with_products
from mx_jax.convert.nnx_products import Injected, KeyedInjected
from mx_jax.recipes import Recipe

# Their parameters multiply elementwise.
_WITHOUT_PRODUCT = (nnx.BatchNorm, nnx.GroupNorm, nnx.LayerNorm, nnx.RMSNorm)


def is_foreign(layer: Any) -> bool:
    """Whether a layer has a matrix of its own."""
    return bool(_kernels(layer)) and not isinstance(layer, _WITHOUT_PRODUCT)


def _kernels(layer: Any) -> list[tuple[int, ...]]:
    return [
        tuple(value.shape)
        for value in vars(layer).values()
        if isinstance(value, nnx.Param) and len(getattr(value, "shape", ())) >= 2
    ]


class Foreign:
    """The hook of somebody else's layer: its class, in place of an attribute. Like `Hook`."""

    products: tuple[str | None, ...] = (None,)

    def facts(self, layer: Any) -> dict[str, Any]:
        """Fields of `Layer` that rules judge by; which axes it contracts is not known."""
        return {"kernel": _kernels(layer)[0], "named_only": True}

    def obstacle(self, layer: Any) -> str | None:
        """Why the layer's call is not to be made anew, or None."""
        if isinstance(layer, nnx.ConvTranspose):
            return "no product of patches and kernel"
        inner = ["/".join(map(str, path)) for path, _ in nnx.iter_modules(layer) if path]
        if inner:
            return f"has layers of its own: {', '.join(inner)}"
        return None if callable(layer) else "is not callable"

    def operation(self, layer: Any, recipes: tuple[Recipe | None, ...]) -> Callable[..., Any]:
        """What the layer multiplies with."""
        assert recipes[0] is not None
        return recipes[0].dot_general

    def stack(self, layer: Any) -> tuple[int, ...]:
        """Leading axes of a stack: a layer does not tell them from others."""
        return ()

    def replaced(self, layer: Any) -> Any:
        """Nothing."""
        return None

    def put(self, layer: Any, product: Injected | KeyedInjected) -> None:
        """Make a layer multiply by a product in its call."""
        wrap = nnx.static if isinstance(product, Injected) else nnx.data
        layer.mx_product = wrap(product)
        object.__setattr__(layer, "__class__", _converted_class(type(layer)))

    def take_back(self, layer: Any) -> None:
        """Undo `put`, if it was done."""
        base = getattr(type(layer), "_mx_base", None)
        if base is not None:
            del layer.mx_product
            object.__setattr__(layer, "__class__", base)


@functools.lru_cache(maxsize=1024)
def _converted_class(base: type) -> type:
    """One for each class, so that equal models have equal graphs."""
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__call__": _call,
        "_mx_base": base,
    }
    return type(base)(base.__name__, (base,), body)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    call = functools.partial(self._mx_base.__call__, self)
    return with_products(call, self.mx_product, type(self).__name__)(*args, **kwargs)
