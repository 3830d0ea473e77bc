"""flax.nnx: layers that call jax.numpy themselves, as a subclass whose call is made anew."""

import functools
from typing import Any

from flax import nnx

from mx_jax.convert.foreign import with_products
from mx_jax.convert.kinds import foreign_facts
from mx_jax.convert.nnx_classes import standing_for


def facts(layer: Any) -> dict[str, Any] | None:
    """Fields of `Layer` that rules judge by; None if a layer has no matrix of its own."""
    kernels = [
        tuple(value.shape)
        for value in vars(layer).values()
        if isinstance(value, nnx.Param) and len(getattr(value, "shape", ())) >= 2
    ]
    inner = ["/".join(map(str, path)) for path, _ in nnx.iter_modules(layer) if path]
    found = foreign_facts(layer, kernels, inner)
    if found is None or found["obstacle"] or callable(layer):
        return found
    return found | {"obstacle": "is not callable"}


def put(layer: Any, product: Any) -> None:
    """Make a layer multiply by a product in its call."""
    layer.mx_product = product
    object.__setattr__(layer, "__class__", _converted_class(type(layer)))


def take_back(layer: Any) -> None:
    """Undo `put`, if it was done."""
    base = getattr(type(layer), "_mx_base", None)
    if base is not None:
        del layer.mx_product
        object.__setattr__(layer, "__class__", base)


@functools.lru_cache(maxsize=1024)
def _converted_class(base: type) -> type:
    """One for each class, so that equal models have equal graphs."""
    own = {
        "__call__": _call,
        "_mx_base": base,
    }
    return standing_for(base, own)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    call = functools.partial(self._mx_base.__call__, self)
    return with_products(call, self.mx_product, type(self).__name__)(*args, **kwargs)
