"""What both frameworks' layers are handed besides dot_general and einsum."""

from typing import Any

import jax

from mx_jax.axes import Axes
from mx_jax.convert.rules import Shape
from mx_jax.ops.quantize import cast
from mx_jax.packed import Quantized
from mx_jax.recipes import OperandSpec, Recipe


def einsum_shape(subscripts: str, kernel: tuple[int, ...]) -> Shape:
    """A kernel's shape as filters see it, `(*contracting, kept)`.

    Args:
      subscripts: of an einsum of inputs and kernel, with `->`.
      kernel: shape of the kernel.

    Returns:
      None if the einsum contracts no axis of the kernel: then there is nothing to lay blocks along.
    """
    inputs, _, out = subscripts.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    letters = right.replace("...", "")
    # An ellipsis stands for axes that nothing contracts: they are kept, or batch axes.
    split = right.find("...") if "..." in right else len(letters)
    tail = len(letters) - split
    sizes = dict(zip(letters[:split], kernel, strict=False))
    sizes |= dict(zip(letters[split:], kernel[len(kernel) - tail :], strict=False))
    # Blocks lie along the last contracted letter in the input's order.
    contracting = [sizes[letter] for letter in left if letter in sizes and letter not in out]
    kept = 1
    for letter, size in sizes.items():
        kept *= size if letter in out and letter not in left else 1
    return (*contracting, kept) if contracting else None


def einsum_axes(subscripts: str, kernel: tuple[int, ...]) -> Axes | None:
    """A kernel's axes in an einsum of inputs and kernel; None below an ellipsis of its own."""
    inputs, _, out = subscripts.replace(" ", "").partition("->")
    left, _, letters = inputs.partition(",")
    if "..." in letters or len(letters) != len(kernel):
        return None
    batch = tuple(i for i, c in enumerate(letters) if c in left and c in out)
    kept = tuple(i for i, c in enumerate(letters) if c not in left and c in out)
    # Blocks lie along the last contracted letter in the input's order.
    contracting = tuple(letters.index(c) for c in left if c in letters and c not in out)
    return Axes(batch, kept, contracting) if contracting else None


def cast_table(table: Any, recipe: Recipe, key: jax.Array | None) -> Any:
    """An embedding's table `[entries, features]` as the recipe's products see a weight.

    Blocks lie along the features, so that what is looked up and what is attended to have the same
    values. The gradient is the identity.
    """
    spec: OperandSpec | None = recipe.fwd.rhs
    if spec is None or isinstance(table, Quantized):
        return table
    values = cast(
        table if spec.prescale == 1.0 else table * spec.prescale,
        spec.format,
        axis=-1,
        scale_rule=spec.scale_rule,
        rounding=spec.rounding,
        key=key if spec.random_bits else None,
    )
    return values if spec.prescale == 1.0 else values / spec.prescale
