"""Language models of the Llama family: norms, rotary attention with shared heads, gated layers.

What reads the same input is one product where its weights are: queries, keys and values; gate
and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from generate.config import LlamaConfig

import mx_jax
from mx_jax import MXArray, PackedMXArray, calibrate, recipes
from mx_jax.nn import KVCache
from mx_jax.nn.linen import Dense
from mx_jax.recipes import Recipe

Turn = tuple[jax.Array, jax.Array]
Caches = tuple[KVCache, ...]
# Products by the tensors of their kernels. Several that read the same input are one product, unless
# the parameters have them in parts.
PRODUCTS = {
    "qkv": ("query", "key", "value"),
    "attention_out": ("out",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


def rotations(config: LlamaConfig, tokens: int, position: jax.typing.ArrayLike) -> Turn:
    """Cosines and sines, float32 `[tokens, 1, head_width]`, of `position`, `position + 1`, ...

    The angle of pair i is `position * theta^(-2i / head_width) / divisor_i`; the first half of the
    sines is negative, as `rotate` takes them.
    """
    half = jnp.arange(config.head_width // 2, dtype=jnp.float32)
    frequencies = config.rope_theta ** (-2 * half / config.head_width)
    if config.rope_divisors is not None:
        frequencies = frequencies / jnp.array(config.rope_divisors, jnp.float32)
    places = (position + jnp.arange(tokens)).astype(jnp.float32)
    angles = places[:, None, None] * frequencies
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cosines, cosines], -1), jnp.concatenate([-sines, sines], -1)


def rotate(x: jax.Array, turn: Turn) -> jax.Array:
    """Turn heads `[..., tokens, heads, head_width]`, in float32, to x's dtype."""
    cosines, sines = turn
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # XLA fuses this with what reads it, which it does not do with a concatenation.
    swapped = jax.lax.rev(halves, (x.ndim - 1,)).reshape(x.shape)
    return (x * cosines + swapped * sines).astype(x.dtype)


def is_quantized(x: object) -> bool:
    """Whether weights are codes, packed or not."""
    return isinstance(x, MXArray | PackedMXArray)


def look_up(embedding: Any, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding, `[*tokens, width]`, of which only those are decoded."""
    with jax.named_scope("embedding"):
        packed = isinstance(embedding, PackedMXArray)
        rows = embedding.take(tokens) if packed else embedding[tokens]
        return rows.dequantize() if isinstance(rows, MXArray) else rows


class Llama(nn.Module):
    """A causal language model; weights are arrays, MXArrays or packed, and come from a file."""

    config: LlamaConfig
    recipe: Recipe  # of products by weights that are codes
    dtype: Any = jnp.float32

    def setup(self):
        self.norm = nn.RMSNorm(self.config.epsilon, dtype=self.dtype)

    @property
    def block(self) -> Block:
        """What each of the blocks is, without parameters."""
        return Block(self.config, self.recipe, self.dtype, parent=None)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        caches: Caches | None = None,
        position: jax.typing.ArrayLike = 0,
    ) -> tuple[jax.Array, Caches | None]:
        """Logits for tokens that follow what the caches hold, and the caches with them.

        Of int32 `[batch, tokens]` float32 `[batch, tokens, vocabulary]`.
        """
        x = look_up(self.get_variable("params", "embedding"), tokens).astype(self.dtype)
        turn = rotations(self.config, tokens.shape[1], position)
        new = []
        for index in range(self.config.layers):
            block = self.block.clone(parent=self, name=f"layers_{index}")
            x, cache = block(x, turn, None if caches is None else caches[index], position)
            new.append(cache)
        return self.logits(x), None if caches is None else tuple(new)

    def logits(self, x: jax.Array) -> jax.Array:
        """float32 `[batch, tokens, vocabulary]` of what the last block gives."""
        x, name = self.norm(x), "embedding" if self.config.tied else "head"
        if self.has_variable("params", "head_input"):  # of `calibrate.rotate`
            kernel: Any = self.get_variable("params", "head_input")["kernel"]
            x = jnp.matmul(x, kernel.astype(self.dtype))
        calibrate.tell_input(self, name, x)
        head: Any = self.get_variable("params", name)
        recipe = self.recipe if is_quantized(head) else recipes.high_precision()
        if not is_quantized(head):
            head = head.astype(self.dtype)
        contracting = (((2,), (1,)), ((), ()))
        with jax.named_scope("head"):
            return mx_jax.dot_general(
                x, head, contracting, recipe=recipe, preferred_element_type=jnp.float32
            )


class Block(nn.Module):
    """Attention and a gated layer, each added to what it reads."""

    config: LlamaConfig
    recipe: Recipe
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turn: Turn,
        cache: KVCache | None,
        position: jax.typing.ArrayLike,
    ) -> tuple[jax.Array, KVCache | None]:
        """See `Llama`."""
        config = self.config
        batch, tokens, _ = x.shape
        heads, shared = config.heads, config.kv_heads
        y = nn.RMSNorm(config.epsilon, dtype=self.dtype, name="attention_norm")(x)
        width = config.head_width
        y = self._together("qkv", (heads * width, shared * width, shared * width), y)
        y = y.reshape(batch, tokens, heads + 2 * shared, config.head_width)
        with jax.named_scope("rotary"):
            rotated, values = rotate(y[:, :, : heads + shared], turn), y[:, :, heads + shared :]
        query, keys = jnp.split(rotated, [heads], 2)
        if cache is None:
            attended = jax.nn.dot_product_attention(query, keys, values, is_causal=True)
        else:
            with jax.named_scope("cache"):
                cache = cache.append(keys, values, position)
            with jax.named_scope("attention"):
                attended = cache.attend(query, position)
        attended = attended.reshape(batch, tokens, heads * config.head_width)
        x = x + self._dense("attention_out", config.width)(attended)
        y = nn.RMSNorm(config.epsilon, dtype=self.dtype, name="feed_forward_norm")(x)
        y = self._together("gate_up", (config.hidden, config.hidden), y)
        gate, up = jnp.split(y, 2, -1)
        with jax.named_scope("gate"):
            y = nn.silu(gate) * up
        return x + self._dense("down", config.width)(y), cache

    def _together(self, name: str, features: Sequence[int], y: jax.Array) -> jax.Array:
        """Products that read the same input, by one kernel, or by those that there are."""
        if not self.has_variable("params", PRODUCTS[name][0]):
            return self._dense(name, sum(features))(y)
        with jax.named_scope(name):
            parts = zip(PRODUCTS[name], features, strict=True)
            return jnp.concatenate([self._dense(part, out)(y) for part, out in parts], -1)

    def _dense(self, name: str, features: int) -> Dense:
        quantized = is_quantized(self.get_variable("params", name)["kernel"])
        recipe = self.recipe if quantized else recipes.high_precision()
        return Dense(features, use_bias=False, dtype=self.dtype, recipe=recipe, name=name)
