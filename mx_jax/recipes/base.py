"""Recipe: the decisions of a matmul, with the callable that carries them into other layers."""

import dataclasses

from mx_jax.ops.dot_general import RecipeDotGeneral
from mx_jax.specs import MatmulRecipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(MatmulRecipe):
    """What users hold: a `MatmulRecipe` that can be injected into layers it does not know.

    Change one with `dataclasses.replace`; every part is checked when it is built.

    Example:
      >>> import dataclasses, mx_jax
      >>> from mx_jax.specs import MatmulSpec
      >>> recipe = mx_jax.recipes.mxfp8()
      >>> print(recipe.fwd)
      mxfp8_e4m3 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
      >>> high = MatmulSpec(lhs=None, rhs=None)
      >>> dataclasses.replace(recipe, name="mxfp8, high dW", drhs=high).drhs.is_high_precision
      True
    """

    @property
    def dot_general(self) -> RecipeDotGeneral:
        """A drop-in for `jax.lax.dot_general`, e.g. for `flax.linen.Dense(dot_general=...)`."""
        return RecipeDotGeneral(recipe=self)
