"""The next token from logits."""

import dataclasses
import math

import jax
import jax.numpy as jnp


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
