"""Adam's moments in 8.25 bits: the first rounds stochastically, the second needs one thing more.

The second moment is a running mean of squares, `v = b2 v + (1 - b2) g^2`. With b2 = 0.999 a step
moves it by a thousandth, far less than a code of E4M3: rounded to nearest it sticks. Stochastic
rounding moves it, but squares lie many octaves apart, and those below the smallest code of their
block become zero, by whose root Adam divides. Roots lie half as many octaves apart; but where a
root rounds stochastically, its square is too large on average. So: store the root, and round it up
with the odds that make its square right. `mx_jax.quantize_state` does so, with normal codes alone.

    python examples/findings/adam_moments.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from findings_figure import parse_no_options, save

import mx_jax

FORMAT = mx_jax.formats.MXFP8_E4M3


def second_moment(v: jax.Array, key: jax.Array) -> Any:
    """The root of v in MXFP8, whose square is right on average, and never zero.

    Between the codes `low` and `high` around the root, up with the odds
    `(v - low^2) / (high^2 - low^2)`. The smallest code stands for everything below it.
    """
    root = jnp.sqrt(v)
    q = mx_jax.quantize(root, FORMAT, scale_rule="rceil", rounding="toward_zero")
    codes = jnp.maximum(q.codes, 1)
    low, high = (
        mx_jax.dequantize(_with_codes(q, neighbor))
        for neighbor in (codes, jnp.minimum(codes + 1, FORMAT.element.max_code))
    )
    # As products of differences and sums: squares of small roots are no float32 numbers.
    odds = (root - low) / jnp.where(high > low, high - low, 1) * ((root + low) / (high + low))
    up = jax.random.uniform(key, v.shape) < odds
    return _with_codes(q, codes + (up & (high > low)))


def _with_codes(q: Any, codes: jax.Array) -> Any:
    return mx_jax.MXArray(
        codes=codes.astype(jnp.uint8),
        scales=q.scales,
        tensor_scale=None,
        format=q.format,
        blocks=q.blocks,
        dtype=q.dtype,
    )


def from_root(q: Any) -> jax.Array:
    """What `second_moment` stored."""
    return jnp.square(q.dequantize())


def _plain(**options: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def store(v: jax.Array, key: jax.Array) -> jax.Array:
        bits = {"key": key} if options["rounding"] == "stochastic" else {}
        return mx_jax.cast(v, FORMAT, scale_rule="rceil", **options, **bits)

    return store


# What becomes of v between two steps.
WAYS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "v, nearest": _plain(rounding="nearest"),
    "v, stochastic": _plain(rounding="stochastic"),
    "root, stochastic": lambda v, key: jnp.square(_plain(rounding="stochastic")(jnp.sqrt(v), key)),
    "root, odds of squares": lambda v, key: from_root(second_moment(v, key)),
}


def run(way: str, steps: int = 4000, rows: int = 64) -> dict[str, np.ndarray]:
    """Second moments of gradients whose sizes lie four decades apart within a block.

    After half of the steps gradients are a tenth as large, so their squares a hundredth.

    Returns:
      By step: `mean`, the mean of v over what float32 has; `zeros`, the share that is zero.
    """
    sizes = 10.0 ** jnp.linspace(-4, 0, 32)

    def step(carry: Any, number: jax.Array) -> Any:
        stored, exact = carry
        key = jax.random.fold_in(jax.random.key(0), number)
        draw, rounds = jax.random.split(key)
        size = jnp.where(number < steps // 2, sizes, 0.1 * sizes)
        square = jnp.square(size * jax.random.normal(draw, (rows, 32)))
        exact = 0.999 * exact + 0.001 * square
        stored = WAYS[way](0.999 * stored + 0.001 * square, rounds)
        return (stored, exact), ((stored / exact).mean(), (stored == 0).mean())

    start = jnp.broadcast_to(jnp.square(sizes), (rows, 32))
    _, (mean, zeros) = jax.jit(
        lambda: jax.lax.scan(step, (WAYS[way](start, jax.random.key(1)), start), jnp.arange(steps))
    )()
    return {"mean": np.asarray(mean), "zeros": np.asarray(zeros)}


def losses(optimizer: optax.GradientTransformation, steps: int = 600) -> np.ndarray:
    """Of a linear regression whose 64 targets are two decades apart in size, batch by batch."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 64)).astype(np.float32)
    y = x @ (rng.standard_normal((64, 64)) * 10.0 ** np.linspace(-2, 0, 64)).astype(np.float32)
    params = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        predicted = jnp.asarray(x)[rows] @ params["kernel"] + params["bias"]
        return jnp.mean(jnp.square(predicted - jnp.asarray(y)[rows]))

    def step(carry: Any, number: jax.Array) -> Any:
        params, state = carry
        rows = jax.random.randint(jax.random.key(number), (32,), 0, 256)
        value, gradients = jax.value_and_grad(loss)(params, rows)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    start = params, optimizer.init(params)
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(steps))[1])())


def draw(axes: Any) -> None:
    for way in WAYS:
        axes.semilogy(run(way, rows=16)["mean"], label=way)
    axes.set(xlabel="step", ylabel="stored second moment\nover the exact one", ylim=(0.03, 300))
    axes.legend(frameon=False)


if __name__ == "__main__":
    parse_no_options(__doc__)
    for way in WAYS:
        shown = run(way)
        print(f"{way:22} mean {shown['mean'][-1]:8.3f}  zeros {100 * shown['zeros'][-1]:5.1f} %")
    adam = optax.adamw(1e-2)
    for name, optimizer in ("float32", adam), ("MXFP8", mx_jax.quantize_state(adam)):
        print(f"{name:7} loss of the last 50 batches {losses(optimizer)[-50:].mean():.4f}")
    save("adam_moments", draw)
