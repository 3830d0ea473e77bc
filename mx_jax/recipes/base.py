"""Recipe: the decisions of a matmul, with the callable that carries them into other layers."""

import dataclasses
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from mx_jax.codecs.rounding import Rounding
from mx_jax.formats import BlockFormat
from mx_jax.ops.dot_general import RecipeDotGeneral
from mx_jax.recipes.changes import with_changes
from mx_jax.reference.hadamard import Hadamard
from mx_jax.reference.scale_rules import ScaleRule
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec, Residuals

# What a word of `with_` takes for a tensor and for a product; `...`: as it is.
_Tensor = BlockFormat | str | OperandSpec | Mapping[str, Any] | EllipsisType | None
_Product = MatmulSpec | Mapping[str, Any] | EllipsisType | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(MatmulRecipe):
    """What users hold: a `MatmulRecipe` that can be injected into layers it does not know.

    Change one by `with_`; every part is checked when it is built.

    Examples:
      >>> import mx_jax
      >>> recipe = mx_jax.recipes.mxfp8()
      >>> print(recipe.fwd)
      mxfp8_e4m3 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
      >>> recipe.with_(drhs=None, name="mxfp8, high dW").drhs.is_high_precision
      True
    """

    @property
    def dot_general(self) -> RecipeDotGeneral:
        """A drop-in for `jax.lax.dot_general`, e.g. for `flax.linen.Dense(dot_general=...)`."""
        return RecipeDotGeneral(recipe=self)

    def with_(
        self,
        *,
        name: str | None = None,
        weights: _Tensor = ...,
        activations: _Tensor = ...,
        gradients: _Tensor = ...,
        scale_rule: ScaleRule | str | EllipsisType | None = ...,
        rounding: Rounding | str | EllipsisType = ...,
        transform: Hadamard | EllipsisType | None = ...,
        fwd: _Product = ...,
        dlhs: _Product = ...,
        drhs: _Product = ...,
        residuals: Residuals | str | EllipsisType = ...,
        mask_clipped: bool | EllipsisType = ...,
        gather: Any = ...,
    ) -> "Recipe":
        """This recipe with some decisions made anew; everything that is not named stays.

        The three tensors, each in its two products where that product quantizes anything, are
        weights (`fwd.rhs`, `dlhs.rhs`), activations (`fwd.lhs`, `drhs.rhs`) and gradients
        (`dlhs.lhs`, `drhs.lhs`). A format brings the scale rule that loses least, one that never
        clips if the operand rounds stochastically; rounding and prescale stay. None is high
        precision, an `OperandSpec` is taken as it is, and a dict names parts: `format`,
        `scale_rule`, `rounding`, `prescale`. What is said of one product counts more than what
        is said of a tensor, and that more than what is said of all.

        Args:
          name: what tables call the result; None: this name, with the changes after it.
          weights: the right operand of the product.
          activations: the left operand of the product.
          gradients: the incoming cotangent.
          scale_rule: of every quantized operand; None: the one that loses least for its format.
          rounding: of every quantized operand.
          transform: of every product that quantizes.
          fwd: the product itself: None for high precision, a `MatmulSpec`, or a dict of parts
            (`lhs`, `rhs`, `transform`, `fast_accumulation`).
          dlhs: the gradient of the left operand, likewise.
          drhs: the gradient of the right operand, likewise.
          residuals: what is kept for the backward products, or its name.
          mask_clipped: whether values that the forward product clipped get no gradient.
          gather: mesh axes along which operands are gathered as codes; not shown in the name.

        Raises:
          ValueError: a word that finds nothing to change, unknown names and parts, or operands
            that do not meet in a product.
          TypeError: a value of another type.

        Warns:
          UserWarning: an operand comes to round stochastically under a rule that clips, which
            nobody named: what is clipped makes its mean too small.

        Examples:
          >>> from mx_jax import recipes
          >>> hybrid = recipes.mxfp8().with_(gradients="mxfp8_e5m2", name="mxfp8_hybrid")
          >>> hybrid == recipes.mxfp8_hybrid()
          True
          >>> print(recipes.weight_only("mxfp4").with_(activations="mxfp8_e4m3").fwd)
          mxfp8_e4m3 (rceil, nearest) x mxfp4 (even, nearest)
          >>> recipes.mxfp8().with_(gradients={"rounding": "stochastic"}, drhs=None).name
          'mxfp8, gradients=(rounding=stochastic), drhs=high precision'
        """
        words = {key: value for key, value in locals().items() if key not in ("self", "name")}
        return with_changes(self, name, words)
