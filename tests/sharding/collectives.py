"""Programs on several devices, and what devices exchange, read from a program."""

import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import OPTIONS, compilation_cache_off

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
_LINE = re.compile(
    rf"^ *(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\((.*)$", re.MULTILINE
)
# Groups of devices: listed, a reshaped iota, or axes of a mesh and parts `(before)size` of them.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def draw_all(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Arrays whose products need no rounding: input, kernel and cotangent."""
    rng = np.random.default_rng(0)
    return tuple(draw_few_octaves(rng, shape) for shape in shapes)


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """A mesh of axes of these sizes, all of one kind; four by two devices if none are named."""
    sizes = sizes or {"fsdp": 4, "model": 2}
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(kind,) * len(sizes))


def place(mesh: Mesh, arrays: Any, specs: Any) -> list[Any]:
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in pairs]


def compiled(
    run: Any, mesh: Mesh, arrays: Any, specs: Any, results: tuple[PartitionSpec, ...] | None = None
) -> tuple[str, Any]:
    """The program of operands that are sharded by `specs`, and its results."""
    with jax.set_mesh(mesh):
        operands = place(mesh, arrays, specs)
        wanted = results and tuple(NamedSharding(mesh, spec) for spec in results)
        jitted = jax.jit(run, out_shardings=wanted, compiler_options=OPTIONS)
        program = jitted.lower(*operands).compile()
        return str(program.as_text()), program(*operands)


def check(actual: Any, expected: Any) -> None:
    """A product and its gradients, bit for bit, but for the sign of a zero."""
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise_equal(np.asarray(one) + 0.0, np.asarray(other) + 0.0, what=str(index))


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
        exchange.nbytes
        for exchange in collectives(program)
        if exchange.kind == "all-gather" and dtype in (None, exchange.dtype)
    )


def partitioned(lowered: Any) -> str:
    """A lowered program as each device runs it, before what XLA does for one platform: on CPUs it
    widens bfloat16 to float32, what devices exchange too."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        # What a cache of programs answers is not compiled, and leaves no file.
        with compilation_cache_off():
            lowered.compile(compiler_options=dump | {"xla_backend_optimization_level": 0})
        (path,) = Path(folder).glob("*.after_spmd-partitioning.*.txt")
        return path.read_text()


def received(program: str, devices: int) -> Counter[tuple[str, str]]:
    """Bytes that each device receives, by kind and dtype, as in a ring.

    Of n devices each lacks `(n - 1) / n` of what is gathered or scattered, twice that of what is
    all-reduced. An all-reduce of which each device keeps a slice alone counts as reduce-scatter:
    XLA makes it one on GPUs, and on CPUs never does. What a loop repeats counts once.

    Args:
      program: a module, after partitioning.
      devices: of groups that are not told.
    """
    nbytes = Counter[tuple[str, str]]()
    for name, result, kind, started, rest in _LINE.findall(program):
        n = _group_size(rest) or devices
        arrays = _ARRAY.findall(result)
        if started and kind != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # behind the operands
        part = 1
        if kind == "all-reduce" and _is_sliced(name, program):
            kind, part = "reduce-scatter", n
        for dtype, shape in arrays:
            bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
            whole = math.prod(int(size) for size in shape.split(",") if size) * bits // 8
            nbytes[kind, dtype] += round(_lacking(kind, n) * whole / part)
    return nbytes


def _group_size(attributes: str) -> int | None:
    """How many devices exchange with each other; None: all."""
    if match := _LISTED.search(attributes):
        return match[1].count(",") + 1
    if match := _IOTA.search(attributes):
        return int(match[1])
    if match := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    return None


def _lacking(kind: str, n: int) -> float:
    """What a device receives of n, in parts of what the collective gives it."""
    if kind == "reduce-scatter":
        return n - 1
    if kind == "collective-permute":
        return 1
    return (n - 1) / n * (2 if kind == "all-reduce" else 1)


def _is_sliced(name: str, program: str) -> bool:
    """Whether slices that begin where each device's part does are all that reads an array."""
    uses = re.findall(rf"= \S+ ([\w\-]+)\([^)]*%{re.escape(name)}[,)]", program)
    return bool(uses) and set(uses) == {"dynamic-slice"}
