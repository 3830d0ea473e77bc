"""What a program costs on a TPU, by the schedule that libtpu compiles for it, without a TPU.

`cost(function, *shapes, device="v6e")` is an estimate: of each kernel the longer of its bundles by
the clock and its DMAs by the memory's bandwidth; of a program the sum over its kernels, and no less
than all its DMAs, or its products at the peak rate, take.

Bundles stand for cycles but where the MXU runs behind them: on v6e they do, for a bfloat16 product
of 4096^3 is 3 % above its multiply-adds by the MXU's rate; on v5e and tpu7x they fall short, and
the peak rate holds instead. Not seen: a DMA's latency, contention, cold starts.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.tpu_schedule import Execution, Schedule

# The environment of a process that compiles for TPUs: asks no server which TPU this machine is,
# lets two processes load libtpu, and reads no cache, whose programs dump nothing.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# libtpu would write every pass of every kernel: hundreds of MB.
_FLAGS = (
    "--xla_jf_dump_to={}",
    "--xla_jf_dump_hlo_text=true",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=.*final.*(bundles|utilization).*",
    "--xla_jf_emit_annotations=true",
)
# The program that calls all kernels; libtpu's additions to its ends are `<late-...>`.
TOP_LEVEL = "TLP"
_DUMP = re.compile(r"(\d+-(.+))-\d+-final_bundles\.txt")
# Of an optimized module: a computation's head, an instruction, what of it does not tell what it
# computes, names, and computations that it calls.
_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_HLO = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)")
_NOTES = re.compile(r", (?:metadata|backend_config|frontend_attributes|sharding)=.*")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?<=calls=)%([\w.\-]+)")
# Contracted axes of the left operand, and the types.
_DOT = re.compile(
    r"dot_general .*contracting_dims = \[([\d, ]*)\] x .* : "
    r"\(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>"
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
      rates: of products on its MXU over bfloat16's, by the operands' type in StableHLO.
      exact: whether bundles of products on its MXU stand for cycles.
      delay_slots: how many bundles behind a branch execute before it is taken; None: it differs.
    """

    topology: str
    clock: float
    bandwidth: float
    peak: float
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    exact: bool = False
    delay_slots: int | None = 4


_FLOAT8 = {"f8E4M3FN": 2, "f8E5M2": 2}
DEVICES = {
    "v5e": Device("v5e:2x2", 1.5e9, 0.82e12, 197e12, {"i8": 2}),
    "v6e": Device("v6e:2x2", 1.75e9, 1.64e12, 918e12, exact=True),
    "tpu7x": Device("tpu7x:2x2x1", 1.5e9, 3.69e12, 1153e12, _FLOAT8, delay_slots=None),
}


class Kernel(NamedTuple):
    """A kernel of a program, in all its calls.

    Attributes:
      name: of its HLO instruction.
      calls: of it.
      bundles: as executed.
      read: bytes from HBM.
      written: bytes to HBM.
      units: bundles that each unit needs at least: its slots that are filled, over those it has.
      undecided: as in `Execution`.
      endless: as in `Execution`.
    """

    name: str
    calls: int
    bundles: int
    read: int
    written: int
    units: dict[str, float]
    undecided: int
    endless: bool


def kernels(folder: Path, delay_slots: int | None) -> list[Kernel]:
    """Of the program whose dump lies in a folder; the top level, with its DMAs, first.

    Args:
      folder: of the dump.
      delay_slots: as `Device` has them.

    Raises:
      ValueError: there is no program, or a kernel's bundles were not dumped.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        if match := _DUMP.fullmatch(path.name):
            files[match[2]] = path, match[1]
    if TOP_LEVEL not in files:
        raise ValueError(
            f"kernels: libtpu dumped no program: folder={folder}; its flags count where it is "
            "first loaded, and a program from JAX's compilation cache dumps nothing"
        )
    # Of kernels that are the same, libtpu compiles one.
    known = _meanings((folder / f"{files[TOP_LEVEL][1]}-hlo.txt").read_text())
    calls, executed = Counter({TOP_LEVEL: 1}), list[Kernel]()
    names = [TOP_LEVEL]
    for name in names:
        alike = (other for other in files if name in known and known.get(other) == known[name])
        twin = name if name in files else next(alike, "")
        if not twin:
            raise ValueError(f"kernels: libtpu dumped no bundles of kernel={name}")
        path, prefix = files[twin]
        schedule = Schedule(path.read_text(errors="replace"))
        execution = schedule.run(delay_slots, upper=name == TOP_LEVEL)
        units = _units(folder, prefix, [calls[name] * count for count in execution.counts])
        executed.append(_kernel(name, calls[name], execution, units))
        for callee, count in execution.calls.items():
            if not callee.startswith("<"):
                calls[callee] += count * calls[name]
                names += [callee] if callee not in names else []
    return executed


def _meanings(program: str) -> dict[str, str]:
    """The operation, types and layouts of each instruction of a module, without names."""
    lines: dict[str, list[tuple[str, str]]] = {}
    types: dict[str, str] = {}
    body: list[tuple[str, str]] = []
    for line in program.splitlines():
        if header := _COMPUTATION.match(line):
            body = lines.setdefault(header[1], [])
        elif match := _HLO.match(line):
            body.append((match[1], _NOTES.sub("", match[2])))
            types[match[1]] = match[2].partition(" ")[0]

    @functools.cache
    def computed_by(name: str) -> str:
        order: dict[str, str] = {}
        text = "\n".join(
            f"%{result} = {called(operation)}" for result, operation in lines.get(name, ())
        )
        return _NAME.sub(lambda match: order.setdefault(match[1], str(len(order))), text)

    def called(operation: str) -> str:
        return _CALLED.sub(lambda match: f"{{{computed_by(match[1])}}}", operation)

    return {
        result: _NAME.sub(lambda match: types.get(match[1], ""), called(operation))
        for body in lines.values()
        for result, operation in body
    }


def _kernel(name: str, times: int, execution: Execution, units: dict[str, float]) -> Kernel:
    moved = execution.moved.items()
    return Kernel(
        name=name,
        calls=times,
        bundles=times * sum(execution.counts),
        read=times * sum(size for way, size in moved if way.startswith("dma.hbm_to")),
        written=times * sum(size for way, size in moved if way.endswith("to_hbm")),
        units=units,
        undecided=execution.undecided,
        endless=execution.endless,
    )


def _units(folder: Path, prefix: str, counts: Sequence[int]) -> dict[str, float]:
    """Filled slots of each unit as executed, over its slots in a bundle."""
    (path,) = (
        path
        for path in folder.iterdir()
        if path.name.startswith(prefix + "-") and path.name.endswith("per-bundle-utilization.txt")
    )
    _, names, slots, _, *rows = path.read_text().splitlines()
    used = [0] * len(slots.split())
    for count, row in zip(counts, filter(None, rows), strict=True):
        if count:
            used = [
                total + count * int(each) for total, each in zip(used, row.split(), strict=True)
            ]
    capacity = map(int, slots.split())
    return {
        unit.strip(): total / max(most, 1)
        for unit, total, most in zip(names.split(","), used, capacity, strict=True)
    }


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a program.

    Attributes:
      device: its name in `DEVICES`.
      kernels: the top level first.
      operations: as XLA counts them, without Pallas kernels', those of faster products by the
        device's rate of them.
      compile_seconds: from traced to compiled.
    """

    device: str
    kernels: list[Kernel]
    operations: float
    compile_seconds: float

    @property
    def bundles(self) -> int:
        """Executed, by all kernels."""
        return sum(kernel.bundles for kernel in self.kernels)

    @property
    def read(self) -> int:
        """Bytes from HBM."""
        return sum(kernel.read for kernel in self.kernels)

    @property
    def written(self) -> int:
        """Bytes to HBM."""
        return sum(kernel.written for kernel in self.kernels)

    @property
    def microseconds(self) -> float:
        """The estimate."""
        return max(sum(map(self.of_kernel, self.kernels)), *self.busy.values())

    @property
    def busy(self) -> dict[str, float]:
        """Microseconds that each unit needs at least; of the largest the program has no less."""
        device = DEVICES[self.device]
        slots: Counter[str] = Counter()
        for kernel in self.kernels:
            slots.update(kernel.units)
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
        if any(kernel.endless for kernel in self.kernels):
            return "a loop of unknown length"
        undecided = sum(kernel.undecided for kernel in self.kernels if kernel.name != TOP_LEVEL)
        return f"{undecided} branches that data decide" if undecided else ""

    def of_kernel(self, kernel: Kernel) -> float:
        """Microseconds of a kernel. The top level's DMAs run beside the kernels."""
        device = DEVICES[self.device]
        moved = 0 if kernel.name == TOP_LEVEL else kernel.read + kernel.written
        return 1e6 * max(kernel.bundles / device.clock, moved / device.bandwidth)

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
                kernel._asdict()
                | {"units": {u: n for u, n in kernel.units.items() if n > kernel.bundles / 10}}
                for kernel in sorted(self.kernels, key=self.of_kernel, reverse=True)
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
    """The cost of a jitted function on one device.

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
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    begin = time.perf_counter()
    # Pallas asks the mesh in context which TPU it compiles for; traces ask where JAX would run.
    device_of_jax = jax.default_device(mesh.devices.flat[0])
    with device_of_jax, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function).lower(*arguments)
        compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    analysis = {}
    # JAX cannot read every module that libtpu makes.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        analysis = compiled.cost_analysis() or {}
    executed = kernels(folder, DEVICES[device].delay_slots)
    operations = analysis.get("flops", 0.0) * slowness(lowered.as_text(), DEVICES[device].rates)
    return Cost(device, executed, operations, seconds)


def slowness(program: str, rates: Mapping[str, float]) -> float:
    """Time of a program's products by these rates, over that of as many in bfloat16."""
    at_rate, all_of_them = 0.0, 0.0
    for dims, lhs, rhs, result in _DOT.findall(program):
        *shape, dtype = lhs.split("x")
        products = math.prod(int(shape[int(axis)]) for axis in dims.split(",") if axis)
        products *= math.prod(map(int, result.split("x")[:-1]))
        all_of_them += products
        at_rate += products / (rates.get(dtype, 1) if rhs.endswith("x" + dtype) else 1)
    return at_rate / all_of_them if all_of_them else 1.0


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
