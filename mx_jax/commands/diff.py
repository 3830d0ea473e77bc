"""Compare the tensors of two checkpoints by name.

Whether they are the same to the bit, the same values stored in another way, or how far apart. The
exit status is 0 if all values are the same, 1 if not, 2 if a file cannot be read.

examples:

    python -m mx_jax diff model.safetensors small.safetensors
    python -m mx_jax diff a.safetensors b.safetensors --json
"""

import argparse
import dataclasses
import json
import math

import jax
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.files import progress_bar
from mx_jax.commands.output import Commands, print_table, watched
from mx_jax.commands.stream import add_command, stored_bytes, values_of
from mx_jax.mxarray import MXArray

Tensor = MXArray | jax.Array | np.ndarray
# Values that are compared at once.
_CHUNK = 1 << 18
_COLUMNS = ("tensor", "A", "B", "", "SQNR dB", "max error", "values", "codes", "scales")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a tensor of B is from that of A."""

    name: str
    # Of both: of blocks, or dtypes; None where it is missing.
    formats: tuple[str | None, str | None]
    # `"same"`, `"same values"`, `"differs"`, `"other shape"`, `"only in A"`, `"only in B"`.
    result: str
    # Of B with A as what is exact; None where nothing can be compared, or nothing differs.
    sqnr_db: float | None = None
    max_error: float | None = None  # the largest absolute difference
    values: int | None = None  # how many values differ
    # How many codes do, where both have the same format and blocks; else None.
    codes: int | None = None
    scales: int | None = None  # how many block scales do, likewise

    @property
    def equal(self) -> bool:
        return self.result in ("same", "same values")


def add_to(commands: Commands) -> None:
    """Add the command to a parser's subparsers."""
    help = "compare two checkpoints tensor by tensor"
    parser = add_command(commands, run, "diff", "a", "b", help=help, text=__doc__)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--all", action="store_true", help="list what is the same too")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    a = checkpoint.read(options.a, layout=options.layout)
    b = checkpoint.read(options.b, layout=options.layout)
    compared = []
    both = [name for name in a if name in b]
    with progress_bar("read", stored_bytes(a, both) + stored_bytes(b, both), watched()) as step:
        for name in dict.fromkeys((*a, *b)):
            x, y = (each.stored[name].look() if name in each else None for each in (a, b))
            if x is None or y is None:
                formats, where = (_format(x), _format(y)), "A" if y is None else "B"
                compared.append(Difference(name=name, formats=formats, result=f"only in {where}"))
            else:
                compared.append(difference(name, x, y))
                step(name, a.stored[name].nbytes + b.stored[name].nbytes)
    differing = [each for each in compared if not each.equal]
    if options.json:
        rows = [dataclasses.asdict(each) for each in compared]
        print(json.dumps({"equal": not differing, "tensors": rows}, indent=1))
    else:
        if shown := compared if options.all else differing:
            print_table(_COLUMNS, map(_row, shown), left=_COLUMNS[:4])
        many = f" tensors, {len(differing)} of them differ" if differing else " the same"
        print(f"{len(compared)}{many}")
    return 1 if differing else 0


def difference(name: str, a: Tensor, b: Tensor) -> Difference:
    """Compare two tensors, arrays or MXArrays; NaN is the same as NaN."""
    formats = (_format(a), _format(b))
    if tuple(a.shape) != tuple(b.shape):
        return Difference(name=name, formats=formats, result="other shape")
    values, largest, sqnr_db = _apart(values_of(a), values_of(b))
    codes = scales = None
    if (
        isinstance(a, MXArray)
        and isinstance(b, MXArray)
        and (a.format, a.blocks) == (b.format, b.blocks)
    ):
        codes, scales = _unequal_bits(a.codes, b.codes), _unequal_bits(a.scales, b.scales)
        scales += 0 if a.tensor_scale is None else _unequal_bits(a.tensor_scale, b.tensor_scale)
    if not values:
        if isinstance(a, MXArray) or isinstance(b, MXArray):
            alike = codes == scales == 0
        else:
            alike = formats[0] == formats[1] and not _unequal_bits(a, b)
        result = "same" if alike else "same values"
        return Difference(name=name, formats=formats, result=result, values=0)
    return Difference(
        name=name,
        formats=formats,
        result="differs",
        sqnr_db=sqnr_db if math.isfinite(sqnr_db) else None,
        max_error=largest if math.isfinite(largest) else None,
        values=values,
        codes=codes,
        scales=scales,
    )


def _apart(x: np.ndarray, y: np.ndarray) -> tuple[int, float, float]:
    """Of two arrays how many values differ, the largest difference, and `inspect.sqnr_db`."""
    # Some values at a time: in float64 all would be many bytes.
    values, largest, signal, noise = 0, np.float64(0), np.float64(0), np.float64(0)
    x, y = x.reshape(-1), y.reshape(-1)
    # On most machines exact for integers of 64 bits.
    wide = np.longdouble if {"i8", "u8"} & {x.dtype.str[1:], y.dtype.str[1:]} else np.float64
    for at in range(0, x.size, _CHUNK):
        one, other = x[at : at + _CHUNK], y[at : at + _CHUNK]
        unequal = ~_equal(one, other)
        values += int(unequal.sum())
        exact, actual = one.astype(wide), other.astype(wide)
        with np.errstate(invalid="ignore", over="ignore"):
            error = exact - actual
            largest = np.maximum(largest, np.max(np.abs(error[unequal]), initial=0))
            signal, noise = signal + np.sum(np.square(exact)), noise + np.sum(np.square(error))
    with np.errstate(divide="ignore", invalid="ignore"):
        return values, float(largest), float(10 * np.log10(signal / noise))


def _equal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where numbers are the same, as real numbers; NaN is the same as NaN."""
    if x.dtype.kind == "f" and y.dtype.kind in "iu":
        x, y = y, x
    if x.dtype.kind not in "iu" or y.dtype.kind != "f":
        return (x == y) | ((x != x) & (y != y))
    # NumPy would round integers of 64 bits to floats. A float that is an integer becomes one.
    facts = np.iinfo(x.dtype)
    whole = (y >= float(facts.min)) & (y < 2.0 ** (facts.bits - (x.dtype.kind == "i")))
    whole &= np.floor(y) == y
    return whole & (np.where(whole, y, 0).astype(x.dtype) == x)


def _unequal_bits(a: object, b: object) -> int:
    """How many numbers of two arrays of one dtype are not the same bits."""
    x, y = (np.ascontiguousarray(each) for each in (a, b))
    raw = f"u{x.dtype.itemsize}"
    return int((x.view(raw) != y.view(raw)).sum())


def _format(x: Tensor | None) -> str | None:
    if x is None:
        return None
    return x.format.name if isinstance(x, MXArray) else x.dtype.name


def _row(each: Difference) -> tuple[str, ...]:
    def shown(number: float | None, form: str = "") -> str:
        return "-" if number is None else format(number, form)

    formats = (text or "-" for text in each.formats)
    errors = shown(each.sqnr_db, ".2f"), shown(each.max_error, ".4g")
    counts = map(shown, (each.values, each.codes, each.scales))
    return (each.name, *formats, each.result, *errors, *counts)
