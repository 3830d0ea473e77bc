"""GPUs: one row for those that have their kernels, and the memory for them, in common."""

import dataclasses

import jax

from mx_jax.backends.pallas_gpu.kernels import MMA, TCGEN05, WGMMA, Kernel
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.backends.target import Target, current_target
from mx_jax.formats import BlockFormat

Capability = tuple[int, int]
_KIB = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Architecture:
    """What the kernels have to know of a GPU.

    Attributes:
      name: as ptxas calls the first of them; files of tiles name it so.
      capabilities: CUDA's compute capabilities that it stands for.
      min_jax: the first version of JAX for which the kernels have been compiled.
      num_sms: of the GPU whose processors tiles are to fill.
      shared_memory: bytes that a program may ask for, a KiB of it left for barriers.
      copies_by_tma: whether kernels write through its tensor memory accelerator.
      converts_float8: whether one instruction converts to float8, on all of these GPUs. Others have
        so much less bandwidth that memory is the bound without; so too of the next.
      compares_pairs: whether one instruction compares two 16-bit integers with two others.
      kernels: those that multiply, the preferred first. The last decodes weights, so it takes every
        product that a kernel takes.

    Raises:
      ValueError: if the last kernel does not decode weights.
    """

    name: str
    capabilities: tuple[Capability, ...]
    min_jax: tuple[int, ...]
    num_sms: int
    shared_memory: int
    copies_by_tma: bool
    converts_float8: bool
    compares_pairs: bool
    kernels: tuple[Kernel, ...]

    def __post_init__(self):
        if not self.kernels or self.decoding.layout is not PackedWeights:
            raise ValueError(
                "Architecture: needs kernels of which the last decodes weights, got "
                f"kernels={self.kernels}"
            )

    def __repr__(self) -> str:
        return self.name

    @property
    def decoding(self) -> Kernel:
        """The kernel that decodes weights."""
        return self.kernels[-1]

    def kernel(self, lhs: BlockFormat | None, rhs: BlockFormat | None) -> Kernel:
        """The first that takes operands of two formats."""
        return next(kernel for kernel in self.kernels if kernel.takes(lhs, rhs))

    def possible(self, kernel: Kernel, code_bits: int, tiles: Tiles) -> bool:
        """Whether a kernel can be compiled with these tiles, and started here."""
        fits = kernel.shared_memory(code_bits, tiles) <= self.shared_memory
        return tiles.k % 128 == 0 and fits and kernel.possible(code_bits, tiles)

    def at_once(self, kernel: Kernel) -> int:
        """Programs in flight that fill the machine once."""
        return kernel.resident * self.num_sms


SM80 = Architecture(
    name="sm80",
    capabilities=((8, 0), (8, 7)),
    min_jax=(0, 12, 0),
    num_sms=108,  # A100
    shared_memory=162 * _KIB,
    copies_by_tma=False,
    converts_float8=False,
    compares_pairs=False,
    kernels=(MMA,),
)
# 12.x has other instructions for block-scaled operands than 10.x, and the memory of 8.9.
SM89 = dataclasses.replace(
    SM80,
    name="sm89",
    capabilities=((8, 6), (8, 9), (12, 0), (12, 1)),
    num_sms=142,  # L40S
    shared_memory=98 * _KIB,
)
SM90 = Architecture(
    name="sm90",
    capabilities=((9, 0),),
    min_jax=(0, 11, 2),
    num_sms=132,  # H100, H200
    shared_memory=226 * _KIB,
    copies_by_tma=True,
    converts_float8=True,
    compares_pairs=True,
    kernels=(WGMMA,),
)
SM100 = dataclasses.replace(
    SM90,
    name="sm100",
    capabilities=((10, 0), (10, 3), (11, 0)),
    min_jax=(0, 12, 0),
    num_sms=148,  # B200
    kernels=(TCGEN05, MMA),
)

ARCHITECTURES: tuple[Architecture, ...] = (SM80, SM89, SM90, SM100)


def register(row: Architecture) -> None:
    """Let the kernels run on more GPUs, or on some of these by another row.

    What was traced before is not traced again.

    Args:
      row: it serves its compute capabilities from now on, whatever served them before.
    """
    global ARCHITECTURES
    ARCHITECTURES = (row, *ARCHITECTURES)


def architecture_of(capability: Capability | None) -> Architecture | None:
    """The row that serves a compute capability."""
    return next((row for row in ARCHITECTURES if capability in row.capabilities), None)


def current_architecture() -> Architecture:
    """The row of the machine that a call is for."""
    capability = current_target(1).compute_capability
    row = architecture_of(capability)
    if row is None:
        raise ValueError(
            f"pallas_gpu: has no kernels for compute_capability={capability}; see "
            "mx_jax.inspect.explain for what takes a call here"
        )
    return row


def capabilities() -> list[Capability]:
    """Compute capabilities with kernels, ascending."""
    return sorted({capability for row in ARCHITECTURES for capability in row.capabilities})


def rejects_machine(
    target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why there is no kernel for a machine, or None."""
    if target.platform != "cuda":
        return f"runs on platform=cuda, got platform={target.platform}"
    row = architecture_of(target.compute_capability)
    if row is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in capabilities())
        got = target.compute_capability
        shown = None if got is None else ".".join(map(str, got))
        return f"has kernels for CUDA compute capability {known}, got {shown}"
    if jax_version < row.min_jax:
        needed, got = (".".join(map(str, version)) for version in (row.min_jax, jax_version))
        return f"needs jax>={needed}, got jax=={got}"
    return None


def rejects_devices(target: Target) -> str | None:
    """Why there is no kernel for a call that `jit` may split between devices, or None.

    XLA does not split a kernel: it would gather its operands, and each device do all of the work.
    """
    if target.num_devices == 1:
        return None
    return (
        "runs on one device or below jax.shard_map: jit does not split a kernel, got "
        f"num_devices={target.num_devices}; only_backend('pallas_gpu') insists"
    )
