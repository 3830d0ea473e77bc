"""Text token by token: a prompt at once, then some steps a dispatch, the caches in place."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.generate.model import Caches, Llama
from mx_jax.nn.cache import KVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: what logits are divided by; 0 takes the most likely token.
      top_k: how many of the likeliest are drawn from; None: all.

    Raises:
      ValueError: a temperature that is negative or not finite, or top_k below 1.
    """

    temperature: float = 0.0
    top_k: int | None = None

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                "Sampling: temperature must be finite and at least 0, got "
                f"temperature={self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Sampling: top_k must be at least 1, got top_k={self.top_k}")

    def choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Token numbers, int32 `[batch]`, from float32 logits `[batch, vocabulary]`.

        A choice is drawn with probability `softmax(logits / temperature)`.
        """
        if self.temperature == 0:
            return first_largest(logits)
        scaled = logits / self.temperature
        if self.top_k is None:
            return jax.random.categorical(key, scaled).astype(jnp.int32)
        likeliest, tokens = jax.lax.top_k(scaled, min(self.top_k, logits.shape[-1]))
        drawn = jax.random.categorical(key, likeliest)
        return jnp.take_along_axis(tokens, drawn[..., None], -1)[..., 0].astype(jnp.int32)


def first_largest(logits: jax.Array) -> jax.Array:
    """`argmax` over the last axis, int32: the first of the largest, or of those that are NaN.

    XLA's CPU compiler makes scalar code of an index beside a value, and vectors of these two.
    """
    largest = logits.max(-1, keepdims=True)
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where((logits == largest) | jnp.isnan(logits), places, logits.shape[-1]).min(-1)


GREEDY = Sampling()


# Rows of a cache come in multiples of this, so that prompts of like length share a program.
_ROWS = 64


@functools.partial(jax.jit, static_argnames=("model", "sampling"), donate_argnames="caches")
def advance(
    model: Llama,
    sampling: Sampling,
    params: Any,
    tokens: jax.Array,
    caches: Caches,
    position: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, Caches]:
    """One step: the token after `tokens`, and the caches with them.

    Args:
      model: what computes logits.
      sampling: what chooses among them.
      params: the model's.
      tokens: int32 `[batch, tokens]`, the whole prompt or the one token before.
      caches: what came before them; donated.
      position: of the first of them, int32.
      key: PRNG key; each position draws from its own.

    Returns:
      Tokens int32 `[batch, 1]`, and the caches.
    """
    applied: Any = model.apply({"params": params}, tokens, caches, position, last=True)
    logits, new = applied
    with jax.named_scope("sampling"):
        key = jax.random.fold_in(key, position + tokens.shape[1])
        chosen = sampling.choose(logits[:, -1], key)
    return chosen[:, None], new


@functools.partial(
    jax.jit, static_argnames=("model", "sampling", "count"), donate_argnames="caches"
)
def advance_many(
    model: Llama,
    sampling: Sampling,
    params: Any,
    tokens: jax.Array,
    caches: Caches,
    position: jax.Array,
    key: jax.Array,
    *,
    count: int,
) -> tuple[jax.Array, Caches]:
    """Several steps in one dispatch, which costs as much as a tenth of a small model's step.

    Args are those of `advance`, `tokens` int32 `[batch, 1]`, and the number of steps.

    Returns:
      Tokens int32 `[batch, count]`, those that as many calls of `advance` give, and the caches.
    """

    def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
        before, held, at = carry
        following, held = advance(model, sampling, params, before, held, at, key)
        return (following, held, at + 1), following[:, 0]

    (_, caches, _), chosen = jax.lax.scan(step, (tokens, caches, position), None, length=count)
    return chosen.T, caches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generator:
    """A model with its weights, ready to continue texts.

    Attributes:
      model: what computes logits.
      params: its parameters, quantized or not.
      cache: block format of the caches, or None.
      cache_dtype: of caches without a format.
      sampling: how tokens are chosen.
      stride: tokens that are computed in one dispatch, after the prompt.
    """

    model: Llama
    params: Any
    cache: Any = None
    cache_dtype: Any = jnp.float32
    sampling: Sampling = GREEDY
    stride: int = 8

    def caches(self, tokens: int) -> Caches:
        """Empty caches for so many tokens at least."""
        config, length = self.model.config, -(-tokens // _ROWS) * _ROWS
        shape = (1, length, config.kv_heads, config.head_width)
        empty = functools.partial(KVCache.zeros, format=self.cache, dtype=self.cache_dtype)
        return tuple(empty(*shape) for _ in range(config.layers))

    def step(
        self, tokens: jax.Array, caches: Caches, position: int, key: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """See `advance`."""
        at = np.int32(position)
        return advance(self.model, self.sampling, self.params, tokens, caches, at, key)

    def steps(
        self, tokens: jax.Array, caches: Caches, position: int, key: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """`stride` steps: see `advance_many`."""
        at = jnp.asarray(position, jnp.int32)
        held = self.model, self.sampling, self.params
        return advance_many(*held, tokens, caches, at, key, count=self.stride)

    def stream(self, prompt: Sequence[int], max_tokens: int, seed: int = 0) -> Iterator[int]:
        """Tokens that follow a prompt, `stride` at a time.

        Args:
          prompt: numbers of its tokens, at least one.
          max_tokens: how many to give; the model's context may end earlier.
          seed: of what is drawn: the same seed gives the same text.

        Raises:
          ValueError: an empty prompt, one with a token that the model does not know, or one that
            fills the context; fewer tokens than none.
        """
        config, length = self.model.config, len(prompt)
        if not 0 < length < config.context:
            raise ValueError(
                "generate: a prompt must have at least one token and leave room in the context, "
                f"got {length} tokens, context={config.context}"
            )
        if not all(0 <= token < config.vocabulary for token in prompt):
            raise ValueError(
                f"generate: tokens must lie in [0, {config.vocabulary}), got prompt={prompt}"
            )
        if max_tokens < 0:
            raise ValueError(f"generate: max_tokens must be at least 0, got {max_tokens}")
        count = min(max_tokens, config.context - length)
        if count < 1:
            return iter(())
        return self._stream(np.asarray([prompt], np.int32), count, jax.random.key(seed))

    def _stream(self, tokens: Any, count: int, key: jax.Array) -> Iterator[int]:
        strides = -(-(count - 1) // self.stride)
        caches = self.caches(tokens.shape[1] + strides * self.stride)
        position = tokens.shape[1]
        ahead, caches = self.step(tokens, caches, 0, key)
        for _ in range(strides):
            # Shown while the next are being computed.
            shown, last = ahead, ahead[:, -1:]
            ahead, caches = self.steps(last, caches, position, key)
            position += self.stride
            yield from map(int, np.asarray(shown[0]))
            count -= shown.shape[1]
        yield from map(int, np.asarray(ahead[0, :count]))
