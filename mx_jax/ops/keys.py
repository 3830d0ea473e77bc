"""Keys of products: who needs one, and what each of the three products draws from it."""

from typing import Any, Literal

import jax

from mx_jax.axes import Side
from mx_jax.ops.checks import check_is_key
from mx_jax.specs import MatmulRecipe

Key = jax.Array | None
Product = Literal["fwd", "dlhs", "drhs"]

# Which product gives which operand's cotangent.
GRADIENTS: dict[Side, Product] = {"lhs": "dlhs", "rhs": "drhs"}

# Each product has a stream of its own. The second entry is what errors call it.
_STREAMS = {"fwd": (0, "output"), "dlhs": (1, "grad_input"), "drhs": (2, "grad_weight")}


def check_matmul_key(key: Any, recipe: MatmulRecipe) -> Key:
    """The key that a product takes: None if its recipe draws nothing, whatever was given.

    The gradients' own need is only known when they are taken: see `product_key`.

    Raises:
      ValueError: no key, and the forward product draws.
      TypeError: what is given is no key.
    """
    if key is not None:
        check_is_key(key, "dot_general")
    elif recipe.fwd.is_stochastic:
        raise ValueError(
            f"dot_general: recipe {recipe.name!r} rounds stochastically and needs a key, got "
            "key=None; pass key=jax.random.key(seed)"
        )
    return key if recipe.is_stochastic else None


def product_key(recipe: MatmulRecipe, product: Product, key: Key) -> Key:
    """What one of the three products draws from; None if it draws nothing.

    Raises:
      ValueError: it draws, and there is no key.
    """
    if not getattr(recipe, product).is_stochastic:
        return None
    stream, name = _STREAMS[product]
    if key is None:
        raise ValueError(
            f"dot_general: recipe {recipe.name!r} rounds stochastically in {name} and needs a key, "
            "got key=None; pass key=jax.random.key(seed) to the product that is differentiated, or "
            "the stream 'quantize' to a Flax model"
        )
    return jax.random.fold_in(key, stream)
