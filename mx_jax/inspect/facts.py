"""Facts of a checkpoint's tensors: error, saturation, zeros, scales."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mx_jax.checkpoint.files import progress_bar
from mx_jax.checkpoint.scales import Plausibility, effective_scales, plausibility, real_pairs
from mx_jax.checkpoint.weights import Stored, Weights
from mx_jax.inspect.statistics import sqnr_db
from mx_jax.mxarray import MXArray

HEADS = ("tensor", "format", "shape", "size", "bits", "amax", "zeros %", "at limit %", "SQNR dB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Facts of one tensor, plain values that JSON holds."""

    name: str
    stored: str | None  # layout of a quantized weight, else None
    format: str  # of its blocks, or its dtype
    shape: tuple[int, ...]
    nbytes: int  # in the file
    plausibility: Plausibility  # its values, and what is out of the ordinary
    # How many blocks have a scale in `[2^e, 2^(e+1))`, by e; None of plain arrays.
    scales: dict[int, int] | None
    zero_scales: int  # how many blocks have the scale zero
    sqnr_db: float | None  # against the reference, in dB; None without one

    @property
    def bits(self) -> float:
        return self.nbytes * 8 / max(1, math.prod(self.shape))

    @property
    def finite_sqnr_db(self) -> float | None:
        """Of what lost something."""
        sqnr = self.sqnr_db
        return sqnr if sqnr is not None and math.isfinite(sqnr) else None

    @property
    def zeros(self) -> float:
        """The share of values that are zero."""
        return self.plausibility.zeros

    @property
    def stored_as(self) -> str:
        """Its format and, of a quantized weight, its layout."""
        return self.format if self.stored is None else f"{self.format} ({self.stored})"

    def texts(self, missing: str) -> tuple[str, ...]:
        """The cells of a row, of `HEADS`; `missing` where there is no number."""
        return (
            self.name,
            self.stored_as,
            "x".join(map(str, self.shape)) or "()",
            size(self.nbytes),
            f"{self.bits:.4g}",
            f"{self.plausibility.amax:.4g}",
            f"{self.zeros * 100:.2f}",
            missing if self.scales is None else f"{self.plausibility.saturated * 100:.2f}",
            missing if self.sqnr_db is None else f"{self.sqnr_db:.2f}",
        )

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: no number that JSON does not have."""
        facts: dict[str, Any] = dataclasses.asdict(self) | {"bits": self.bits}
        facts |= facts.pop("plausibility")
        known = {k: not isinstance(x, float) or math.isfinite(x) for k, x in facts.items()}
        return {key: value if known[key] else None for key, value in facts.items()}


def facts_of(
    weights: Weights,
    names: Iterable[str],
    reference: Mapping[str, Any] | None = None,
    *,
    operation: str,
    progress: bool = False,
) -> list[TensorFacts]:
    """Facts of tensors of a checkpoint, of which one at a time is in memory."""
    # What the reference does not have is not compared.
    rows, found = {name: weights.stored[name] for name in names}, []
    with progress_bar("read", sum(row.nbytes for row in rows.values()), progress) as step:
        for name, row in rows.items():
            exact = None
            if reference is not None and name in reference:
                whole = isinstance(reference, Weights)
                exact = reference.stored[name].look() if whole else reference[name]
            try:
                found.append(_facts(name, row, exact))
            except ValueError as error:
                text = str(error) if name in str(error) else f"{name}: {error}"
                raise ValueError(f"{operation}: {text}") from error
            step(name, row.nbytes)
    return found


def _facts(name: str, stored: Stored, reference: object) -> TensorFacts:
    value = stored.look()
    exponents, zero_scales, sqnr = None, 0, None
    if isinstance(value, MXArray):
        # Of what codes are multiplied by; frexp's fraction is in [0.5, 1).
        with np.errstate(divide="ignore"):
            scales = np.abs(effective_scales(value))
        known = scales[np.isfinite(scales) & (scales > 0)]
        found = zip(*np.unique(np.frexp(known)[1] - 1, return_counts=True), strict=True)
        exponents, zero_scales = {int(e): int(n) for e, n in found}, int((scales == 0).sum())
    if reference is not None and (values := values_of(value)).dtype.kind == "f":
        sqnr = sqnr_db(values_of(reference), values)
    return TensorFacts(
        name=name,
        stored=stored.layout,
        format=value.format.name if isinstance(value, MXArray) else value.dtype.name,
        shape=tuple(value.shape),
        nbytes=stored.nbytes,
        plausibility=plausibility(value),
        scales=exponents,
        zero_scales=zero_scales,
        sqnr_db=sqnr,
    )


def values_of(value: object) -> np.ndarray:
    """Values on the host: floats in float32 or wider, integers as they are, complex as pairs."""
    if isinstance(value, MXArray):
        return np.asarray(value.dequantize(np.float32))
    array = real_pairs(np.asarray(value))
    if array.dtype.kind in "biu" or array.dtype == np.float64:
        return array
    return array.astype(np.float32)


def size(nbytes: float) -> str:
    """Bytes with a decimal unit, as `12.3 MB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.95 and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    return f"{nbytes:.4g} {units[0]}"
