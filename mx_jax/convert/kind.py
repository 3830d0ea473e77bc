"""What a kind of layers is: where they hold their products, and what conversion puts there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from mx_jax.axes import Axes
from mx_jax.convert.rules import Shape


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


def _as_stored(layer: Any, kernel: tuple[int, ...], *call: Any) -> Shape:
    """A kernel `[in, out]`."""
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
        after the operands, to the kernel as filters see it; None if nothing is contracted. None in
        its place: there is no kernel.
      axes: the same to the kernel's axes in the product; None where they are not known, so that
        no kernel is stored quantized. None in its place: `[in, out]`, if `shape` is so too.
      kernel: the parameter whose leading axes tell a stack of nnx layers, or of nodes.
      kernel_ndim: how many axes it has in a single layer.
      named_only: whether only a rule that names the type converts it.
      obstacle: why this layer cannot be converted, or None.
      reads_stored: whether a quantized kernel is multiplied as it is where no rule decides, or by
        its values.
      rhs_is_kernel: whether the right operand is the kernel as it is stored, so that metadata say
        where it lies.

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
            return {"named_only": self.named_only, "obstacle": self.obstacle(layer)}
        shape = self.shape(layer, kernel, *call)
        obstacle = self.obstacle(layer) if shape else "contracts no axis"
        return {
            "kernel": kernel,
            "shape": shape,
            "named_only": self.named_only,
            "obstacle": obstacle,
            "axes": self._axes(layer, kernel, *call),
        }

    def _axes(self, layer: Any, kernel: tuple[int, ...], *call: Any) -> Axes | None:
        if self.axes is not None:
            return self.axes(layer, kernel, *call)
        plain = self.shape is _as_stored and len(kernel) == 2
        return Axes.ordered(k_first=True) if plain else None
