"""`pallas_call` below a lowering rule, wherever that stands: jit, shard_map, export."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from mx_jax.backends.target import current_target

# What is compiled for if nothing tells: kernels differ between TPUs in nothing that this decides.
_KIND = "TPU v6 lite"


def call_kernel(
    kernel: Callable[..., None],
    *operands: jax.Array,
    results: Sequence[tuple[tuple[int, ...], Any]],
    interpret: bool,
    parallel: int,
    vmem: int | None = None,
    **options: Any,
) -> list[jax.Array]:
    """What a kernel computes on one TPU.

    Args:
      kernel: of references to blocks of operands and results.
      *operands: arrays.
      results: shape and dtype of each.
      interpret: whether Pallas' interpreter runs it.
      parallel: how many leading dimensions of the grid may run in any order; the others in turn.
      vmem: bytes of it that the kernel may use; None: as many as the compiler allows.
      **options: what else `pallas_call` takes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None and not interpret:
        # Pallas asks the mesh which TPU it is for. Only below shard_map is there one; elsewhere
        # JAX's first device would answer, which may be a CPU.
        kind = current_target().device_kind or _KIND
        device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
        mesh = (
            AbstractMesh((), (), abstract_device=device)
            if mesh.empty
            else mesh.update(abstract_device=device)
        )
    dimensions = len(options.get("grid", ()))
    order = ("parallel",) * parallel + ("arbitrary",) * (dimensions - parallel)
    # Below shard_map results differ between devices as operands do.
    alike = getattr(jax.typeof(operands[0]), "mat", None)
    # Kernels and the indices of their blocks have no 64-bit numbers, whatever the program has.
    with jax.enable_x64(False), jax.sharding.use_abstract_mesh(mesh):
        return pl.pallas_call(
            kernel,
            out_shape=[
                jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=alike)
                for shape, dtype in results
            ],
            compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=vmem),
            interpret=interpret,
            **options,
        )(*operands)
