"""float8 by casts, with torchao's semantics: one float32 scale a tensor or a row, no MX blocks.

Each operand of each of the three products has its own cast. Source: torchao.float8's training
config; scales are `max / amax`, values are multiplied, clamped and cast, and the product is divided
by both scales.
"""

import dataclasses
import re
from typing import Literal

from mx_jax import formats
from mx_jax.ops import current_target
from mx_jax.recipes.base import Recipe
from mx_jax.reference.scale_rules import FLOAT8, FLOAT8_POWER_OF_TWO
from mx_jax.specs import MatmulSpec, OperandSpec, Residuals, operand

Granularity = Literal["tensorwise", "axiswise"]
# The word for it in names of formats, and the block's size along the kept axis.
_GRANULARITIES = {"tensorwise": ("tensorwise", formats.WHOLE), "axiswise": ("rowwise", 1)}
# AMD's GPUs that multiply OCP's float8, as others do: gfx942, MI300, has the fnuz formats alone.
_OCP_ON_ROCM = re.compile("gfx95|gfx12|MI35")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """How one tensor is cast to float8 for one product, or that it is not.

    Attributes:
      scaling: `"dynamic"` takes the scale from the tensor at hand, `"disabled"` keeps the tensor in
        high precision.
      granularity: `"tensorwise"`: one scale; `"axiswise"`: one along the contracting axis, that
        is, one for every row or column.
      element: float8 element format; None: the one that the operand's role has by default.

    Raises:
      ValueError: unknown scaling or granularity, a disabled axis-wise cast, or an element format
        that is not 8-bit floating point.
      TypeError: element is no element format, such as a name.

    Examples:
      >>> from mx_jax.formats import E5M2
      >>> from mx_jax.recipes import Cast, Float8Config
      >>> gradients = Cast(granularity="axiswise", element=E5M2)
      >>> config = Float8Config(cast_config_grad_output=gradients)
      >>> print(config.recipe("mine").dlhs.lhs)
      float8_rowwise_e5m2 (float8, nearest)
    """

    scaling: Literal["dynamic", "disabled"] = "dynamic"
    granularity: Granularity = "tensorwise"
    element: formats.ElementFormat | None = None

    def __post_init__(self):
        if self.scaling not in ("dynamic", "disabled"):
            raise ValueError(
                f"float8 Cast: scaling must be 'dynamic' or 'disabled', got {self.scaling!r}"
            )
        if self.granularity not in _GRANULARITIES:
            raise ValueError(
                "float8 Cast: granularity must be 'tensorwise' or 'axiswise', got "
                f"{self.granularity!r}"
            )
        if self.granularity == "axiswise" and self.scaling == "disabled":
            raise ValueError(
                "float8 Cast: a disabled cast has no granularity, got scaling='disabled' with "
                "granularity='axiswise'; leave granularity out"
            )
        if self.element is not None and not isinstance(self.element, formats.ElementFormat):
            raise TypeError(
                "float8 Cast: element must be an ElementFormat or None, got "
                f"element={self.element!r}; use mx_jax.formats.E4M3 or E5M2"
            )
        if self.element is not None and (self.element.bits != 8 or self.element.kind != "float"):
            raise ValueError(
                "float8 Cast: element must be an 8-bit floating-point format, got "
                f"element={self.element.name}; use E4M3 or E5M2"
            )

    @property
    def is_disabled(self) -> bool:
        """Whether the tensor stays in high precision."""
        return self.scaling == "disabled"

    def __str__(self) -> str:
        return "high precision" if self.is_disabled else f"float8 {self.granularity}"


DISABLED = Cast(scaling="disabled")
AXISWISE = Cast(granularity="axiswise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Config:
    """torchao's float8 training config, name for name where the thing exists here.

    A cast that is None is the same as that of the tensor's other product. Inner dimensions need no
    padding option: blocks are padded inside, and a native kernel pads for itself. Emulation is
    not an option either: a backend that multiplies float8 natively is selected where there is one,
    and the exact emulation everywhere else; `mx_jax.inspect.explain` says which.

    Attributes:
      cast_config_input: of the input, in the output product.
      cast_config_weight: of the weight, in the output product.
      cast_config_grad_output: of the cotangent, in the grad_input product.
      cast_config_input_for_grad_weight: of the input, in the grad_weight product.
      cast_config_weight_for_grad_input: of the weight, in the grad_input product.
      cast_config_grad_output_for_grad_weight: of the cotangent, in the grad_weight product.
      fast_accumulation_output: let a native kernel add in lower precision, in the output product.
      fast_accumulation_grad_input: likewise in the grad_input product.
      fast_accumulation_grad_weight: likewise in the grad_weight product.
      round_scales_to_power_of_2: round scales down to powers of two, which then are exact.
      residuals: what is saved for the backward products.

    Raises:
      ValueError: one operand of a product in float8 and the other in high precision, or a tensor
        cast to two different element formats; a disabled cast counts with the element that it has
        or would have.

    Examples:
      >>> import mx_jax
      >>> from mx_jax.recipes import AXISWISE, Float8Config
      >>> config = Float8Config(cast_config_input=AXISWISE, cast_config_weight=AXISWISE)
      >>> recipe = config.recipe("rows")
      >>> print(recipe.fwd.lhs, "|", recipe.dlhs.lhs)
      float8_rowwise_e4m3 (float8, nearest) | float8_tensorwise_e5m2 (float8, nearest)
    """

    cast_config_input: Cast = Cast()
    cast_config_weight: Cast = Cast()
    cast_config_grad_output: Cast = Cast()
    cast_config_input_for_grad_weight: Cast | None = None
    cast_config_weight_for_grad_input: Cast | None = None
    cast_config_grad_output_for_grad_weight: Cast | None = None
    fast_accumulation_output: bool = True
    fast_accumulation_grad_input: bool = False
    fast_accumulation_grad_weight: bool = False
    round_scales_to_power_of_2: bool = False
    residuals: Residuals = Residuals.PRIMAL

    def __post_init__(self):
        elements: dict[str, formats.ElementFormat] = {}
        for product, operands in self._casts().items():
            (lhs_name, lhs), (rhs_name, rhs) = operands
            if lhs.is_disabled != rhs.is_disabled:
                raise ValueError(
                    f"Float8Config: both operands of {product} must be float8 or both high "
                    f"precision, got {lhs_name}={lhs} and {rhs_name}={rhs}"
                )
            for name, cast in operands:
                tensor, element = name.partition("_for_")[0], _element(cast, name)
                first = elements.setdefault(tensor, element)
                if first != element:
                    raise ValueError(
                        f"Float8Config: {tensor} must be cast to one element format in both "
                        f"products it takes part in, got {first.name} and {element.name}; give "
                        "both casts the same element (a disabled cast, too, has its role's by "
                        "default)"
                    )

    def _casts(self) -> dict[str, tuple[tuple[str, Cast], tuple[str, Cast]]]:
        """The left and the right operand of each product: their names and casts."""
        x, w, g = self.cast_config_input, self.cast_config_weight, self.cast_config_grad_output
        x_again = self.cast_config_input_for_grad_weight or x
        w_again = self.cast_config_weight_for_grad_input or w
        g_again = self.cast_config_grad_output_for_grad_weight or g
        return {
            "output": (("input", x), ("weight", w)),
            "grad_input": (("grad_output", g), ("weight_for_grad_input", w_again)),
            "grad_weight": (
                ("grad_output_for_grad_weight", g_again),
                ("input_for_grad_weight", x_again),
            ),
        }

    def recipe(self, name: str, *, platform: str | None = None) -> Recipe:
        """The recipe of this config.

        Args:
          name: what tables and errors call it.
          platform: `"rocm"` takes the fnuz element formats; default: what the machine has which a
            product would be for, where this is called.
        """
        here = current_target()
        kind = (here.device_kind if platform is None else None) or ""
        is_fnuz = (platform or here.platform) == "rocm" and not _OCP_ON_ROCM.search(kind)
        fast = (
            self.fast_accumulation_output,
            self.fast_accumulation_grad_input,
            self.fast_accumulation_grad_weight,
        )
        fwd, dlhs, drhs = (
            MatmulSpec(
                lhs=self._spec(*lhs, is_fnuz),
                rhs=self._spec(*rhs, is_fnuz),
                fast_accumulation=may and not lhs[1].is_disabled,
            )
            for may, (lhs, rhs) in zip(fast, self._casts().values(), strict=True)
        )
        return Recipe(name=name, fwd=fwd, dlhs=dlhs, drhs=drhs, residuals=self.residuals)

    def _spec(self, tensor: str, cast: Cast, is_fnuz: bool) -> OperandSpec | None:
        if cast.is_disabled:
            return None
        element = _element(cast, tensor)
        if is_fnuz:
            fnuz = {formats.E4M3: formats.E4M3FNUZ, formats.E5M2: formats.E5M2FNUZ}
            element = fnuz.get(element, element)
        word, kept = _GRANULARITIES[cast.granularity]
        format = formats.BlockFormat(
            name=f"float8_{word}_{element.name}",
            element=element,
            scale=formats.F32_DIVISOR,
            block=(kept, formats.WHOLE),
        )
        rule = FLOAT8_POWER_OF_TWO if self.round_scales_to_power_of_2 else FLOAT8
        return operand(format, scale_rule=rule)


def _element(cast: Cast, tensor: str) -> formats.ElementFormat:
    """The cast's own element format, or its role's: gradients need range, the rest precision."""
    return cast.element or (formats.E5M2 if tensor.startswith("grad_output") else formats.E4M3)
