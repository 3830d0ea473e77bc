"""A training step and a decoding step of Dense layers, in tokens a second beside bfloat16's."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.measure.timing import median_seconds
from mx_jax.ops.dot_general import matmul
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import quantize
from mx_jax.recipes.named import high_precision, mxfp8, weight_only

Multiply = Callable[[jax.Array, Any], jax.Array]


def training(tokens: int = 4096, features: int = 4096, units: int = 14336) -> dict[str, Any]:
    """A Dense layer: output, both gradients, and a step down the kernel's."""
    w, x, g = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate(((features, units), (tokens, features), (tokens, units)))
    )

    def by(recipe: Any) -> Callable[[], Any]:
        def step(w: jax.Array, x: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
            y, pullback = jax.vjp(functools.partial(matmul, recipe=recipe), x, w)
            dx, dw = pullback(g)
            return y, dx, w - jnp.bfloat16(1e-3) * dw

        return functools.partial(jax.jit(step), w, x, g)

    what = f"training step of Dense {features} to {units}, {tokens} tokens, mxfp8"
    return _beside_bfloat16(what, tokens, by(mxfp8()), by(high_precision()))


def decoding(layers: int = 12, features: int = 8192) -> dict[str, Any]:
    """One token through Dense layers, whose weights are packed as a model's are."""
    scale = features**-0.5
    draw = jax.jit(lambda key: scale * jax.random.normal(key, (features, features), jnp.bfloat16))
    dense = [draw(key) for key in jax.random.split(jax.random.key(0), layers)]
    cast = jax.jit(lambda w: quantize(w, "mxfp4", axis=0))
    packed = [pack_weights(cast(w)) for w in dense]
    x = jnp.ones((1, features), jnp.bfloat16)

    def by(multiply: Multiply, weights: list[Any]) -> Callable[[], Any]:
        run = jax.jit(lambda x, weights: functools.reduce(multiply, weights, x))
        return functools.partial(run, x, weights)

    what = f"decoding step through {layers} Dense layers of {features} x {features}, mxfp4"
    quantized = functools.partial(matmul, recipe=weight_only("mxfp4"))
    return _beside_bfloat16(what, 1, by(quantized, packed), by(jnp.matmul, dense))


STEPS: dict[str, Callable[[], dict[str, Any]]] = {"training": training, "decoding": decoding}


def tokens_a_second(name: str) -> dict[str, Any]:
    """What a step computes, and tokens a second of it here and in bfloat16."""
    return STEPS[name]()


def _beside_bfloat16(
    what: str, tokens: int, ours: Callable[[], Any], bfloat16: Callable[[], Any]
) -> dict[str, Any]:
    seconds = median_seconds({"tokens_a_second": ours, "in_bfloat16": bfloat16})
    return {"step": what} | {name: tokens / took for name, took in seconds.items()}
