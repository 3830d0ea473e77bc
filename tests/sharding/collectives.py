"""What devices exchange, read from a compiled program."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}
# What an asynchronous one gives is what its end gives.
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(?:-done)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Exchange(NamedTuple):
    """Arrays of one dtype that one kind of collective gives.

    Attributes:
      kind: e.g. `"all-gather"`.
      dtype: XLA's name, e.g. `"u8"`.
      arrays: how many.
      nbytes: their bytes on each device, together.
    """

    kind: str
    dtype: str
    arrays: int
    nbytes: int


def collectives(program: str) -> list[Exchange]:
    """The collectives of an optimized HLO module, by kind and dtype."""
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for result, kind in _OPERATION.findall(program):
        for dtype, shape in _ARRAY.findall(result):
            bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
            counts[kind, dtype] += 1
            sizes[kind, dtype] += math.prod(int(n) for n in shape.split(",") if n) * bits // 8
    return [Exchange(*key, counts[key], sizes[key]) for key in sorted(counts)]


def gathered(program: str, dtype: str | None = None) -> int:
    """Bytes that each device gets from all-gathers, of one dtype or of all."""
    return sum(
        found.nbytes
        for found in collectives(program)
        if found.kind == "all-gather" and dtype in (None, found.dtype)
    )
