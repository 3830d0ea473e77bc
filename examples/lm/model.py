"""A small decoder-only transformer. The linear layers of its blocks follow a recipe."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

import mx_jax.nn.linen as mx
from mx_jax.recipes import Recipe, high_precision


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions on [batch, time, heads, d_head]: products then depend on distances.

    Against learned positions it reaches the same validation loss in half the steps.
    """
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual, on [tokens, d_model].

    The four linears, `qkv`, `out`, `up` and `down`, are quantized; norms and the two
    products inside attention are not.
    """

    time: int
    heads: int
    layers: int
    recipe: Recipe
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, recipe: Recipe | None = None) -> jax.Array:
        d_model = x.shape[-1]
        recipe = recipe or self.recipe
        linear = partial(mx.Dense, recipe=recipe, dtype=self.dtype, use_bias=False)
        into = partial(linear, kernel_init=nn.initializers.normal(0.02))
        # Smaller by the square root of the number of residual sums, as in GPT-2.
        back = partial(linear, kernel_init=nn.initializers.normal(0.02 / (2 * self.layers) ** 0.5))

        h = nn.RMSNorm(dtype=self.dtype, name="norm_attention")(x)
        qkv = into(3 * d_model, name="qkv")(h)
        # The only place that tells sequences apart.
        qkv = qkv.reshape(-1, self.time, 3, self.heads, d_model // self.heads)
        query, key, value = jnp.moveaxis(qkv, 2, 0)
        h = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + back(d_model, name="out")(h.reshape(x.shape))

        h = nn.RMSNorm(dtype=self.dtype, name="norm_mlp")(x)
        h = nn.gelu(into(4 * d_model, name="up")(h))
        return x + back(d_model, name="down")(h)


def high_or_not(block: Block, x: jax.Array, high: jax.Array) -> jax.Array:
    """The block in high precision where `high` says so: one of the two is computed."""
    return nn.cond(
        high,
        lambda block, x: block(x, recipe=high_precision()),
        lambda block, x: block(x),
        block,
        x,
    )


class Transformer(nn.Module):
    """Token indices [batch, time] to float32 logits [batch, time, vocabulary].

    Stochastic recipes draw from the stream "quantize", which init does not need.
    """

    vocabulary: int
    d_model: int
    layers: int
    heads: int
    context: int
    recipe: Recipe
    dtype: Any
    head: Recipe
    high_blocks: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding_init = nn.initializers.normal(0.02)
        embed = nn.Embed(
            self.vocabulary, self.d_model, self.dtype, embedding_init=embedding_init, name="tokens"
        )
        x = embed(tokens)
        # One row a token: weight gradients that contract [batch, time] as two axes take XLA's
        # CPU backend twice as long.
        x = x.reshape(-1, self.d_model)
        # One block is traced and compiled, however many layers there are.
        blocks = nn.scan(
            lambda block, x, high: (
                block(x) if high is None else high_or_not(block, x, high),
                None,
            ),
            variable_axes={"params": 0},
            # A key for each layer, of whichever streams there are.
            split_rngs={"params": True, mx.RNG_STREAM: True},
            length=self.layers,
        )
        block = Block(
            time=tokens.shape[1],
            heads=self.heads,
            layers=self.layers,
            recipe=self.recipe,
            dtype=self.dtype,
            name="blocks",
        )
        high = jnp.isin(jnp.arange(self.layers), jnp.array(self.high_blocks) % self.layers)
        x, _ = blocks(block, x, high if self.high_blocks else None)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        head = mx.Dense(
            self.vocabulary, use_bias=False, dtype=self.dtype, recipe=self.head, name="head"
        )
        logits = head(x)
        return logits.astype(jnp.float32).reshape(*tokens.shape, self.vocabulary)


def predict(params: Any, tokens: jax.Array, model: Transformer, key: jax.Array) -> jax.Array:
    """The model's logits; one type, where Flax's `apply` may also return changed variables."""
    return cast(jax.Array, model.apply({"params": params}, tokens, rngs={mx.RNG_STREAM: key}))


@partial(jax.jit, static_argnames=("model", "length"))
def generate(
    params: Any, prompt: jax.Array, key: jax.Array, *, model: Transformer, length: int
) -> jax.Array:
    """Samples `length` tokens after `prompt`, which is cut to the model's context.

    A window of the last `context` tokens slides over the text and is read anew for every
    token: no cache, since every window starts at position 0.
    """
    prompt = prompt[-model.context :]
    window = jnp.zeros(model.context, prompt.dtype).at[: len(prompt)].set(prompt)

    def next_token(carry, key):
        window, size = carry
        logits = predict(params, window[None], model, jax.random.fold_in(key, 1))[0, size - 1]
        token = jax.random.categorical(key, logits).astype(window.dtype)
        full = size == model.context
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, size - 1, size)].set(token)
        return (window, jnp.minimum(size + 1, model.context)), token

    _, tokens = jax.lax.scan(next_token, (window, len(prompt)), jax.random.split(key, length))
    return tokens
