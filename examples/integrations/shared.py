"""What the examples beside this file share: data, loops, and a look into the compiled program."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

TOKENS, FEATURES, CLASSES = 8, 64, 4


def data(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Sequences `[rows, TOKENS, FEATURES]` around one of four centers, and which one."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, rows)
    centers = rng.standard_normal((CLASSES, TOKENS, FEATURES))
    noise = rng.standard_normal((rows, TOKENS, FEATURES))
    return (centers[labels] + 2 * noise).astype(np.float32), labels


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    """The mean in nats."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


# The three products of a quantized layer, as mx_jax names them in a program.
PRODUCTS = ("output", "grad_input", "grad_weight")
_OP = re.compile(r'op_name="([^"]*)"')
_PRODUCT = re.compile(r"(.*?)(?:/jit\(\w+\))*/(output|grad_input|grad_weight|grad_both)/(.*)")
# A quantized operand, as in `lhs.mxfp8_e4m3.rceil.axis-1`.
_CAST = re.compile(r"(lhs|rhs)\.\w+\.\w+\.axis-")
# Parts of a path that JAX's transformations and mx_jax's modules add.
_WRAPPED = re.compile(r"\w+\(([^()]*)\)")
_NOISE = re.compile(
    r"while|body|closed_call|checkpoint|rematted_computation|DotGeneral(?:_\d+)?|dot_general_cls|.*->.*"
)


@dataclasses.dataclass(frozen=True)
class Report:
    """Which layers of a compiled program hold quantized products.

    Attributes:
      quantized: by layer, those of `PRODUCTS` whose operands are cast in the program.
      plain: layers whose products are XLA's own, without a cast.
    """

    quantized: dict[str, tuple[str, ...]]
    plain: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(layer, ", ".join(products)) for layer, products in self.quantized.items()]
        rows += [(layer, "(high precision)") for layer in self.plain]
        width = max(len(layer) for layer, _ in [("layer", ""), *rows])
        lines = [f"{layer.ljust(width)}  {what}" for layer, what in rows]
        return "\n".join([f"{'layer'.ljust(width)}  quantized products", *lines])


def report(program: str | None) -> Report:
    """The layers of a compiled program, read from its optimized HLO.

    Args:
      program: `jax.jit(step).lower(...).compile().as_text()`.
    """
    quantized: dict[str, set[str]] = {}
    plain: set[str] = set()
    for line in (program or "").splitlines():
        name = _OP.search(line)
        if name is None:
            continue
        product = _PRODUCT.match(name[1])
        if product is None:
            if re.search(r"\b(dot|ragged-dot)\(", line):
                plain.add(_layer(name[1].rpartition("/")[0]))
        elif (both := product[2] == "grad_both") or _CAST.match(product[3]):
            held = {"grad_input", "grad_weight"} if both else {product[2]}
            quantized.setdefault(_layer(product[1]), set()).update(held)
    ordered = {
        layer: tuple(name for name in PRODUCTS if name in quantized[layer])
        for layer in sorted(quantized)
    }
    return Report(ordered, tuple(sorted(plain - quantized.keys())))


def _layer(path: str) -> str:
    """A layer's path without transformations: `jit(step)/transpose(jvp(Model))/up`."""
    parts = [part for part in path.split("/") if not part.startswith("jit(")]
    for index, part in enumerate(parts):
        while (inner := _WRAPPED.search(part)) is not None:
            part = part.replace(inner[0], inner[1])
        parts[index] = part
    return "/".join(part for part in parts if part and not _NOISE.fullmatch(part)) or "."


def train(step: Callable[[Any, int], tuple[Any, jax.Array]], state: Any, steps: int) -> list[float]:
    """The loss before each step, printed now and then.

    Args:
      step: `(state, number) -> (state, loss)`.
      state: what it starts from.
      steps: how many.
    """
    losses = []
    for number in range(steps):
        state, loss = step(state, number)
        losses.append(float(loss))
        if number % 5 == 0 or number == steps - 1:
            print(f"step {number:3}  loss {losses[-1]:.4f}")
    return losses


def train_linen(model: nn.Module, steps: int, params: Any = None) -> tuple[list[float], Report]:
    """Adam on `data()`, with a key of the stream "quantize" for each step.

    Args:
      model: of sequences, to `CLASSES` logits.
      steps: how many.
      params: what it starts from, if not from what `model.init` gives.

    Returns:
      The loss before each step, and what the compiled step holds.
    """
    x, labels = data()
    optimizer = optax.adam(3e-3)
    if params is None:
        params = jax.jit(model.init)(jax.random.key(0), x)["params"]

    def mean_loss(params: Any, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, x, rngs={"quantize": key})
        return cross_entropy(logits, labels)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, number: jax.typing.ArrayLike) -> Any:
        params, memory = state
        key = jax.random.fold_in(jax.random.key(1), number)
        loss, gradients = jax.value_and_grad(mean_loss)(params, key)
        updates, memory = optimizer.update(gradients, memory)
        return (optax.apply_updates(params, updates), memory), loss

    state = (params, optimizer.init(params))
    compiled = step.lower(state, 0).compile()
    return train(compiled, state, steps), report(compiled.as_text())


def train_nnx(model: Any, steps: int) -> tuple[list[float], Report]:
    """The same of an nnx model, which holds its own streams."""
    x, labels = data()
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: cross_entropy(m(x), labels))(model)
        optimizer.update(model, gradients)
        return loss

    compiled = step.lower(model, optimizer).compile()
    losses = train(lambda state, _: (state, compiled(*state)), (model, optimizer), steps)
    return losses, report(compiled.as_text())


def show(lines: Iterable[Any]) -> None:
    """Prints with an empty line in between."""
    print("", *lines, sep="\n")


def run_command(main: Callable[[int], Any], description: str | None) -> None:
    """Runs an example's `main` with the steps that the command line names."""
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = inspect.signature(main).parameters["steps"].default
    parser.add_argument("--steps", type=int, default=default, help="of training")
    main(parser.parse_args().steps)
