"""Tiles by name, in a file or as they were measured for a product.

`MX_JAX_GPU_TILES` names a file, as `as_json` writes it, whose entries stand in for those of the
rows in `kernels`. What `python -m mx_jax gpu` measured for a product stands in for either.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mx_jax.backends.base import Config
from mx_jax.backends.pallas_gpu import architecture as machines
from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles, Tuning

# Names a JSON file with a table of tiles, read once.
TILES_VARIABLE = "MX_JAX_GPU_TILES"


class Entry(NamedTuple):
    """What an entry is for.

    Attributes:
      architecture: name of a row, e.g. `"sm90"`.
      kernel: name of one of its kernels, e.g. `"wgmma"`.
      bits: of a code, as it lies in memory.
    """

    architecture: str
    kernel: str
    bits: int

    def __str__(self) -> str:
        return f"{self.architecture} {self.kernel}, {self.bits} bits"


Table = Mapping[Entry, Tuning]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement chose for one product.

    Attributes:
      kernel: name of the one that it is about.
      config: what it chose.
      tuning: the same, given what the kernel would do without; follows from the others.
    """

    kernel: str
    config: Config
    tuning: Callable[[Tuning], Tuning] = dataclasses.field(compare=False)


# In jit's cache key: what was traced for some tiles is not reused for others.
measured = jax.make_user_context(default_value=None)


def tuned(architecture: Architecture, kernel: Kernel, code_bits: int) -> Tuning:
    """Tiles of a kernel on an architecture: what was measured for the product that is traced, if
    anything was; else of the file, if it has an entry; else its own."""
    found = table().get(Entry(architecture.name, kernel.name, code_bits))
    own = kernel.tuning_of(code_bits) if found is None else found
    chosen = measured.value
    return own if chosen is None or chosen.kernel != kernel.name else chosen.tuning(own)


@functools.cache
def table() -> Table:
    """The entries of the file that the environment names; none without one."""
    path = named_file()
    return {} if path is None else read(path)


def named_file() -> Path | None:
    """The file that the environment names."""
    path = os.environ.get(TILES_VARIABLE)
    return None if path is None else Path(path)


def read(path: Path) -> Table:
    """The entries of a file.

    Args:
      path: JSON: `{"sm90 wgmma, 4 bits": {"crossover": 1024, "tiles": [{"rows": 8, "m": 8, "n":
        128, "k": 256, "stages": 5, "splits": 16}, ...]}}`; rows ascend, null for any number.

    Raises:
      ValueError: if the file does not say this, or its tiles are impossible.
    """
    found: dict[Entry, Tuning] = {}
    try:
        entries = [
            (_named(name), _tuning(entry)) for name, entry in json.loads(path.read_text()).items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{TILES_VARIABLE}: needs a table as tuning.table.as_json writes it, got "
            f"path={str(path)!r}: {error!r}"
        ) from None
    for (architecture, kernel, bits), tuning in entries:
        rows = [limit for limit, _ in tuning.tiles]
        bad = [tiles for _, tiles in tuning.tiles if not architecture.possible(kernel, bits, tiles)]
        if bad or rows != sorted(rows) or rows[-1:] != [math.inf]:
            raise ValueError(
                f"{TILES_VARIABLE}: needs possible tiles for ascending rows, up to any number, got "
                f"path={str(path)!r}, architecture={architecture.name!r}, "
                f"kernel={kernel.name!r}, bits={bits}, rows={rows}, impossible={bad}"
            )
        found[Entry(architecture.name, kernel.name, bits)] = tuning
    return found


def _named(name: str) -> tuple[Architecture, Kernel, int]:
    """What an entry is for; before kernels had names, one word said which."""
    words, bits = name.removesuffix(" bits").split(", ")
    named = (
        (row, kernel)
        for row in machines.ARCHITECTURES
        for kernel in reversed(row.kernels)
        if {*words.split()} <= {row.name, kernel.name}
    )
    found = next(named, None)
    if found is None:
        raise ValueError(f"knows no kernel of this name: {name!r}")
    return (*found, int(bits))


def _tuning(entry: dict[str, Any]) -> Tuning:
    tiles = []
    for bucket in entry["tiles"]:
        sizes = {name: size for name, size in bucket.items() if name != "rows"}
        tiles.append((_number(bucket["rows"]), Tiles(**sizes)))
    return Tuning(tiles=tuple(tiles), crossover=_number(entry["crossover"]))


def as_json(found: Table) -> str:
    """What `read` reads."""
    entries = {
        str(entry): {
            "crossover": _finite(tuning.crossover),
            "tiles": [
                {"rows": _finite(rows)} | dataclasses.asdict(tiles) for rows, tiles in tuning.tiles
            ],
        }
        for entry, tuning in found.items()
    }
    return json.dumps(entries, indent=2) + "\n"


def _finite(number: float) -> float | None:
    return None if math.isinf(number) else number


def _number(finite: float | None) -> float:
    return math.inf if finite is None else finite
