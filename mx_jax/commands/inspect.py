"""Print how each tensor of a checkpoint is stored, and statistics of its values.

Its bits, its largest value, the shares of zeros and of codes at their format's limit, the range of
its block scales, and how far it is from a reference, whose tensors are found by name.

examples:

    python -m mx_jax inspect small.safetensors
    python -m mx_jax inspect small.safetensors --reference model.safetensors
    python -m mx_jax inspect model.gguf --only '.*attn.*' --json
"""

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.files import progress_bar
from mx_jax.checkpoint.scales import Plausibility, effective_scales, plausibility
from mx_jax.checkpoint.weights import Stored
from mx_jax.commands.output import Commands, print_table, size, watched
from mx_jax.commands.stream import add_command, stored_bytes, values_of
from mx_jax.inspect.statistics import sqnr_db
from mx_jax.mxarray import MXArray

COLUMNS = (
    *("tensor", "format", "shape", "size", "bits", "amax", "zeros %", "at limit %", "scales"),
    "SQNR dB",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
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
    def cells(self) -> tuple[str, ...]:
        """Those of a row, of `COLUMNS`."""
        scales, looks = self.scales, self.plausibility
        return (
            self.name,
            self.format if self.stored is None else f"{self.format} ({self.stored})",
            "x".join(map(str, self.shape)) or "()",
            size(self.nbytes),
            f"{self.bits:.4g}",
            f"{looks.amax:.4g}",
            f"{looks.zeros * 100:.2f}",
            "-" if scales is None else f"{looks.saturated * 100:.2f}",
            f"2^{min(scales)} .. 2^{max(scales)}" if scales else "-",
            "-" if self.sqnr_db is None else f"{self.sqnr_db:.2f}",
        )

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: no number that JSON does not have."""
        facts: dict[str, Any] = dataclasses.asdict(self) | {"bits": self.bits}
        facts |= facts.pop("plausibility")
        known = {k: not isinstance(x, float) or math.isfinite(x) for k, x in facts.items()}
        return {key: value if known[key] else None for key, value in facts.items()}


def add_to(commands: Commands) -> None:
    """Add the command to a parser's subparsers."""
    help = "print what the tensors of a checkpoint are"
    parser = add_command(commands, run, "inspect", "file", help=help, text=__doc__)
    parser.add_argument(
        "--reference", metavar="FILE", type=Path, help="what the tensors should be, for the SQNR"
    )
    parser.add_argument("--only", metavar="PATTERN", help="tensors whose whole name matches")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    weights = checkpoint.read(options.file, layout=options.layout)
    reference = None if options.reference is None else checkpoint.read(options.reference)
    only = options.only
    try:
        names = [name for name in weights if only is None or re.fullmatch(only, name)]
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"--only {only!r} is no regular expression: {error}") from error
    if not names and only is not None:
        raise ValueError(f"--only {only!r} matches none of the {len(weights)} tensors")
    tensors = []
    with progress_bar("read", stored_bytes(weights, names), watched()) as step:
        for name in names:
            is_compared = reference is not None and name in reference
            exact = reference.stored[name].look() if reference and is_compared else None
            try:
                tensors.append(_facts(name, weights.stored[name], exact))
            except ValueError as error:
                raise ValueError(f"inspect: {name}: {error}") from error
            step(name, weights.stored[name].nbytes)
    if options.json:
        print(json.dumps({"tensors": [facts.as_json() for facts in tensors]}, indent=1))
        return 0
    columns = COLUMNS if reference is not None else COLUMNS[:-1]
    rows = [facts.cells[: len(columns)] for facts in tensors]
    title = f"{len(tensors)} tensors, {size(stored_bytes(weights, names))}"
    print_table(columns, rows, left=columns[:3], title=title)
    for facts in tensors:
        for warning in facts.plausibility.warnings:
            print(f"{facts.name}: {warning}")
    return 0


def _facts(name: str, stored: Stored, reference: object) -> Facts:
    value = stored.look()
    exponents, zero_scales, sqnr = None, 0, None
    if isinstance(value, MXArray):
        # Of what codes are multiplied by; frexp's fraction is in [0.5, 1).
        with np.errstate(divide="ignore"):
            scales = np.abs(effective_scales(value))
        known = scales[np.isfinite(scales) & (scales > 0)]
        counts = zip(*np.unique(np.frexp(known)[1] - 1, return_counts=True), strict=True)
        exponents, zero_scales = {int(e): int(n) for e, n in counts}, int((scales == 0).sum())
    if reference is not None and (values := values_of(value)).dtype.kind == "f":
        sqnr = sqnr_db(values_of(reference), values)
    return Facts(
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
