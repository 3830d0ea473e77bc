"""BERT as a sentence encoder, in plain Flax: nothing here knows of quantization.

Source: Devlin et al., arXiv 1810.04805; mean pooling: Reimers and Gurevych, arXiv 1908.10084.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of an encoder, by default those of all-MiniLM-L6-v2."""

    vocabulary: int = 30522
    positions: int = 512
    types: int = 2
    width: int = 384
    hidden: int = 1536
    heads: int = 12
    layers: int = 6
    epsilon: float = 1e-12


class Attention(nn.Module):
    """Every token looks at all tokens of its sentence: [batch, time, width]."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        width = x.shape[-1]
        split = (*x.shape[:-1], self.heads, width // self.heads)
        query, key, value = (
            nn.Dense(width, name=name)(x).reshape(split) for name in ("query", "key", "value")
        )
        seen = nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :])
        return nn.Dense(width, name="out")(seen.reshape(x.shape))


class Layer(nn.Module):
    """Attention and MLP, each with a residual around it and a norm behind."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        config = self.config
        attended = Attention(config.heads, name="attention")(x, mask)
        x = nn.LayerNorm(config.epsilon, name="attention_norm")(x + attended)
        h = nn.gelu(nn.Dense(config.hidden, name="up")(x), approximate=False)
        h = nn.Dense(config.width, name="down")(h)
        return nn.LayerNorm(config.epsilon, name="norm")(x + h)


class Encoder(nn.Module):
    """Tokens [batch, time] of sentences to unit vectors [batch, width].

    The mask [batch, time] is False where a sentence is padded; every sentence has a token.
    """

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Embed(config.vocabulary, config.width, name="words")(tokens)
        x += nn.Embed(config.positions, config.width, name="positions")(jnp.arange(tokens.shape[1]))
        # The second type is for pairs of sentences.
        x += nn.Embed(config.types, config.width, name="types")(jnp.zeros_like(tokens))
        x = nn.LayerNorm(config.epsilon, name="norm")(x)
        for index in range(config.layers):
            x = Layer(config, name=f"layer_{index}")(x, mask)
        mean = jnp.mean(x, axis=1, where=mask[..., None])
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)
