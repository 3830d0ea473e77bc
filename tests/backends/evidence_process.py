"""One process of a job: which program it traces, where rows of its own cache would choose another.

    python -m tests.backends.evidence_process PROCESS COUNT PORT

prints, as JSON, how many processes there are, which backend takes a product on a GPU, a hash of the
program, and its result for rows that are spread over all processes.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax.backends import select
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.evidence import Row, Work, driver, source_of
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import BACKENDS, recording
from tests.backends.altered import altered

KIND = "NVIDIA H200"
ROWS, N, K = 2, 8, 64


def _one_more(lhs, rhs, call):
    return REFERENCE.run(call, lhs, rhs) + 1


PLANTED = altered(
    dataclasses.replace(REFERENCE, name="planted", source=lambda: (Path(__file__),)),
    MatmulCall,
    _one_more,
)


def traced() -> tuple[MatmulCall, str]:
    """The product's call as backends see it, and the name of the one that takes it."""
    x, w = jnp.zeros((ROWS, K), jnp.bfloat16), jnp.zeros((K, N), jnp.bfloat16)
    with recording() as recorder:
        jax.eval_shape(product, x, w)
    (own,) = [own for own in recorder.selections if isinstance(own.call, MatmulCall)]
    assert isinstance(own.call, MatmulCall) and own.backend is not None
    return own.call, own.backend


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """What is selected for."""
    return mx_jax.matmul(x, w, recipe=mx_jax.recipes.weight_only("mxfp4"))


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """As if there were one, with the planted backend behind the reference."""
    select.BACKENDS = (*BACKENDS, PLANTED)
    try:
        with mx_jax.testing.target("cuda", (9, 0), device_kind=KIND):
            yield
    finally:
        select.BACKENDS = BACKENDS


def row() -> Row:
    """By which the planted backend takes the product."""
    with on_a_gpu():
        call, _ = traced()
    work = Work.of(call, PLANTED.name)
    assert work is not None
    return Row(
        backend=PLANTED.name,
        kernel="",
        work=work,
        shape=(ROWS, N, K),
        device_kind=KIND,
        jax=jax.__version__,
        source=source_of(PLANTED) or "",
        error=0.0,
        over_plain=2.0,
        over_bfloat16=2.0,
        driver=driver(),
        date="2026-11-20",
    )


def main() -> None:
    process, count, port = map(int, sys.argv[1:])
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    ones = np.ones((ROWS // count, K), jnp.bfloat16)
    x = jax.make_array_from_process_local_data(rows, ones, (ROWS, K))
    w = jax.device_put(jnp.ones((K, N), jnp.bfloat16), NamedSharding(mesh, P()))
    with on_a_gpu():
        _, backend = traced()
        program = jax.jit(lambda x, w: product(x, w).sum()).lower(x, w)
        total = program.compile()(x, w)
    # Less the address of a callback, which JAX writes for itself.
    text = re.sub(r'backend_config = "\d+"', "", program.as_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = {"processes": jax.process_count(), "backend": backend}
    print(json.dumps(found | {"program": digest, "sum": float(total)}), flush=True)


if __name__ == "__main__":
    main()
