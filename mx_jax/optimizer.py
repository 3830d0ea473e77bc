"""Optimizer states in 8 bits: the moments of optax's optimizers in MXFP8, right on average."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import explicit_sharding
from mx_jax.codecs.float32 import ABS, HIDDEN, INF, MANTISSA, float32_bits, from_bits
from mx_jax.ops.arguments import check_is_key

T = TypeVar("T")
U = TypeVar("U")


class QuantizedState(NamedTuple):
    """What `quantize_state` keeps between two steps.

    All arrays, in trees of the optimizer's structure, which `optax.tree_map_params`,
    `nnx.Optimizer` and orbax go by.

    Attributes:
      key: uint32 data of the PRNG key that the next step draws from.
      scales: E8M0 bytes of the blocks, uint8; 0 of what is not quantized.
      state: the optimizer's state, with E4M3 codes, uint8, in place of large moments; those of
        squares, as `nu`, are codes of their roots.
    """

    key: jax.Array
    scales: Any
    state: Any


def quantize_state(
    optimizer: T,
    *,
    key: jax.Array | None = None,
    values: Sequence[str] = ("mu", "trace"),
    squares: Sequence[str] = ("nu",),
    min_size: int = 4096,
) -> T:
    """An optimizer that keeps its moments in MXFP8: 2.06 bytes a parameter where Adam has 8.

    Each step dequantizes the moments, updates them in float32, and quantizes them again, blocks of
    32 (E4M3, scales rounded up). A running mean moves by less than a code a step, so both round
    stochastically: `mu` as it is; of `nu` its root, which has half the octaves, up with odds
    `(nu - low^2) / (high^2 - low^2)` between the codes low and high, which keep its square right
    on average. A root below the smallest normal code of its block is stored as that, never as 0.

    All of it is plain JAX; on CPUs an update takes about three times optax's time.

    Blocks lie along the last axis that 32 divides. The state is sharded as the parameters, and
    takes their PartitionSpecs; where devices hold whole blocks, nothing more is communicated.

    Args:
      optimizer: an `optax.GradientTransformation`, as `optax.adamw(3e-4)`, chained or not.
      key: the PRNG key of the first step; default: `jax.random.key(0)`.
      values: fields of optax's states that hold means of gradients.
      squares: fields that hold means of squares; never negative. Where an optimizer subtracts
        moments, as centered RMSProp does, leave them out.
      min_size: arrays of fewer elements stay as they are.

    Returns:
      A transformation of the same type, with `QuantizedState` as its state.

    Raises:
      TypeError: the optimizer is no GradientTransformation.
      ValueError: min_size below 0; from its `init`, if its state has large arrays, and none in such
        a field.

    Examples:
      >>> import jax.numpy as jnp, mx_jax, optax
      >>> optimizer = mx_jax.quantize_state(optax.adamw(3e-4))
      >>> params = {"kernel": jnp.ones((64, 64)), "bias": jnp.zeros(64)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(params, state, params)
      >>> mu, scales = state.state[0].mu, state.scales[0].mu
      >>> mu["kernel"].dtype, scales["kernel"].shape, mu["bias"].dtype
      (dtype('uint8'), (64, 2), dtype('float32'))
    """
    transformation: Any = optimizer
    if not all(
        callable(getattr(transformation, name, None)) for name in ("init", "update", "_replace")
    ):
        raise TypeError(
            "quantize_state: needs an optax.GradientTransformation, got optimizer of type "
            f"{type(optimizer).__name__}; of optax.MultiSteps pass what its "
            "gradient_transformation() returns, or the optimizer inside it"
        )
    if key is not None:
        check_is_key(key, "quantize_state")
    if not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"quantize_state: min_size must be an int of at least 0, got {min_size=}")
    implementation = jax.random.key_impl(jax.random.key(0) if key is None else key)
    fields = {**dict.fromkeys(values, False), **dict.fromkeys(squares, True)}

    def init(params: object) -> QuantizedState:
        start = jax.random.key(0) if key is None else key
        paths, tree = jax.tree.flatten_with_path(transformation.init(params))
        floats = (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16)
        large = [
            getattr(leaf, "dtype", None) in floats and leaf.ndim > 0 and leaf.size >= min_size
            for _, leaf in paths
        ]
        roots = [_squares(path, fields) for path, _ in paths]
        if any(large) and all(is_square is None for is_square in roots):
            raise ValueError(
                "quantize_state: needs a state with fields of these names, got "
                f"values={tuple(values)}, squares={tuple(squares)}, and none of them among "
                f"{sorted({name for path, _ in paths for name in _fields_of(path)})}; name the "
                "optimizer's own"
            )
        words = jnp.zeros(2, jnp.uint32)
        parts = [
            # Behind a barrier: XLA would fold the cast of zeros, element by element.
            encode(lax.optimization_barrier(leaf), words, root)
            if root is not None and quantizes
            else (leaf, jnp.uint8(0))
            for (_, leaf), quantizes, root in zip(paths, large, roots, strict=True)
        ]
        codes, scales = (jax.tree.unflatten(tree, [part[i] for part in parts]) for i in (0, 1))
        # A copy: a step may donate the state, the caller's key it may not.
        return QuantizedState(jnp.array(jax.random.key_data(start)), scales, codes)

    def update(
        updates: U, state: QuantizedState, params: object = None, **extra: object
    ) -> tuple[U, QuantizedState]:
        paths, tree = jax.tree.flatten_with_path(state.state)
        scales = tree.flatten_up_to(state.scales)
        roots = [
            _squares(path, fields) if scale.ndim else None
            for (path, _), scale in zip(paths, scales, strict=True)
        ]
        # The dtypes of moments, which codes do not have; without parameters, of float32 ones.
        like = _like(
            paths,
            jax.eval_shape(
                transformation.init, jax.tree.map(_wide, updates) if params is None else params
            ),
        )
        before = [
            leaf if root is None else decode(leaf, scale, root, moment.dtype)
            for (_, leaf), scale, root, moment in zip(paths, scales, roots, like, strict=True)
        ]
        updates, after = transformation.update(updates, tree.unflatten(before), params, **extra)
        first, second = jax.random.split(jax.random.wrap_key_data(state.key, impl=implementation))
        words = jax.random.bits(first, (len(paths), 2), jnp.uint32)
        parts = [
            (leaf, scale) if root is None else encode(leaf, words[number], root)
            for number, (leaf, scale, root) in enumerate(
                zip(tree.flatten_up_to(after), scales, roots, strict=True)
            )
        ]
        codes, scales = (jax.tree.unflatten(tree, [part[i] for part in parts]) for i in (0, 1))
        return updates, QuantizedState(jax.random.key_data(second), scales, codes)

    return transformation._replace(init=init, update=update)


def _like(paths: Sequence[tuple[jax.tree_util.KeyPath, object]], state: object) -> list[Any]:
    """The leaves of a state of parameters as they are, where those of `init` are kept."""
    leaves = jax.tree.leaves_with_path(state)
    kept, new = ([jax.tree_util.keystr(path) for path, _ in pairs] for pairs in (paths, leaves))
    if kept != new:
        raise ValueError(
            "quantize_state: update needs the tree that init was given, got another: "
            f"missing={sorted({*kept} - {*new})[:4]}, new={sorted({*new} - {*kept})[:4]} among "
            f"{len(new)} leaves of the state; init again for other parameters"
        )
    return [leaf for _, leaf in leaves]


def _squares(path: jax.tree_util.KeyPath, fields: dict[str, bool]) -> bool | None:
    """Whether a leaf is of squares; None if it is in none of the fields.

    The outermost counts: names further in are those of the parameters.
    """
    return next((fields[name] for name in _fields_of(path) if name in fields), None)


def _fields_of(path: jax.tree_util.KeyPath) -> list[str]:
    return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]


def _wide(x: jax.typing.ArrayLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.promote_types(jnp.result_type(x), jnp.float32))


# Moments as codes ---------------------------------------------------------------------------------
#
# Not the library's casts, which would take half of a step. XLA makes them a part of the
# kernels that compute the moments, which are never written as float32. What they give up is what
# Adam has no use for: numbers below 2^-126, and odds finer than 2^-20, of roots 2^-17.

BLOCK = 32
# E4M3 as float32 patterns: a code shifted by _SHIFT, its exponent counted from _BIAS.
_SHIFT, _BIAS = 20, (127 - 7) << 3
_SMALLEST_NORMAL, _LARGEST = 2.0**-6, 448.0


def blocks_of(shape: tuple[int, ...]) -> Blocks:
    """Along the last axis that 32 divides, or the last."""
    whole = [axis for axis in range(-len(shape), 0) if shape[axis] % BLOCK == 0]
    return (((whole or [-1])[-1], BLOCK),)


@functools.partial(jax.jit, static_argnames=("root", "dtype"), inline=True)
def decode(codes: jax.Array, scales: jax.Array, root: bool, dtype: np.dtype) -> jax.Array:
    """The values, or the squares of roots; as `dequantize`, but numbers below 2^-126 are 0."""
    exponents = scales.astype(jnp.int32)
    factors = from_bits(jnp.where(exponents == 255, INF | 1, exponents << 23))
    if root:
        values = from_bits((codes.astype(jnp.int32) + _BIAS) << _SHIFT)
        return jnp.square(values * _of_elements(factors, codes.shape)).astype(dtype)
    # Sign, exponent and mantissa where float16 has them, 2^8 too small, subnormals included.
    half = (lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16) << 7) & ~0x4000
    values = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    # By 2^4 twice: the factor of the largest moments has no 2^8 left.
    return (16 * values * _of_elements(16 * factors, codes.shape)).astype(dtype)


@functools.partial(jax.jit, static_argnames="root", inline=True)
def encode(x: jax.Array, words: jax.Array, root: bool) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of x, or of its root, rounded stochastically by two random words."""
    x = x.astype(jnp.float32)
    patterns, random = float32_bits(x), random_bits(x, words)
    # As unsigned: a negative number is larger than NaN. So of squares it is an error, as NaN is.
    magnitudes = lax.bitcast_convert_type(patterns, jnp.uint32) if root else patterns & ABS
    pieces, inside = block_shapes.split(magnitudes, blocks_of(x.shape))
    amax = jnp.minimum(lax.reduce_max(pieces, inside), INF).astype(jnp.int32)
    # RCEIL: the smallest power of two that brings the largest to at most 448 = 1.75 * 2^8.
    if root:
        # Of squares to 448^2 = 1.53125 * 2^17, by a power of four; zeros stay zeros.
        exponents = 127 + ((((amax + (MANTISSA - 0x440000)) >> 23) - 127 - 16) >> 1)
        exponents = jnp.where(amax < HIDDEN, 1, exponents)
    else:
        exponents = jnp.maximum(((amax + (MANTISSA - 0x600000)) >> 23) - 8, 1)
    exponents = lax.optimization_barrier(jnp.where(amax >= INF, 255, exponents))
    if root:
        codes = _codes_of_roots(patterns + _of_elements((127 - exponents) << 24, x.shape), random)
    else:
        # E4M3 codes of magnitudes up to 448: up with the odds of what is dropped.
        values = from_bits(magnitudes) * _of_elements(from_bits((254 - exponents) << 23), x.shape)
        # Halfway to the smallest normal number the step halves too: subnormal codes count on.
        subnormal = 0.5 * values + 0.5 * _SMALLEST_NORMAL
        codes = (
            (jnp.maximum(float32_bits(values), float32_bits(subnormal)) + random) >> _SHIFT
        ) - _BIAS
        codes = (codes & 0x7F) | ((patterns >> 24) & 0x80)
    return codes.astype(jnp.uint8), exponents.astype(jnp.uint8)


def _of_elements(factors: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each element's factor. Behind a barrier: computed once a block, and not by each element."""
    factors = lax.optimization_barrier(factors)
    like, inside = block_shapes.split(jnp.zeros(shape, bool), blocks_of(shape))
    factors = jnp.broadcast_to(lax.expand_dims(factors, inside), like.shape)
    return block_shapes.merge(factors, shape, inside)


def _codes_of_roots(squares: jax.Array, random: jax.Array) -> jax.Array:
    """Normal E4M3 codes of roots up to 448, by the patterns of their squares.

    A root is m + f by some power of two, m from 8 to 15: up has the odds
    `((m + f)^2 - m^2) / ((m + 1)^2 - m^2)`, which keep the square right. All numbers but the root
    are exact, and of that only the integer counts: so every machine has the same bits.
    """
    squares = jnp.clip(squares, _pattern(_SMALLEST_NORMAL**2), _pattern(_LARGEST**2))
    squares = squares - _pattern(1.0)
    # In [64, 256), by some power of four.
    square = from_bits((squares & 0xFFFFFF) + _pattern(64.0))
    m = jnp.floor(jnp.sqrt(square))
    # From 1 to 2, in steps of 2^-17.
    odds = from_bits(((random << 3) & 0x7FFFC0) + _pattern(1 + 2.0**-18))
    up = square > odds * (2 * m + 1) + (m * (m - 2) - 1)
    return ((squares >> 24) << 3) + (m.astype(jnp.int32) + 48) + up.astype(jnp.int32)


def _pattern(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def random_bits(x: jax.Array, words: jax.Array) -> jax.Array:
    """20 random bits an element of x, int32: a hash of its position and two random words.

    Fused into what reads it and sharded as x; threefry takes as long as the step. Positions that
    are 16 apart, the halves of a block, take one hash, which the second turns by 16 bits.
    """
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]
    position = sum(
        lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=explicit_sharding(x))
        * jnp.uint32(stride % 2**32)
        for axis, stride in enumerate(strides)
    )
    mixed = (position & ~jnp.uint32(16)) * jnp.uint32(0x9E3779B1) + words[0]
    mixed = (mixed ^ (mixed >> 16)) * (words[1] | 1)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x735A2D97)
    mixed = jnp.where(position & 16, (mixed << 16) | (mixed >> 16), mixed)
    return (mixed >> (32 - _SHIFT)).astype(jnp.int32)
