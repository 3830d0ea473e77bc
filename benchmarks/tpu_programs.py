"""What a program costs on a TPU, by the schedule that libtpu compiles for it, without a TPU.

`cost(function, *shapes, device="v6e")` is an estimate: of each kernel the longer of its bundles by
the clock and its DMAs by the memory's bandwidth; of a program the sum over its kernels, and no less
than all its DMAs, or its products at the peak rate, take. `PROGRAMS` are those that
`benchmarks.tpu` makes its table of.

Bundles stand for cycles but where the MXU runs behind them: on v6e they do, for a bfloat16 product
of 4096^3 is 3 % above its multiply-adds by the MXU's rate; on v5e and tpu7x they fall short, and
the peak rate holds instead. Not seen: a DMA's latency, contention, cold starts.
"""

import dataclasses
import functools
import importlib.util
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mx_jax
from benchmarks.tpu_schedule import TOP_LEVEL, Kernel, kernels
from mx_jax import recipes

# What the environment of a process that compiles for TPUs has. Asks no server which TPU this
# machine is, lets two processes load libtpu, and compiles what a cache would have: that dumps none.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# libtpu would write every pass of every kernel: hundreds of MB.
_FLAGS = (
    "--xla_jf_dump_to={}",
    "--xla_jf_dump_hlo_text=false",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=.*final.*(bundles|utilization).*",
    "--xla_jf_emit_annotations=true",
)
HBM = "HBM"
# As libtpu's dump names the matrix unit's products.
_MXU = "MATMUL"


@dataclasses.dataclass(frozen=True)
class Device:
    """A TPU as JAX has it, a core of tpu7x's two.

    Attributes:
      topology: as libtpu names it, of several.
      clock: cycles a second. Of v6e it follows from its peak, at 262,144 multiply-adds a cycle; of
        tpu7x it is a guess: compare bundles.
      bandwidth: of its HBM, bytes a second.
      peak: bfloat16 operations a second.
      exact: whether bundles of products on its MXU stand for cycles.
    """

    topology: str
    clock: float
    bandwidth: float
    peak: float
    exact: bool = False


DEVICES = {
    "v5e": Device("v5e:2x2", 1.5e9, 0.82e12, 197e12),
    "v6e": Device("v6e:2x2", 1.75e9, 1.64e12, 918e12, exact=True),
    "tpu7x": Device("tpu7x:2x2x1", 1.5e9, 3.69e12, 1153e12),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program costs.

    Attributes:
      device: its name in `DEVICES`.
      kernels: the top level first.
      operations: as XLA counts them, without Pallas kernels'.
      compile_seconds: from traced to compiled.
    """

    device: str
    kernels: list[Kernel]
    operations: float
    compile_seconds: float

    @property
    def bundles(self) -> int:
        """Executed, by all kernels."""
        return sum(own.bundles for own in self.kernels)

    @property
    def read(self) -> int:
        """Bytes from HBM."""
        return sum(own.read for own in self.kernels)

    @property
    def written(self) -> int:
        """Bytes to HBM."""
        return sum(own.written for own in self.kernels)

    @property
    def microseconds(self) -> float:
        """The estimate."""
        return max(sum(map(self.of_kernel, self.kernels)), *self.busy.values())

    @property
    def busy(self) -> dict[str, float]:
        """Microseconds that each unit needs at least; of the largest the program has no less."""
        device = DEVICES[self.device]
        slots: Counter[str] = Counter()
        for own in self.kernels:
            slots.update(own.units)
        busy = {unit: 1e6 * count / device.clock for unit, count in slots.items()}
        if not device.exact:
            busy[_MXU] = max(busy.get(_MXU, 0), 1e6 * self.operations / device.peak)
        return busy | {HBM: 1e6 * (self.read + self.written) / device.bandwidth}

    @property
    def unit(self) -> tuple[str, float]:
        """The unit that works most, and for which part of the time."""
        busy = self.busy
        unit = max(busy, key=lambda name: busy[name])
        return unit, busy[unit] / self.microseconds

    @property
    def doubt(self) -> str:
        """Why the counts may be wrong, or nothing."""
        if any(own.endless for own in self.kernels):
            return "a loop of unknown length"
        undecided = sum(own.undecided for own in self.kernels if own.name != TOP_LEVEL)
        return f"{undecided} branches that data decide" if undecided else ""

    def of_kernel(self, own: Kernel) -> float:
        """Microseconds of a kernel. The top level's DMAs run beside the kernels."""
        device = DEVICES[self.device]
        moved = 0 if own.name == TOP_LEVEL else own.read + own.written
        return 1e6 * max(own.bundles / device.clock, moved / device.bandwidth)

    def as_json(self) -> dict[str, Any]:
        """For programs; kernels by time, their units alone that work a tenth of it."""
        unit, share = self.unit
        return {
            "device": self.device,
            "microseconds": self.microseconds,
            "bundles": self.bundles,
            "read": self.read,
            "written": self.written,
            "unit": unit,
            "share": share,
            "compile_seconds": self.compile_seconds,
            "doubt": self.doubt,
            "kernels": [
                own._asdict()
                | {"units": {u: n for u, n in own.units.items() if n > own.bundles / 10}}
                for own in sorted(self.kernels, key=self.of_kernel, reverse=True)
            ],
        }


def require_libtpu(operation: str) -> None:
    """Raises ModuleNotFoundError where there is none."""
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            f"{operation}: needs libtpu, which compiles for TPUs on any machine: "
            'pip install "mx_jax[tpu-compile]"'
        )


def cost(function: Callable[..., Any], *shapes: Any, device: str) -> Cost:
    """What a function costs on one device, jitted.

    For a process that has loaded libtpu for nothing else, with `ENVIRONMENT`.

    Args:
      function: of arrays.
      *shapes: its arguments, as trees of `jax.ShapeDtypeStruct`.
      device: a name of `DEVICES`.

    Raises:
      ModuleNotFoundError: there is no libtpu.
      ValueError: libtpu dumped no program.
    """
    require_libtpu("cost")
    folder = _dump()
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    mesh = Mesh(_devices(DEVICES[device].topology)[:1], ("one",))
    sharding = NamedSharding(mesh, PartitionSpec())
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    begin = time.perf_counter()
    # Pallas asks the mesh in context which TPU it compiles for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(function).lower(*own).compile()
    seconds = time.perf_counter() - begin
    operations = (compiled.cost_analysis() or {}).get("flops", 0.0)
    return Cost(device, kernels(folder), operations, seconds)


@functools.cache
def _dump() -> Path:
    """Where libtpu dumps to, as long as the process lives; before it is first loaded."""
    folder = tempfile.TemporaryDirectory(prefix="mx_jax_tpu_")
    _KEPT.append(folder)
    flags = " ".join(_FLAGS).format(folder.name)
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _devices(topology: str) -> list[Any]:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


# Programs ---------------------------------------------------------------------------------------


class Program(NamedTuple):
    """What is compiled.

    Attributes:
      title: what the table calls it.
      function: of arrays.
      shapes: its arguments.
    """

    title: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


SIDE, WIDE = 4096, 8192
TOKENS, FEATURES, UNITS = 2048, 2048, 4096
RECIPES = ("mxfp8", "float8_rowwise", "float8_tensorwise")
WEIGHTS = ("mxfp4", "mxfp8")
ROWS = (1, 16)


def step(recipe: str | None) -> Program:
    """The step of a Dense layer: output and both gradients; in bfloat16 if there is no recipe."""

    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        multiply = jnp.matmul
        if recipe is not None:
            multiply = functools.partial(mx_jax.matmul, recipe=recipe)
        y, pullback = jax.vjp(multiply, x, w)
        return y, *pullback(g)

    title = f"step of Dense {TOKENS} x {FEATURES} -> {UNITS}, {recipe or 'bfloat16'}"
    return Program(
        title, run, (array(TOKENS, FEATURES), array(FEATURES, UNITS), array(TOKENS, UNITS))
    )


def cast(axis: int) -> Program:
    """Of bfloat16 to MXFP8."""
    function = functools.partial(mx_jax.quantize, format="mxfp8", axis=axis)
    return Program(f"cast of {SIDE} x {SIDE} to MXFP8, axis {axis}", function, (array(SIDE, SIDE),))


def dequantized(axis: int) -> Program:
    """MXFP8 to bfloat16."""
    codes = jax.eval_shape(cast(axis).function, array(SIDE, SIDE))
    title = f"dequantize of {SIDE} x {SIDE} in MXFP8, axis {axis}"
    return Program(title, lambda x: x.dequantize(jnp.bfloat16), (codes,))


def weights(format: str | None, rows: int) -> Program:
    """Few rows of bfloat16 by stored weights; in bfloat16 if there is no format."""
    title = f"{rows} row{'s' * (rows > 1)} by {WIDE} x {WIDE} weights, {format or 'bfloat16'}"
    x, w = array(rows, WIDE), array(WIDE, WIDE)
    if format is None:
        return Program(title, jnp.matmul, (x, w))
    recipe = recipes.weight_only(format)
    stored = jax.eval_shape(functools.partial(mx_jax.quantize, format=format, axis=0), w)
    return Program(title, functools.partial(mx_jax.matmul, recipe=recipe), (x, stored))


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "product": lambda: Program(
        f"bfloat16 product {SIDE}^3", jnp.matmul, (array(SIDE, SIDE), array(SIDE, SIDE))
    ),
    "copy": lambda: Program(
        "copy of 256 MiB, times two", lambda x: x * 2, (array(SIDE, 8 * SIDE),)
    ),
    **{
        f"step-{recipe or 'bfloat16'}": functools.partial(step, recipe)
        for recipe in (None, *RECIPES)
    },
    **{f"cast{axis}": functools.partial(cast, axis) for axis in (-1, 0)},
    **{f"dequantize{axis}": functools.partial(dequantized, axis) for axis in (-1, 0)},
    **{
        f"weights-{format or 'bfloat16'}-{rows}": functools.partial(weights, format, rows)
        for rows in ROWS
        for format in (None, *WEIGHTS)
    },
}
