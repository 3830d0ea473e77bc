"""A training step of one decoder block, in bfloat16 and in a recipe, for a GPU to be timed by.

The block is that of today's 8B models (grouped attention, gated MLP), as functions: weights in
float32, all that is computed in bfloat16. A step is the output and the gradients of x and of every
weight, as in the midst of a model; an optimizer would cost the same either way. Sequences are
short, so that attention, which no recipe changes, takes a small part of the time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mx_jax
from benchmarks.gpu_compare import PLAIN, Chain, Comparison, Repeated, chain_of
from benchmarks.gpu_products import BASELINE
from mx_jax import recipes

Weights = dict[str, jax.Array]
Multiply = Callable[[jax.Array, jax.Array], jax.Array]
# `weights, x, gradient -> output, gradients of weights and of x`.
StepFunction = Callable[[Weights, jax.Array, jax.Array], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A training step of a block.

    Attributes:
      recipe: name of the recipe of all its products.
      width: features between blocks.
      hidden: features within the MLP.
      heads: of the queries.
      kv_heads: of keys and values.
      sequences: in a batch.
      length: tokens of a sequence.
    """

    recipe: str = "mxfp8"
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    sequences: int = 8
    length: int = 512

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of the weights, `[k, n]`."""
        narrow = self.kv_heads * self.width // self.heads
        return {
            "query": (self.width, self.width),
            "key": (self.width, narrow),
            "value": (self.width, narrow),
            "out": (self.width, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }

    def draw(self) -> tuple[Weights, jax.Array, jax.Array]:
        """Weights in float32, x and the output's gradient in bfloat16."""
        *keys, x_key, g_key = jax.random.split(jax.random.key(0), len(self.shapes) + 2)
        weights = {
            name: jax.random.normal(key, shape) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)
        }
        shape = self.sequences, self.length, self.width
        x, g = (jax.random.normal(key, shape, jnp.bfloat16) for key in (x_key, g_key))
        return weights, x, g

    def in_bfloat16(self) -> StepFunction:
        """The baseline: JAX's own products, which are cuBLAS's on a GPU."""
        return self._function(jnp.matmul)

    def on_plain_path(self) -> StepFunction:
        """In the recipe, without any kernel: none is faster where weights are not packed."""
        return self._function(self._multiply)

    def _multiply(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe=getattr(recipes, self.recipe)())

    def _function(self, multiply: Multiply) -> StepFunction:
        def step(weights: Weights, x: jax.Array, g: jax.Array) -> tuple[Any, ...]:
            y, pullback = jax.vjp(lambda weights, x: self._block(weights, x, multiply), weights, x)
            return y, *pullback(g)

        return step

    def _block(self, weights: Weights, x: jax.Array, multiply: Multiply) -> jax.Array:
        w = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
        normed = _normalize(x)
        query, key, value = (multiply(normed, w[name]) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(
            self._in_heads(query), self._in_heads(key), self._in_heads(value), is_causal=True
        )
        x = x + multiply(attended.reshape(x.shape), w["out"])
        normed = _normalize(x)
        gated = jax.nn.silu(multiply(normed, w["gate"])) * multiply(normed, w["up"])
        return x + multiply(gated, w["down"])

    def _in_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.width // self.heads)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        tokens = self.sequences * self.length
        return f"training step of a {self.width}-wide block, {self.recipe}, {tokens} tokens"


def _normalize(x: jax.Array) -> jax.Array:
    """RMSNorm without a gain."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def compare_steps(step: Step, calls: int) -> Comparison:
    """The step in bfloat16, and in the recipe on the plain path.

    Args:
      step: to compute.
      calls: steps in a sample.
    """
    functions = {
        BASELINE: step.in_bfloat16(),
        PLAIN: step.on_plain_path(),
    }
    operands = functools.cache(step.draw)

    def chain(name: str) -> Chain:
        weights, x, g = operands()
        run = functions[name]
        way = Repeated(one=lambda x, w: run(w, *x), x=(x, g), copies=[weights])
        return chain_of(name, way, calls)

    makers = [(name, functools.partial(chain, name)) for name in functions]
    return Comparison(what=step, makers=makers, baseline=BASELINE, count=calls)
