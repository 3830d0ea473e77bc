"""Compile kernels for a GPU on a machine without one; ptxas's reports land in a folder.

    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_for.py sm90 mxfp4
    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_for.py sm100 mxfp8_e4m3 mxfp8_e5m2

A process of its own: the CUDA plugin stays loaded, and a failed compile may abort. Every entry of
the tuning table is compiled, with both dtypes that the kernel writes. The files' names end in the
count of compiles before.
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
from mx_jax.backends.pallas_gpu import matmul, scaled, tuning
from mx_jax.backends.pallas_gpu.weights import pack, stored_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA asks about a GPU that it compiles for."""

    name: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    shared_memory: int
    level_2: int
    bandwidth: float

    def description(self) -> str:
        """XLA's text form."""
        major, minor = self.capability
        feature = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_memory - 1024}
  shared_memory_per_core: {self.shared_memory} core_count: {self.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 clock_rate_ghz: 1.98
  memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.level_2}
  device_memory_size: 151397597184
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {feature}
  }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{"a" if self.accelerated else ""}"
  name: "NVIDIA {self.name}" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {self.name}"
"""


GPUS = {
    "sm80": Gpu(
        name="A100",
        capability=(8, 0),
        accelerated=False,
        cores=108,
        shared_memory=167936,
        level_2=41943040,
        bandwidth=2.039e12,
    ),
    "sm89": Gpu(
        name="L40S",
        capability=(8, 9),
        accelerated=False,
        cores=142,
        shared_memory=102400,
        level_2=100663296,
        bandwidth=0.864e12,
    ),
    "sm90": Gpu(
        name="H200",
        capability=(9, 0),
        accelerated=True,
        cores=132,
        shared_memory=233472,
        level_2=52428800,
        bandwidth=4.8e12,
    ),
    "sm100": Gpu(
        name="B200",
        capability=(10, 0),
        accelerated=True,
        cores=148,
        shared_memory=233472,
        level_2=132644864,
        bandwidth=7.67e12,
    ),
}
# So long that every pipeline keeps its loop.
N, K = 256, 65536
FORMATS = {format.name: format for format in formats.BLOCK_FORMATS}


def compile_on(gpu: Gpu, product: Callable[..., Any], operands: Any) -> Any:
    """Compile a product of operands of these shapes; an error raises, or aborts."""
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


def shapes(make: Callable[..., Any], shape: tuple[int, ...], format: formats.BlockFormat) -> Any:
    """What `make` gives of a quantized array."""
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(lambda x: make(mx_jax.quantize(x, format)), array)


def compile_weights(architecture: str, name: str) -> None:
    """bfloat16 by weights of a format."""
    kernel = matmul.kernel(architecture)
    weights = shapes(pack, (1, N, K), FORMATS[name])
    for _, tiles in tuning.TILES[architecture, stored_bits(FORMATS[name].element)]:
        for out_dtype in ("float32", "bfloat16"):
            x = jax.ShapeDtypeStruct((2 * tiles.m, K), jnp.bfloat16)
            product = functools.partial(
                kernel.matmul, format=FORMATS[name], batch=1, tiles=tiles, out_dtype=out_dtype
            )
            flat = [
                jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in (weights.codes, weights.scales)
            ]
            compile_on(GPUS[architecture], product, (x, *flat))


def compile_scaled(architecture: str, lhs: str, rhs: str) -> None:
    """Two block-scaled operands."""
    from mx_jax.backends.pallas_gpu import kernel_sm100

    left, right = (shapes(scaled.lay_out, (1, N, K), FORMATS[name]) for name in (lhs, rhs))
    for _, tiles in tuning.TILES[architecture, FORMATS[lhs].element.bits]:
        for out_dtype in ("float32", "bfloat16"):
            product = functools.partial(
                kernel_sm100.matmul,
                block=FORMATS[lhs].block[1],
                batch=1,
                tiles=tiles,
                out_dtype=out_dtype,
            )
            operands = (left.codes, right.codes, left.scales, right.scales)
            compile_on(GPUS[architecture], product, operands)


if __name__ == "__main__":
    compile_formats = compile_scaled if sys.argv[1] == "sm100" else compile_weights
    compile_formats(*sys.argv[1:])
