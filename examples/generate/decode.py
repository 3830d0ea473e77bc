"""Text token by token: a prompt at once, then some steps a dispatch, the caches in place."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from generate.model import Block, Caches, Llama, Turn, look_up, rotations

from mx_jax.nn import KVCache

# Rows of a cache come in multiples of this, so that prompts of like length share a program.
_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0  # what logits are divided by; 0 takes the most likely token
    # The likeliest that together have at least this probability are drawn from.
    top_p: float = 1.0

    def __post_init__(self):
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1):
            raise ValueError(
                "Sampling: temperature must be finite and at least 0, and top_p above 0 and at "
                f"most 1, got temperature={self.temperature}, top_p={self.top_p}"
            )

    def choose(self, logits: jax.Array, key: jax.Array | None) -> jax.Array:
        """Token numbers, int32 `[batch]`, from float32 logits `[batch, vocabulary]`."""
        if key is None or not self.temperature:
            # The first of the largest, or of those that are NaN. XLA's CPU compiler makes scalar
            # code of argmax, an index beside a value, and vectors of these two.
            largest = logits.max(-1, keepdims=True)
            places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
            is_one = (logits == largest) | jnp.isnan(logits)
            return jnp.where(is_one, places, logits.shape[-1]).min(-1)
        scaled = logits / self.temperature
        if self.top_p == 1:
            return jax.random.categorical(key, scaled).astype(jnp.int32)
        likeliest, tokens = jax.lax.top_k(scaled, logits.shape[-1])
        probabilities = jax.nn.softmax(likeliest)
        # Of the likelier ones: those that reach top_p without this one leave it out.
        before = jnp.cumsum(probabilities, -1) - probabilities
        drawn = jax.random.categorical(key, jnp.where(before < self.top_p, likeliest, -jnp.inf))
        return jnp.take_along_axis(tokens, drawn[..., None], -1)[..., 0].astype(jnp.int32)


GREEDY = Sampling()


@functools.partial(jax.jit, static_argnames="model")
def _embed(
    model: Llama, params: Any, tokens: jax.Array, position: Any, turn: Turn | None
) -> tuple[jax.Array, Turn]:
    turn = rotations(model.config, tokens.shape[1], position) if turn is None else turn
    return look_up(params["embedding"], tokens).astype(model.dtype), turn


@functools.partial(jax.jit, static_argnames="block", donate_argnames="cache")
def _attend_and_feed(
    block: Block, params: Any, x: jax.Array, turn: Turn, cache: KVCache, position: Any
) -> Any:
    """One program for all blocks of a model: they have equal shapes."""
    return block.apply({"params": params}, x, turn, cache, position)


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def _choose(
    model: Llama, sampling: Sampling, params: Any, x: jax.Array, position: Any, key: Any
) -> jax.Array:
    """The token after the last of `x`, `[batch, 1]`, at this position."""
    logits: Any = model.apply({"params": params}, x[:, -1:], method="logits")
    with jax.named_scope("sampling"):
        key = None if key is None else jax.random.fold_in(key, position)
        return sampling.choose(logits[:, -1], key)[:, None]


def advance(
    model: Llama,
    sampling: Sampling,
    params: Any,
    tokens: np.ndarray | jax.Array,
    caches: Caches,
    position: Any,
    key: jax.Array | None,
    turn: Turn | None = None,
) -> tuple[jax.Array, Caches]:
    """One step: the token after `tokens`, int32 `[batch, 1]`, and the caches with them.

    Outside `jit`, three small programs: one for a block, which all blocks run, compiles much sooner
    than one for all of them, and a prompt is worth a dispatch a block. Caches are donated; each
    position draws from a key of its own, and `turn` is its `rotations`, where they are known.
    """
    layers = [f"layers_{index}" for index in range(len(caches))]
    ends = {name: leaf for name, leaf in params.items() if name not in layers}
    x, turn = _embed(model, ends, tokens, position, turn)
    new = []
    for layer, cache in zip(layers, caches, strict=True):
        x, cache = _attend_and_feed(model.block, params[layer], x, turn, cache, position)
        new.append(cache)
    return _choose(model, sampling, ends, x, position + tokens.shape[1], key), tuple(new)


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
    key: jax.Array | None,
    *,
    count: int,
) -> tuple[jax.Array, Caches]:
    """Tokens `[batch, count]` of so many calls of `advance`, and the caches, in one dispatch.

    Blocks are not scanned: XLA would copy each one's weights before products read them, which takes
    as long as the products.
    """

    def step(carry: tuple[jax.Array, Caches, jax.Array], turn: Turn) -> tuple[Any, jax.Array]:
        before, held, at = carry
        following, held = advance(model, sampling, params, before, held, at, key, turn)
        return (following, held, at + 1), following[:, 0]

    # Before the loop: within it, XLA computes sines and cosines again in every block.
    turns = jax.tree.map(lambda x: x[:, None], rotations(model.config, count, position))
    (_, caches, _), chosen = jax.lax.scan(step, (tokens, caches, position), turns)
    return chosen.T, caches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generator:
    """A model with its weights, ready to continue texts."""

    model: Llama  # what computes logits
    params: Any  # its parameters, quantized or not
    cache: Any = None  # block format of the caches, or None
    cache_dtype: Any = jnp.float32  # of caches without a format
    sampling: Sampling = GREEDY  # how tokens are chosen
    stride: int = 8  # tokens that are computed in one dispatch, after the first

    def caches(self, tokens: int) -> Caches:
        """Empty caches for so many tokens at least."""
        config, options = self.model.config, dict(format=self.cache, dtype=self.cache_dtype)
        shape = (1, -(-tokens // _ROWS) * _ROWS, config.kv_heads, config.head_width)
        empty = jax.jit(functools.partial(KVCache.zeros, *shape, **options))
        return tuple(empty() for _ in range(config.layers))

    def steps(
        self, tokens: Any, caches: Caches, position: int, key: jax.Array | None
    ) -> tuple[jax.Array, Caches]:
        """`stride` steps: see `advance_many`."""
        held, at = (self.model, self.sampling, self.params), np.int32(position)
        return advance_many(*held, tokens, caches, at, key, count=self.stride)

    def stream(self, prompt: Sequence[int], max_tokens: int, seed: int = 0) -> Iterator[int]:
        """Tokens after a prompt: the first as soon as it is there, then `stride` at a time."""
        position, context = len(prompt), self.model.config.context
        if not 0 < position < context:
            raise ValueError(
                "generate: a prompt must have at least one token and leave room in the context, "
                f"got {position} tokens, context={context}"
            )
        count = min(max_tokens, context - position)
        if count < 1:
            return
        key = jax.random.key(seed) if self.sampling.temperature else None
        strides = -(-(count - 1) // self.stride)
        caches = self.caches(position + strides * self.stride)
        held, tokens = (self.model, self.sampling, self.params), np.asarray([prompt], np.int32)
        ahead, caches = advance(*held, tokens, caches, np.int32(0), key)
        # Before the program of a stride is compiled; an index of JAX's would be a program too.
        yield int(np.asarray(ahead)[0, 0])
        last, shown = ahead, np.zeros((1, 0), np.int32)
        for _ in range(strides):
            ahead, caches = self.steps(last, caches, position, key)
            position, last = position + self.stride, ahead[:, -1:]
            # Those before, while these are being computed.
            yield from map(int, np.asarray(shown)[0])
            shown, count = ahead, count - self.stride
        yield from map(int, np.asarray(shown)[0, : count + self.stride - 1])
