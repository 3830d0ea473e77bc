"""Compile kernels for a GPU on a machine without one; ptxas's reports land in a folder.

    export MOSAIC_GPU_DUMP_TO=<existing folder>
    python tests/gpu/compile_for.py sm_90a weights mxfp4
    python tests/gpu/compile_for.py sm_90a groups mxfp4

Weights of a format that are decoded, also of groups of rows. Every entry of the table of tiles is
compiled, with the dtypes that the kernel writes. The files' names end in the count of compiles
before. A process of its own: the CUDA plugin stays loaded, and a failed compile may abort.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import mx_jax
from mx_jax import formats
from mx_jax.backends.pallas_gpu.layouts import PackedWeights, stored_bits, visits
from mx_jax.backends.pallas_gpu.tiles import TILES


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA asks about a GPU that it compiles for.

    Attributes:
      name: e.g. `"H200"`.
      capability: CUDA's.
      cores: streaming multiprocessors.
      shared: KiB of shared memory of one of them, of which a program may have all but one.
      level_2: MiB of cache.
      bandwidth: bytes a second.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    shared: int
    level_2: int
    bandwidth: float

    @property
    def target(self) -> str:
        """What ptxas calls it: from Hopper on with the instructions of this very architecture."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def description(self) -> str:
        """XLA's text form."""
        major, minor = self.capability
        accelerated = self.target.endswith("a")
        feature = "ACCELERATED_FEATURES" if accelerated else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {(self.shared - 1) * 1024}
  shared_memory_per_core: {self.shared * 1024} core_count: {self.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 clock_rate_ghz: 1.98
  memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.level_2 * 2**20}
  device_memory_size: 151397597184
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {feature}
  }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{"a" if accelerated else ""}"
  name: "NVIDIA {self.name}" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {self.name}"
"""


# One of each compute capability that is compiled for, by what ptxas calls it.
GPUS = {
    gpu.target: gpu
    for gpu in (
        Gpu("H200", (9, 0), 132, 228, 50, 4.8e12),
        Gpu("B200", (10, 0), 148, 228, 126, 7.67e12),
        Gpu("B300", (10, 3), 148, 228, 126, 7.67e12),
        Gpu("Thor", (11, 0), 20, 228, 32, 0.273e12),
        Gpu("GeForce RTX 5090", (12, 0), 170, 100, 96, 1.792e12),
        Gpu("GB10", (12, 1), 48, 100, 24, 0.273e12),
    )
}
# So long that every pipeline keeps its loop.
N, K = 256, 65536
GROUPS, ROWS = 4, 1024
DTYPES = ("float32", "bfloat16")
FORMATS = {format.name: format for format in formats.BLOCK_FORMATS}


def compile_on(gpu: Gpu, product: Callable[..., Any], operands: Any) -> Any:
    """A compiled product of operands of these shapes; an error raises, or aborts."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.description(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), operands
    )
    # Without the default device, Mosaic compiles for an architecture of its own choice.
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        jax.default_device(mesh.devices.flat[0]),
    ):
        return jax.jit(product).lower(*placed).compile()


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def shapes(make: Callable[..., Any], shape: tuple[int, ...], format: formats.BlockFormat) -> Any:
    """What `make` gives of a quantized array."""
    return jax.eval_shape(
        lambda x: make(mx_jax.quantize(x, format)), array(*shape, dtype="float32")
    )


def weights(gpu: Gpu, name: str) -> None:
    """bfloat16 by weights of a format."""
    from mx_jax.backends.pallas_gpu import wgmma

    format = FORMATS[name]
    w = shapes(PackedWeights.of, (1, N, K), format)
    for _, tiles in TILES[stored_bits(format.element)]:
        for out_dtype in DTYPES:
            product = functools.partial(wgmma.multiply, tiles=tiles, out_dtype=jnp.dtype(out_dtype))
            compile_on(gpu, product, (array(1, 2 * tiles.m, K), w))


def groups(gpu: Gpu, name: str) -> None:
    """Rows in groups by packed weights of a format."""
    from mx_jax.backends.pallas_gpu import wgmma

    format = FORMATS[name]
    w = shapes(PackedWeights.of, (GROUPS, N, K), format)
    factors, sizes = array(2 * GROUPS, dtype="float32"), array(GROUPS, dtype="int32")
    for _, tiles in TILES[stored_bits(format.element)]:
        for out_dtype in DTYPES:
            multiply = functools.partial(
                wgmma.multiply, tiles=tiles, out_dtype=jnp.dtype(out_dtype)
            )

            def product(x, w, factors, sizes, multiply=multiply, tiles=tiles):
                return multiply(x[None], w, groups=(visits(sizes, ROWS, tiles.m), factors))

            compile_on(gpu, product, (array(ROWS, K), w, factors, sizes))


if __name__ == "__main__":
    target, what, name = sys.argv[1:]
    {"weights": weights, "groups": groups}[what](GPUS[target], name)
