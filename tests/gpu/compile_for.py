"""Compile the kernel for a Hopper GPU on a machine without one; ptxas's reports land in a folder.

    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_for.py mxfp4

A process of its own: the CUDA plugin stays loaded, and a failed compile may abort. Every entry of
the tuning table is compiled, with both dtypes that the kernel writes.
"""

import functools
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import mx_jax
from mx_jax import formats
from mx_jax.backends.pallas_gpu import kernel_sm90
from mx_jax.backends.pallas_gpu.tuning import TILES, Tiles
from mx_jax.backends.pallas_gpu.weights import pack, stored_bits

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


N, K = 256, 4096


def compile_product(format: formats.BlockFormat, tiles: Tiles, out_dtype: str) -> None:
    """Compile one kernel; an error of Mosaic or ptxas raises, or aborts."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    product = functools.partial(
        kernel_sm90.matmul, format=format, batch=1, tiles=tiles, out_dtype=out_dtype
    )
    weights = jax.eval_shape(lambda x: pack(mx_jax.quantize(x, format)), jnp.ones((1, N, K)))
    operands = (
        jax.ShapeDtypeStruct((2 * tiles.m, K), jnp.bfloat16, sharding=place),
        jax.ShapeDtypeStruct(weights.codes.shape[1:], jnp.int32, sharding=place),
        jax.ShapeDtypeStruct(weights.scales.shape[1:], jnp.int32, sharding=place),
    )
    device = mesh.devices.flat[0]
    # Without the default device, Mosaic compiles for an architecture of its own choice.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(device):
        jax.jit(product).lower(*operands).compile()


def main() -> None:
    format = next(format for format in formats.BLOCK_FORMATS if format.name == sys.argv[1])
    for _, tiles in TILES["sm90", stored_bits(format.element)]:
        for out_dtype in ("float32", "bfloat16"):
            compile_product(format, tiles, out_dtype)


if __name__ == "__main__":
    main()
