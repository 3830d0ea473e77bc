"""Caches of keys and values in a block format, in place of the two arrays of Flax's attention."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.formats import BlockFormat
from mx_jax.nn.cache import CacheRows, KVCache, check_tensor_scales, row_format


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """What the keys and values of an attention are kept in; frozen, for a `Rule`.

    Attributes:
      format: a block format or its name, with blocks along the features of a head.
      tensor_scales: of keys and of values, for formats with one (NVFP4): fixed, as found by
        calibration, `amax / 2688`. None: one for each token and head.

    Raises:
      ValueError: a format whose blocks span tokens; tensor scales for a format without, or not
        finite and positive.

    Examples:
      >>> from mx_jax import convert
      >>> fixed = convert.CacheFormat("nvfp4", tensor_scales=(0.004, 0.001))
      >>> convert.Rule("decoder/.*", None, cache=fixed).cache.name
      'nvfp4'
    """

    format: BlockFormat | str
    tensor_scales: tuple[float, float] | None = None

    def __post_init__(self):
        form = row_format(self.format)
        check_tensor_scales(self.tensor_scales, form)
        object.__setattr__(self, "format", form)
        if self.tensor_scales is not None:
            keys, values = self.tensor_scales
            object.__setattr__(self, "tensor_scales", (float(keys), float(values)))

    @property
    def name(self) -> str:
        """The format's name."""
        assert isinstance(self.format, BlockFormat)
        return self.format.name

    def empty(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> KVCache:
        """A cache in place of two arrays `[*batch, length, heads, features]`."""
        *batch, length, heads, features = shape
        sizes = (math.prod(batch), length, heads, features)
        return KVCache.zeros(
            *sizes, format=self.format, dtype=dtype, tensor_scales=self.tensor_scales
        )

    def holding(self, keys: Any, values: Any) -> KVCache:
        """A cache with every token of two arrays `[*batch, length, heads, features]`."""
        empty = self.empty(keys.shape, keys.dtype)
        return empty.append(one_batch(keys), one_batch(values), 0)

    def of_rows(self, keys: Any, values: Any) -> KVCache:
        """The cache whose rows a model's variables hold; arrays of an unconverted one are cast.

        Raises:
          ValueError: rows of another format, or tables in their place.
        """
        if isinstance(keys, Mapping):
            raise ValueError(
                "convert: the cache holds tables instead of rows, as a checkpoint that is restored "
                "without a target; give it the cache of the converted model's init as target, got "
                f"keys={sorted(keys)}"
            )
        if not isinstance(keys, CacheRows) or not isinstance(values, CacheRows):
            return self.holding(keys, values)
        if keys.format != self.format or values.format != self.format:
            stored = keys.format and keys.format.name
            raise ValueError(
                f"convert: the cache is in format={stored}, and its rule asks for "
                f"format={self.name}; make the cache with this model"
            )
        if self.tensor_scales is not None:
            # The rule's, whatever became of the variables: they are often made anew as zeros.
            keys, values = (
                dataclasses.replace(
                    rows,
                    tensor_scale=jnp.full((1, 1, 1, 1), scale, jnp.float32),
                    scale_is_fixed=True,
                )
                for rows, scale in zip((keys, values), self.tensor_scales, strict=True)
            )
        return KVCache(keys=keys, values=values)


def one_batch(x: jax.Array) -> jax.Array:
    """`[*batch, tokens, heads, features]` with one axis of sequences."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def as_array(rows: CacheRows) -> jax.Array:
    """The values of rows as Flax keeps them, `[batch, length, heads, features]`."""
    return rows.read().swapaxes(1, 2)


# Options of attention that attention over codes follows, or that say nothing where nothing is
# dropped; with all others it needs None.
_HARMLESS = {
    "dropout_rate",
    "dropout_rng",
    "deterministic",
    "broadcast_dropout",
    "dtype",
    "is_causal",
    "force_fp32_for_softmax",
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CachedAttention:
    """What an attention calls in place of its attention function while it decodes."""

    # Flax's own call runs as if it did not decode, so that it makes queries, keys and values of the
    # new tokens alone. They are cached here, and attended to with all before them.

    format: CacheFormat
    attention_fn: Callable[..., jax.Array]
    # From the new keys to cached keys and values, and the position of the next token; None where
    # the cache has only just been made.
    get: Callable[[jax.Array], Sequence[Any] | None]
    set: Callable[[CacheRows, CacheRows, jax.Array], None]
    # Whether it is Flax's own, and multiplies in high precision.
    is_flaxs: Callable[[], bool]

    @property
    def __signature__(self) -> inspect.Signature:
        # Flax leaves out what an attention function does not take.
        return inspect.signature(self.attention_fn)

    def __call__(
        self, query: jax.Array, keys: jax.Array, values: jax.Array, **options: Any
    ) -> jax.Array:
        """Cache the keys and values of new tokens, and attend over all so far."""
        cached = self.get(keys)
        if cached is None:
            # As in Flax, these are the longest text there will be, not its tokens.
            return self.attention_fn(query, keys, values, **options)
        if query.shape[:-2] != keys.shape[:-2]:
            raise ValueError(
                "convert: queries, keys and values that are decoded must be of the same sequences "
                f"and tokens, got query.shape={query.shape}, keys.shape={keys.shape}"
            )
        *rows, position = cached
        cache = self.format.of_rows(*rows)
        cache = cache.append(one_batch(keys), one_batch(values), position)
        self.set(cache.keys, cache.values, position + keys.shape[-3])
        # Whether attention over codes computes all of the options.
        drops = options.get("dropout_rate", 0.0) > 0 and not options.get("deterministic", True)
        special = [options[name] for name in options.keys() - _HARMLESS]
        if not drops and all(option is None for option in special) and self.is_flaxs():
            return cache.attend(one_batch(query), position).reshape(query.shape)
        # The decoded rows, later ones masked.
        batch, tokens = query.shape[:-3], query.shape[-3]
        keys, values = (
            as_array(rows).reshape(*batch, cache.length, *keys.shape[-2:])
            for rows in (cache.keys, cache.values)
        )
        seen = jnp.arange(cache.length) <= position + jnp.arange(tokens)[:, None]
        seen = jnp.broadcast_to(seen, (*batch, 1, tokens, cache.length))
        mask = options.pop("mask", None)
        if mask is not None and (mask.ndim != seen.ndim or mask.shape[-1] not in (1, cache.length)):
            raise ValueError(
                "convert: attention that decodes needs a mask over its whole cache, "
                f"[*batch, heads or 1, tokens, {cache.length}], got mask.shape={mask.shape}; later "
                "tokens are masked without one"
            )
        mask = seen if mask is None else jnp.logical_and(mask, seen)
        return self.attention_fn(query, keys, values, **options, mask=mask)
