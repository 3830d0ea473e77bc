"""What XLA makes of the products that `xla_scaled` offers for a GPU; prints JSON.

    python tests/gpu/compile_scaled.py sm_100a [forms]

For each pair of formats that the table has in this version of JAX: how many scaled dots the
optimized product holds, and how many dots and calls of libraries beside them. With `forms`, of two
pairs: each order of axes, few rows, batches and `vmap` too.
Last, of a product that four devices share, and of one below shard_map. A process of its own, as
`compile_for.py` is: an error may abort.
"""

import functools
import json
import os
import re
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends import xla_scaled
from mx_jax.backends.target import Target
from mx_jax.testing.cases import MatmulCase
from tests.gpu.compile_for import GPUS, Gpu, compile_on

FORMATS = {
    xla_scaled.kind_of(format): format
    for format in (formats.MXFP8_E4M3, formats.MXFP8_E5M2, formats.MXFP4, formats.NVFP4)
}
SIZES: dict[str, Any] = dict(m=(256,), n=(512,), k=(1024,), dtype="bfloat16", out_dtype="bfloat16")


def pairs() -> list[tuple[Any, Any]]:
    """Formats of lhs and rhs that the table has for this version of JAX."""
    known = xla_scaled.NATIVE.items()
    return [
        (FORMATS[lhs], FORMATS[rhs])
        for (lhs, rhs), version in known
        if jax.__version_info__ >= version
    ]


def forms_of(pair: tuple[Any, Any]) -> list[MatmulCase]:
    """One product in many forms."""
    lhs, rhs = pair
    changes: list[dict[str, Any]] = [
        *(dict(lhs_k_first=a, rhs_k_first=b) for a in (False, True) for b in (False, True)),
        dict(m=(1,)),
        dict(m=(16,), out_dtype="float32"),
        *(dict(m=(7,), n=(36,), k=(k,)) for k in (96, 384, 2880)),
        dict(batch=(2, 3), m=(64,), n=(128,), k=(2, 128)),
        dict(batch=(3,), rhs_k_first=True, m=(4, 16), n=(8, 16), k=(256,)),
    ]
    return [MatmulCase(lhs=lhs, rhs=rhs, **SIZES | each) for each in changes]


def compiled(
    gpu: Gpu, case: MatmulCase, batched: tuple[int | None, int | None] | None = None
) -> Any:
    """The text of a product, or of one under `vmap`."""
    target = Target(platform="cuda", compute_capability=gpu.capability)
    assert xla_scaled.XLA_SCALED.rejects(case.call, target) is None, case
    operands = case.operands(np.random.default_rng(0))

    product: Any = functools.partial(xla_scaled.XLA_SCALED.run, case.call)
    if batched is not None:
        operands = tuple(
            x if axis is None else jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), x)
            for x, axis in zip(operands, batched, strict=True)
        )
        product = jax.vmap(product, batched)
    return compile_on(gpu, product, operands).as_text()


def seen(text: str) -> dict[str, int]:
    """How many scaled dots there are, and how many dots and library calls beside them."""
    return {
        "scaled": len(re.findall(r" scaled-dot\(", text)),
        "other": len(re.findall(r" dot\(|custom_call_target=", text)),
    }


def on_four(gpu: Gpu, *, by_shard_map: bool) -> str:
    """A product whose rows lie on four devices."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.description(), topology="4x1x1"
    )
    mesh = topologies.make_mesh(topology, (4,), ("x",))
    rows = PartitionSpec("x")
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((256, 1024), rows), ((1024, 512), PartitionSpec()))
    )

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe=recipes.mxfp8())

    if by_shard_map:
        product = jax.shard_map(
            product, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
        )
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        jax.default_device(mesh.devices.flat[0]),
    ):
        return str(jax.jit(product).lower(x, w).compile().as_text())


if __name__ == "__main__":
    gpu, products = GPUS[sys.argv[1]], {}
    known = pairs()
    for pair in known:
        case = MatmulCase(lhs=pair[0], rhs=pair[1], **SIZES)
        products[str(case)] = seen(compiled(gpu, case))
    if "forms" in sys.argv[2:]:
        for pair in (known[0], known[-1]):
            for case in forms_of(pair):
                products[str(case)] = seen(compiled(gpu, case))
            case = MatmulCase(lhs=pair[0], rhs=pair[1], **SIZES)
            for batched in ((0, None), (None, 0), (0, 0)):
                products[f"{case} under vmap {batched}"] = seen(compiled(gpu, case, batched))
    several = [seen(on_four(gpu, by_shard_map=way)) for way in (False, True)]
    print(json.dumps({"products": products, "four devices": several}))
