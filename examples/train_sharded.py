"""Trains a Flax model on several devices by FSDP; its weights travel as codes.

    python examples/train_sharded.py                       # on eight virtual devices of this CPU
    python examples/train_sharded.py --processes 2         # in two processes, four devices each
    python examples/train_sharded.py --recipe mxfp4 --steps 200

Every device has an eighth of each weight, of its optimizer state and of the batch. The model is
Flax's own but for its Dense layers, the training step is plain `jax.jit`: where XLA would gather a
weight for a product, mx_jax has it gather the codes. Before training it prints the bytes that a
device receives in one step, in plain JAX and by the recipe, as XLA's partitioner plans them.
"""

import argparse
import collections
import contextlib
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax

DEVICES = 8
WIDTH, LAYERS, BATCH = 512, 2, 256
# Where a process that `--processes` started finds the others.
COORDINATOR = "TRAIN_SHARDED_COORDINATOR"


class Model(nn.Module):
    """Residual layers from 64 pixels to 10 digits.

    Attributes:
      recipe: of mx_jax; None: plain JAX.
    """

    recipe: str | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, 10]."""
        x = nn.Dense(WIDTH)(x)
        for _ in range(LAYERS):
            dense = nn.Dense if self.recipe is None else mx_jax.nn.linen.Dense
            options = {} if self.recipe is None else {"recipe": self.recipe}
            y = dense(4 * WIDTH, **options)(nn.LayerNorm()(x))
            x = x + dense(WIDTH, **options)(nn.gelu(y))
        return nn.Dense(10)(x)


def sharded(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """FSDP: matrices are cut along their first axis, where the devices divide it."""

    def of(x: Any) -> NamedSharding:
        is_cut = x.ndim == 2 and x.shape[0] % DEVICES == 0
        return NamedSharding(mesh, P("fsdp") if is_cut else P())

    return jax.tree.map(of, tree)


def training(recipe: str | None, mesh: jax.sharding.Mesh) -> tuple[Any, Any, Any]:
    """A jitted step, the parameters and the optimizer's state."""
    model, optimizer = Model(recipe), optax.adamw(1e-3)

    def start(key: jax.Array) -> tuple[Any, Any]:
        params = model.init({"params": key, "quantize": key}, jnp.zeros((1, 64)))
        return params, optimizer.init(params)

    def loss(params: Any, x: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply(params, x, rngs={"quantize": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: Any, state: Any, x: jax.Array, labels: jax.Array, key: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, labels, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    where = sharded(jax.eval_shape(start, jax.random.key(0)), mesh)
    params, state = jax.jit(start, out_shardings=where)(jax.random.key(0))
    return jax.jit(step, out_shardings=(*where, NamedSharding(mesh, P()))), params, state


def batches(steps: int, mesh: jax.sharding.Mesh) -> Any:
    """Random digits of scikit-learn's 1,797; each device makes its own rows."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(0)
    by_rows = NamedSharding(mesh, P("fsdp"))
    for _ in range(steps):
        rows = rng.integers(0, len(digits.data), BATCH)
        x, labels = digits.data[rows].astype(np.float32) / 16, digits.target[rows]
        yield tuple(
            jax.make_array_from_callback(
                whole.shape, by_rows, lambda part, whole=whole: whole[part]
            )
            for whole in (x, labels)
        )


def compiled(step: Any, *operands: Any) -> tuple[Any, str]:
    """The compiled step, and its program as XLA's partitioner left it, with all collectives."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        run = step.lower(*operands).compile(compiler_options=dump)
        (file,) = Path(folder).glob("*jit_step*.after_spmd-partitioning.*.txt")
        return run, file.read_text()


def received(program: str) -> collections.Counter[str]:
    """Bytes that a device receives in one step, by dtype, as in a ring.

    Of n devices each lacks `(n - 1) / n` of what is gathered, scattered or exchanged, and twice
    that of what is summed, unless it keeps a slice alone: GPUs scatter such sums.
    """
    lacking = (DEVICES - 1) / DEVICES
    shares = {
        "all-gather": lacking,
        "all-to-all": lacking,
        "all-reduce": 2 * lacking,
        "reduce-scatter": DEVICES - 1,
        "collective-permute": 1,
    }
    counts = collections.Counter[str]()
    line = rf"%([\w.-]+) = (\(.*?\)|\S+) ({'|'.join(shares)})\("
    for name, results, kind in re.findall(line, program):
        uses = re.findall(rf"= \S+ ([\w-]+)\(.*%{re.escape(name)}\b", program)
        is_scattered = kind == "all-reduce" and set(uses) == {"dynamic-slice"}
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            size = math.prod(int(n) for n in shape.split(",") if n) * int(dtype[1:]) // 8
            counts[dtype] += round(size * (lacking if is_scattered else shares[kind]))
    return counts


def run(options: argparse.Namespace) -> None:
    """Trains, in one process or as one of several."""
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    keys = jax.random.split(jax.random.key(1), options.steps)
    first = next(batches(1, mesh))
    counts = {}
    for recipe in (None, options.recipe):
        step, params, state = training(recipe, mesh)
        train, program = compiled(step, params, state, *first, keys[0])
        counts[recipe] = received(program)
    whole = counts[None].total()
    for recipe, count in counts.items():
        parts = ", ".join(f"{size / 2**20:.1f} as {dtype}" for dtype, size in count.items())
        share = count.total() / whole
        say(f"{recipe or 'float32':10} receives {count.total() / 2**20:6.1f} MiB a step", end="")
        say(f" ({share:.2f} of plain JAX's): {parts}", flush=True)
    for number, batch in enumerate(batches(options.steps, mesh), 1):
        params, state, loss = train(params, state, *batch, keys[number - 1])
        if number % 20 == 0 or number in (1, options.steps):
            say(f"step {number:4}  loss {float(loss):.4f}", flush=True)


def start_all(processes: int) -> int:
    """Starts this program so many times; the exit status of the first that fails."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=os.environ | {COORDINATOR: f"{address} {index}"}
        )
        for index in range(processes)
    ]
    try:
        while (ended := [w.poll() for w in workers]) != [0] * processes:
            if status := next((status for status in ended if status), 0):
                return status
            with contextlib.suppress(subprocess.TimeoutExpired):
                workers[ended.index(None)].wait(0.5)
        return 0
    finally:
        for worker in workers:
            worker.kill()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="mxfp8", help="a name of mx_jax.recipes (mxfp8)")
    parser.add_argument("--steps", type=int, default=100, help="of training (100)")
    parser.add_argument("--processes", type=int, choices=(1, 2, 4, 8), default=1)
    options = parser.parse_args()
    try:
        mx_jax.recipes.from_name(options.recipe)
    except ValueError as error:
        parser.error(str(error))
    place = os.environ.get(COORDINATOR)
    if options.processes > 1 and place is None:
        return start_all(options.processes)
    jax.config.update("jax_num_cpu_devices", DEVICES // options.processes)
    if place is not None:
        address, index = place.split()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, options.processes, int(index))
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
