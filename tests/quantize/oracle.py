"""MX quantization in float64 NumPy, where every step is exact: values, tables and comparisons.

An algorithm of its own: no bit patterns and no mantissa thresholds. Every float32, every product of
an element and a scale and every quotient of the two is exact in float64.
"""

import dataclasses

import numpy as np

from mx_jax.formats import BlockFormat, ElementFormat


@dataclasses.dataclass(frozen=True)
class Quantized:
    """codes uint8, scales uint8 and values float32, as `mx_jax.quantize` arranges them."""

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray


def scale_exponents(amax: np.ndarray, element: ElementFormat, rule: str) -> np.ndarray:
    """Unbiased, unclamped scale exponents of positive finite magnitudes in float64."""
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2^exponent, fraction in [1/2, 1)
    floor_log2 = exponent - 1
    if rule == "floor":
        return floor_log2 - element.emax
    if rule == "ceil":
        return np.where(fraction == 0.5, floor_log2, floor_log2 + 1) - element.emax
    if rule == "even":
        units = np.floor(fraction * 2.0 ** (element.mantissa_bits + 1) + 0.5)
        rounded = np.ldexp(units, exponent - element.mantissa_bits - 1)
        return np.frexp(rounded)[1] - 1 - element.emax
    assert rule == "rceil", rule
    smallest = floor_log2 - element.emax - 3
    for _ in range(6):
        smallest = np.where(amax > np.ldexp(element.max, smallest), smallest + 1, smallest)
    return smallest


def scale_bytes(amax: np.ndarray, element: ElementFormat, rule: str) -> np.ndarray:
    """E8M0 bytes of float64 magnitudes; NaN and Inf give 255, zero gives 0."""
    usable = np.isfinite(amax) & (amax > 0)
    exponents = scale_exponents(np.where(usable, amax, 1.0), element, rule)
    stored = np.where(amax == 0, 0, np.clip(exponents, -127, 127) + 127)
    return np.where(np.isfinite(amax), stored, 255).astype(np.uint8)


def round_to_codes(x: np.ndarray, element: ElementFormat, rounding: str) -> np.ndarray:
    """Codes of finite float64 values, saturated."""
    values = [element.value(code) for code in range(element.max_code + 1)]
    # Above the largest value the grid goes on in its last step.
    table = np.array([*values, 2 * values[-1] - values[-2]])
    magnitude, negative = np.abs(x), np.signbit(x)
    below = np.searchsorted(table, magnitude, side="right") - 1
    above = np.minimum(below + 1, element.max_code + 1)
    middle = (table[below] + table[above]) / 2
    up = {
        "nearest": (magnitude > middle) | ((magnitude == middle) & (below % 2 == 1)),
        "away": magnitude >= middle,
        "toward_zero": np.zeros_like(magnitude, bool),
    }[rounding]
    half = np.where(up, above, below)
    largest = element.max_code + (element.negative_extra & negative)
    half = np.minimum(half, largest)
    if element.kind == "int":
        return np.where(negative, -half, half).astype(np.uint8)
    has_sign = negative & (element.has_negative_zero | (half > 0))
    return np.where(has_sign, half | element.sign_code, half).astype(np.uint8)


def quantize(
    x: np.ndarray,
    format: BlockFormat,
    *,
    axis: int,
    block_size: int,
    scale_rule: str,
    rounding: str = "nearest",
) -> Quantized:
    """Quantize along one axis to a format with E8M0 scales."""
    with np.errstate(invalid="ignore"):
        rows = np.moveaxis(x.astype(np.float64), axis, -1)
    cuts = range(0, rows.shape[-1], block_size)
    blocks = [_block(rows[..., i : i + block_size], format, scale_rule, rounding) for i in cuts]
    joined = (np.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True))
    return Quantized(*(np.moveaxis(part, -1, axis) for part in joined))


def _block(rows: np.ndarray, format: BlockFormat, rule: str, rounding: str):
    """Codes, scales and values of one block of each row."""
    element = format.element
    amax = np.abs(rows).max(axis=-1, keepdims=True)
    scales = scale_bytes(amax, element, rule)
    nan = scales == 255
    scale = np.ldexp(1.0, scales.astype(np.int64) - 127)
    codes = round_to_codes(np.where(nan, 0.0, rows) / scale, element, rounding)
    codes = np.where(nan, np.uint8(element.nan_code or 0), codes)
    decoded = np.array([element.value(code) for code in range(1 << element.bits)])[codes]
    with np.errstate(over="ignore"):
        values = np.where(nan, np.nan, decoded * scale).astype(np.float32)
    return codes, scales, values
