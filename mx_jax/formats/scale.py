"""Scale formats: what a block's shared scale means, as data.

Source: OCP Microscaling Formats (MX) v1.0, section 5.4.1 (E8M0).
"""

import dataclasses
import functools
import math
from typing import Literal

import ml_dtypes
import numpy as np

from mx_jax.formats.element import E4M3 as _E4M3
from mx_jax.formats.element import ElementFormat, known_element


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleFormat:
    """How the shared scale of a block is stored.

    Attributes:
      name: short lower-case name, e.g. `"e8m0"`.
      kind: `"exponent"`: byte `b` in 0..254 is 2^(b - 127), 255 is NaN;
        `"element"`: a byte in an element format; `"multiplier"`: float32, `value = code * scale`;
        `"divisor"`: float32, `value = code / scale`, as torchao's float8 stores it.
      bits: stored width.
      dtype_name: name of the ml_dtypes (or NumPy) type with the same codes.
      element: the element format of kind `"element"`, else None.

    Examples:
      >>> from mx_jax.formats import E8M0
      >>> E8M0.value(127), E8M0.value(0) == 2.0**-127
      (1.0, True)
    """

    name: str
    kind: Literal["exponent", "element", "multiplier", "divisor"]
    bits: int
    dtype_name: str
    element: ElementFormat | None = None

    @functools.cached_property
    def is_float32(self) -> bool:
        """Whether the scale is stored as a float32 value rather than as a byte."""
        return self.kind in ("multiplier", "divisor")

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The ml_dtypes type whose codes these are."""
        return np.dtype(getattr(ml_dtypes, self.dtype_name, self.dtype_name))

    @functools.cached_property
    def storage_dtype(self) -> np.dtype:
        """The dtype of `MXArray.scales`: bytes, or float32 for the float32 scale."""
        return np.dtype("float32" if self.is_float32 else "uint8")

    @functools.cached_property
    def bias(self) -> int | None:
        """Exponent bias of the stored code; None for a float32 scale."""
        if self.kind == "exponent":
            return 127
        return self.element.bias if self.element else None

    @functools.cached_property
    def max(self) -> float:
        """Largest scale."""
        if self.is_float32:
            return float(np.finfo(np.float32).max)
        return self.element.max if self.element else math.ldexp(1.0, 127)

    @functools.cached_property
    def smallest(self) -> float:
        """Smallest positive scale."""
        if self.is_float32:
            return float(np.finfo(np.float32).smallest_subnormal)
        return self.element.smallest_subnormal if self.element else math.ldexp(1.0, -127)

    def value(self, code: int) -> float:
        """The value of one stored byte, exact in float64.

        Args:
          code: `0 <= code < 256`.

        Returns:
          A float; NaN for the code reserved for it.

        Raises:
          ValueError: if the code is no byte, or the scale is stored as float32.
        """
        if self.is_float32 or not 0 <= code < 256:
            raise ValueError(
                f"{self.name}.value: needs a byte scale and a code in 0..255, "
                f"got kind={self.kind!r}, code={code}"
            )
        if self.element:
            return self.element.value(code)
        return math.nan if code == 255 else math.ldexp(1.0, code - 127)

    def __repr__(self) -> str:
        return f"ScaleFormat({self.name})"


E8M0 = ScaleFormat(name="e8m0", kind="exponent", bits=8, dtype_name="float8_e8m0fnu")
E4M3_SCALE = ScaleFormat(
    name="e4m3", kind="element", bits=8, dtype_name="float8_e4m3fn", element=_E4M3
)
F32 = ScaleFormat(name="f32", kind="multiplier", bits=32, dtype_name="float32")
F32_DIVISOR = dataclasses.replace(F32, name="f32_divisor", kind="divisor")

SCALE_FORMATS: tuple[ScaleFormat, ...] = (E8M0, E4M3_SCALE, F32, F32_DIVISOR)


@functools.cache
def known_scale(scale: ScaleFormat) -> ScaleFormat | None:
    """The row of `SCALE_FORMATS` with the same facts, under whatever name, or None."""
    element = None if scale.element is None else known_element(scale.element)
    if element is None and scale.element is not None:
        return None
    for known in SCALE_FORMATS:
        if dataclasses.replace(scale, name=known.name, element=element) == known:
            return known
    return None
