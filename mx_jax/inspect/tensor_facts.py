"""What is said of a checkpoint's tensors: how each is stored, its values, scales and error."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mx_jax.checkpoint.files import progress_bar
from mx_jax.checkpoint.scales import Plausibility, effective_scales, plausibility
from mx_jax.checkpoint.weights import Stored, Weights
from mx_jax.inspect.error import sqnr_db
from mx_jax.mxarray import MXArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Facts of one tensor, plain values that JSON holds.

    Attributes:
      name: of the tensor.
      stored: layout of a quantized weight, else None.
      format: of its blocks, or its dtype.
      shape: of the tensor.
      nbytes: in the file.
      look: its values, and what is out of the ordinary.
      scales: how many blocks have a scale in `[2^e, 2^(e+1))`, by e; None of plain arrays.
      zero_scales: how many blocks have the scale zero.
      sqnr_db: against the reference, in dB; None without one.
    """

    name: str
    stored: str | None
    format: str
    shape: tuple[int, ...]
    nbytes: int
    look: Plausibility
    scales: dict[int, int] | None
    zero_scales: int
    sqnr_db: float | None

    @property
    def bits(self) -> float:
        """Of an element, its share of the scales included."""
        return self.nbytes * 8 / max(1, math.prod(self.shape))

    @property
    def kept_as(self) -> str:
        """Its format and, of a quantized weight, its layout."""
        return self.format if self.stored is None else f"{self.format} ({self.stored})"

    def texts(self, missing: str) -> tuple[str, ...]:
        """As rows show it: name, format, shape, bytes, bits, amax, per cents of zeros and saturated
        codes, SQNR; `missing` where there is none.
        """
        return (
            self.name,
            self.kept_as,
            "x".join(map(str, self.shape)) or "()",
            size(self.nbytes),
            f"{self.bits:.4g}",
            f"{self.look.amax:.4g}",
            f"{self.look.zeros * 100:.2f}",
            missing if self.scales is None else f"{self.look.saturated * 100:.2f}",
            missing if self.sqnr_db is None else f"{self.sqnr_db:.2f}",
        )

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: no number that JSON does not have."""
        facts: dict[str, Any] = dataclasses.asdict(self) | {"bits": self.bits}
        facts |= facts.pop("look")
        return {key: _finite(value) for key, value in facts.items()}


def facts_of(
    weights: Weights,
    names: Iterable[str],
    reference: Mapping[str, Any] | None = None,
    *,
    operation: str,
    progress: bool = False,
) -> list[TensorFacts]:
    """Look at tensors of a checkpoint, of which one at a time is in memory.

    Args:
      weights: the checkpoint.
      names: of its tensors.
      reference: what they should be, by name. What it does not have is not compared, nor are
        weights for rotated inputs, whose values are others on purpose.
      operation: that asks, for errors.
      progress: whether to show a bar on stderr.

    Raises:
      ValueError: a reference of another shape, or a damaged tensor.
    """
    rows, found = {name: weights.stored[name] for name in names}, []
    with progress_bar("read", sum(row.nbytes for row in rows.values()), progress) as step:
        for name, row in rows.items():
            exact = None
            if reference is not None and name in reference and row.rotation is None:
                whole = isinstance(reference, Weights)
                exact = reference.stored[name].look() if whole else reference[name]
            try:
                found.append(tensor_facts(name, row, row.look(), exact))
            except ValueError as error:
                text = str(error) if name in str(error) else f"{name}: {error}"
                raise ValueError(f"{operation}: {text}") from error
            step(name, row.nbytes)
    return found


def tensor_facts(name: str, stored: Stored, value: Any, reference: Any = None) -> TensorFacts:
    """Facts of one tensor, an array or an MXArray.

    Raises:
      ValueError: a reference of another shape.
    """
    exponents, zero_scales = (None, 0)
    if isinstance(value, MXArray):
        exponents, zero_scales = _exponents(value)
    sqnr = None
    if reference is not None and (values := values_of(value)).dtype.kind == "f":
        sqnr = sqnr_db(values_of(reference), values)
    return TensorFacts(
        name=name,
        stored=stored.layout,
        format=value.format.name if isinstance(value, MXArray) else value.dtype.name,
        shape=tuple(value.shape),
        nbytes=stored.nbytes,
        look=plausibility(value),
        scales=exponents,
        zero_scales=zero_scales,
        sqnr_db=sqnr,
    )


def values_of(value: Any) -> np.ndarray:
    """Values on the host: floats in float32 or wider, integers as they are."""
    if isinstance(value, MXArray):
        return np.asarray(value.dequantize(np.float32))
    array = np.asarray(value)
    if array.dtype.kind in "biu" or array.dtype == np.float64:
        return array
    return array.astype(np.float32)


def size(nbytes: float) -> str:
    """Bytes with a unit, as `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def _exponents(x: MXArray) -> tuple[dict[int, int], int]:
    """Blocks by the exponent of what their codes are multiplied by, and those without one."""
    with np.errstate(divide="ignore"):
        scales = np.abs(effective_scales(x))
    known = scales[np.isfinite(scales) & (scales > 0)]
    # frexp's fraction is in [0.5, 1).
    exponents, counts = np.unique(np.frexp(known)[1] - 1, return_counts=True)
    found = {int(e): int(n) for e, n in zip(exponents, counts, strict=True)}
    return found, int((scales == 0).sum())


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
