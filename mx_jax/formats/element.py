"""Element and scale formats: what one code of a block, and its shared scale, mean, as data.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.1; ml_dtypes for the fnuz pair.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

import ml_dtypes
import numpy as np

from mx_jax.formats.removed import whereabouts


@functools.lru_cache(1 << 14)
def _edits(a: str, b: str) -> int:
    """Letters dropped, added or replaced, or neighbours exchanged, from one text to the other."""
    if not a or not b:
        return len(a) + len(b)
    if a[-1] == b[-1]:
        return _edits(a[:-1], b[:-1])
    before = [(a[:-1], b), (a, b[:-1]), (a[:-1], b[:-1])]
    if len(a) > 1 and a[-2:] == b[:-3:-1]:
        before.append((a[:-2], b[:-2]))
    return 1 + min(_edits(*texts) for texts in before)


def nearest(name: object, known: Iterable[str]) -> str:
    """A question after the nearest of the known names, or nothing if none is near."""
    text = str(name).strip().lower().replace("-", "_")
    close = difflib.get_close_matches(text, [*known], 99)
    near = min(close, key=lambda one: _edits(text, one), default=None)
    return f" (did you mean {near!r}?)" if near else ""


def unknown_name(what: str, name: object, known: Iterable[str], hint: str = "") -> ValueError:
    """The error about a name that nothing has, with where it went, or the nearest name."""
    known = tuple(known)
    hint = hint or whereabouts(name) or nearest(name, known)
    return ValueError(f"unknown {what}={name!r}{hint}; known: {', '.join(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A sign, exponent and mantissa layout of at most 8 bits; a table row, never a branch.

    Magnitudes count upward with their codes: code `c` of the non-negative half stands for
    `m * 2^(emin - mantissa_bits)` while its exponent field is 0 and for
    `(1 + m / 2^mantissa_bits) * 2^(field - bias)` after that. INT8 is the same half with a single
    exponent bit (1.6 fixed point, MX v1.0 5.3.4); only its sign differs: two's complement.
    INTEGER8 has another bias, with which it counts in ones.

    Attributes:
      name: short lower-case name, e.g. `"e4m3"`.
      kind: `"float"` (sign and magnitude) or `"int"` (two's complement).
      exponent_bits: width of the exponent field; 1 for `"int"`.
      mantissa_bits: width of the stored mantissa field.
      bias: exponent bias; a field `f > 0` has the unbiased exponent `f - bias`.
      num_reserved_codes: codes at the top of the non-negative half that are NaN or Inf.
      has_inf: whether the first reserved code is Inf; the last is NaN then.
      has_negative_zero: whether the sign bit alone is -0; the fnuz formats use that code for NaN.
      negative_extra: whether the code below `-max` may be produced (INT8's -2.0).
      dtype_name: name of the ml_dtypes (or NumPy) type with the same codes; None if there is none.

    Raises:
      ValueError: facts that make no codes of at most 8 bits, or values that float32 does not hold
        under every E8M0 scale.

    Examples:
      >>> from mx_jax.formats import E2M1, ElementFormat
      >>> E2M1.bits, E2M1.max, E2M1.smallest_subnormal
      (4, 6.0, 0.5)
      >>> fp5 = ElementFormat(name="e2m2", exponent_bits=2, mantissa_bits=2, bias=1)
      >>> fp5.bits, fp5.max, fp5.value(0b10001)
      (5, 7.0, -0.25)
    """

    name: str
    kind: Literal["float", "int"] = "float"
    exponent_bits: int
    mantissa_bits: int
    bias: int
    num_reserved_codes: int = 0
    has_inf: bool = False
    dtype_name: str | None = None
    has_negative_zero: bool = True
    negative_extra: bool = False

    def __post_init__(self):
        reason = self._violation()
        if reason is not None:
            raise ValueError(f"ElementFormat {self.name}: {reason}")

    def _violation(self) -> str | None:
        """The first rule that the facts break, with what they are."""
        facts = f"exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits}"
        if self.kind not in ("float", "int"):
            return f"needs kind='float' or 'int', got kind={self.kind!r}"
        if self.exponent_bits < 1 or self.mantissa_bits < 0 or self.bits > 8:
            return f"needs a sign, an exponent and a mantissa in at most 8 bits, got {facts}"
        if self.kind == "int" and self.exponent_bits != 1:
            return f"needs exponent_bits=1, as fixed point has, got kind='int', {facts}"
        fewest = 2 if self.has_inf else 0
        most = self.sign_code - 2 if self.kind == "float" and self.has_negative_zero else 0
        if not fewest <= self.num_reserved_codes <= most:
            return (
                f"needs {fewest} to {most} reserved codes, got num_reserved_codes="
                f"{self.num_reserved_codes}, kind={self.kind!r}, has_inf={self.has_inf}, "
                f"has_negative_zero={self.has_negative_zero}, {facts}"
            )
        if self.smallest_subnormal < 2.0**-22 or self.emax > 16:
            return (
                "needs values from 2^-22 to below 2^17, which are float32 numbers under every E8M0 "
                f"scale, got smallest_subnormal={self.smallest_subnormal}, max={self.max}, "
                f"bias={self.bias}; choose another bias"
            )
        return None

    @functools.cached_property
    def bits(self) -> int:
        """Width of one code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @functools.cached_property
    def significand_bits(self) -> int:
        """Binary digits of a value, the leading one included."""
        return 1 + self.mantissa_bits

    @functools.cached_property
    def emin(self) -> int:
        """Unbiased exponent of the smallest normal value, which subnormals share."""
        return 1 - self.bias

    @functools.cached_property
    def sign_code(self) -> int:
        """The code with only the sign bit set."""
        return 1 << (self.bits - 1)

    @functools.cached_property
    def max_code(self) -> int:
        """Largest finite code of the non-negative half."""
        return self.sign_code - 1 - self.num_reserved_codes

    @functools.cached_property
    def emax(self) -> int:
        """Unbiased exponent of the largest finite value (MX v1.0, table 1)."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @functools.cached_property
    def max(self) -> float:
        """Largest finite value."""
        return float(self._magnitude(self.max_code))

    @functools.cached_property
    def max_mantissa(self) -> int:
        """Mantissa field of the largest finite value."""
        return self.max_code & ((1 << self.mantissa_bits) - 1)

    @functools.cached_property
    def smallest_normal(self) -> float:
        """Smallest value with a full mantissa; for INT8 this is 1.0, its leading bit."""
        return math.ldexp(1.0, self.emin)

    @functools.cached_property
    def smallest_subnormal(self) -> float:
        """The quantum: smallest positive value."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits)

    @functools.cached_property
    def nan_code(self) -> int | None:
        """The code written for NaN, or None where the format has none."""
        if not self.has_negative_zero and self.kind == "float":
            return self.sign_code
        return self.sign_code - 1 if self.num_reserved_codes else None

    @functools.cached_property
    def inf_code(self) -> int | None:
        """The code of +Inf, or None where the format has none."""
        return self.max_code + 1 if self.has_inf else None

    @functools.cached_property
    def overflow_code(self) -> int:
        """What a cast that does not saturate writes above the range: Inf, else NaN, else max."""
        if self.inf_code is not None:
            return self.inf_code
        return self.max_code if self.nan_code is None else self.nan_code

    @functools.cached_property
    def dynamic_range_db(self) -> float:
        """20 log10(max / smallest_subnormal), in dB."""
        return 20.0 * math.log10(self.max / self.smallest_subnormal)

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The ml_dtypes type whose codes these are (NumPy's int8 for INT8).

        Raises:
          TypeError: there is none.
        """
        if self.dtype_name is None:
            raise TypeError(
                f"ElementFormat {self.name}: no dtype has these codes, got dtype_name=None; use "
                "codes and values as they are"
            )
        return np.dtype(getattr(ml_dtypes, self.dtype_name, self.dtype_name))

    def value(self, code: int) -> float:
        """The value of one code, exact in float64.

        Args:
          code: `0 <= code < 2^bits`.

        Returns:
          A float; NaN or Inf for the reserved codes.

        Raises:
          ValueError: if the code does not fit the format's bits.
        """
        if not 0 <= code < 1 << self.bits:
            raise ValueError(
                f"{self.name}.value: the code must lie in 0..{(1 << self.bits) - 1}, "
                f"got code={code}"
            )
        negative, half = bool(code & self.sign_code), code & (self.sign_code - 1)
        if self.kind == "int":
            signed = half - self.sign_code if negative else half
            return signed * self.smallest_subnormal
        if not self.has_negative_zero and code == self.sign_code:
            return math.nan
        magnitude = math.inf if half == self.inf_code else math.nan
        if half <= self.max_code:
            magnitude = self._magnitude(half)
        return -magnitude if negative else magnitude

    def _magnitude(self, half: int) -> float:
        field, mantissa = half >> self.mantissa_bits, half & ((1 << self.mantissa_bits) - 1)
        if field:
            mantissa += 1 << self.mantissa_bits
        return math.ldexp(mantissa, max(field, 1) - self.bias - self.mantissa_bits)

    def __repr__(self) -> str:
        return f"ElementFormat({self.name})"


def _float(
    name: str, exponent_bits: int, mantissa_bits: int, bias: int, dtype: str, **special: Any
) -> ElementFormat:
    return ElementFormat(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        dtype_name=dtype,
        **special,
    )


def _fixed(name: str, *, negative_extra: bool = False, bias: int = 1) -> ElementFormat:
    return ElementFormat(
        name=name,
        kind="int",
        exponent_bits=1,
        mantissa_bits=6,
        bias=bias,
        dtype_name="int8",
        has_negative_zero=False,
        negative_extra=negative_extra,
    )


E4M3 = _float("e4m3", 4, 3, 7, "float8_e4m3fn", num_reserved_codes=1)
E5M2 = _float("e5m2", 5, 2, 15, "float8_e5m2", num_reserved_codes=4, has_inf=True)
E2M3 = _float("e2m3", 2, 3, 1, "float6_e2m3fn")
E3M2 = _float("e3m2", 3, 2, 3, "float6_e3m2fn")
E2M1 = _float("e2m1", 2, 1, 1, "float4_e2m1fn")
INT8 = _fixed("int8")
INT8_FULL = _fixed("int8_full", negative_extra=True)
# A code is its value: then scales are what others call those of integers.
INTEGER8 = _fixed("integer8", bias=-5)
E4M3FNUZ = _float("e4m3fnuz", 4, 3, 8, "float8_e4m3fnuz", has_negative_zero=False)
E5M2FNUZ = _float("e5m2fnuz", 5, 2, 16, "float8_e5m2fnuz", has_negative_zero=False)

ELEMENT_FORMATS: tuple[ElementFormat, ...] = (
    E4M3,
    E5M2,
    E2M3,
    E3M2,
    E2M1,
    INT8,
    INT8_FULL,
    INTEGER8,
    E4M3FNUZ,
    E5M2FNUZ,
)


@functools.cache
def known_element(element: ElementFormat) -> ElementFormat | None:
    """The row of `ELEMENT_FORMATS` with the same facts, under whatever name, or None."""
    return same_facts(element, ELEMENT_FORMATS)


def same_facts(format: Any, rows: Iterable[Any]) -> Any:
    """The row that equals a format but for its name, or None."""
    alike = (row for row in rows if dataclasses.replace(format, name=row.name) == row)
    return next(alike, None)


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
    name="e4m3", kind="element", bits=8, dtype_name="float8_e4m3fn", element=E4M3
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
    return same_facts(dataclasses.replace(scale, element=element), SCALE_FORMATS)
