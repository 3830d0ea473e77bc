"""Survivors that somebody has looked at: why no test finds them."""

from typing import NamedTuple


class Explanation(NamedTuple):
    """Why a mutant survives.

    Attributes:
      equivalent: whether it gives the same for every input, so that no test can find it.
      why: in one line.
    """

    equivalent: bool
    why: str


def same(why: str) -> Explanation:
    """Equivalent: the same bits for every input."""
    return Explanation(True, why)


def accepted(why: str) -> Explanation:
    """Another behaviour that no test is worth its time for."""
    return Explanation(False, why)


# By module, and the changed line before and after.
EXPLAINED: dict[tuple[str, str, str], Explanation] = {
    (
        "mx_jax.reference.hadamard",
        "values, signed = groups * signs.astype(jnp.bfloat16), _sylvester(signs.size)",
        "values, signed = groups / signs.astype(jnp.bfloat16), _sylvester(signs.size)",
    ): same("signs are 1 and -1"),
    (
        "mx_jax.codecs.scale",
        "for _ in range(3):",
        "for _ in range( 4):",
    ): same("what is nearest already stays, however often it is asked"),
    (
        "mx_jax.codecs.scale",
        "twice = 2 * ((top_digits << clip(shift, 0, 31)) - bottom_digits * digits)",
        "twice = 2 * ((top_digits << clip(shift, -1, 31)) - bottom_digits * digits)",
    ): same("what becomes of shifts below 21 is left out"),
    (
        "mx_jax.reference.quantize",
        "small = largest < (127 - 64) << 23",
        "small = largest < (127 - 63) << 23",
    ): same("so far from subnormals a tensor lifted and lowered gives the same scale"),
    (
        "mx_jax.codecs.scale",
        "table = divided(jnp.arange(256, dtype=jnp.uint8), tensor_scale.reshape(1), _corrected)",
        "table = divided(jnp.arange( 257, dtype=jnp.uint8), tensor_scale.reshape(1), _corrected)",
    ): same("a byte never reaches the entry that is added"),
    (
        "mx_jax.codecs.packing",
        "for index in range(start // given, min(count, -(-(start + wanted) // given))):",
        "for index in range(start // given, max(count, -(-(start + wanted) // given))):",
    ): same("groups are whole, so the end is at most count; what lies beyond it is masked off"),
    (
        "mx_jax.reference.hadamard",
        "size = signs.shape[0]",
        "size = signs.shape[ -1]",
    ): same("signs have one axis"),
    (
        "mx_jax.reference.matmul",
        "lifted = True",
        "lifted = False",
    ): same("a lifted scale is not tiny, so lowering leaves the values alone, only later"),
    (
        "mx_jax.reference.ragged",
        "tensor_scale = None if peaks.tensor_scale is None else peaks.tensor_scale[0]",
        "tensor_scale = None if peaks.tensor_scale is None else peaks.tensor_scale[ 1]",
    ): same("its first axis has a length of one, to which JAX clamps the index"),
    (
        "mx_jax.codecs.indexing",
        "return {new_axes[0]: sizes[old_axes[0]]}",
        "return {new_axes[0]: sizes[old_axes[ -1]]}",
    ): same("there is one old axis"),
    (
        "mx_jax.codecs.indexing",
        "yield [old_axes.pop(0)], []",
        "yield [old_axes.pop( -1)], []",
    ): same("an axis of one with blocks is cut, or all axes are WHOLE, in whichever order"),
    (
        "mx_jax.reference.matmul",
        "exponent, factor = -_HEADROOM, 2.0**_HEADROOM",
        "exponent, factor = -_HEADROOM, 2.0*_HEADROOM",
    ): same("the headroom is 2, and 2 * 2 = 2 ** 2"),
    (
        "mx_jax.codecs.scale",
        "twice = 2 * ((top_digits << clip(shift, 0, 31)) - bottom_digits * digits)",
        "twice = 2 * ((top_digits << clip(shift, 0, 30)) - bottom_digits * digits)",
    ): same("the result is used where the shift is 21 to 26"),
    (
        "mx_jax.codecs.float32",
        "pattern = select(magnitude < HIDDEN, as_float - (149 << 23), magnitude)",
        "pattern = select(magnitude <= HIDDEN, as_float - (149 << 23), magnitude)",
    ): same("the smallest normal number is its pattern times 2^-149 too"),
    (
        "mx_jax.reference.quantize",
        "largest = jnp.max(select(amax < float32.INF, amax, 0), initial=0).reshape((1,) * ndim)",
        "largest = jnp.max(select(amax < float32.INF, amax, -1), initial=0).reshape((1,) * ndim)",
    ): same("the maximum starts at 0"),
    (
        "mx_jax.codecs.packing",
        "field = field | (part << shift if shift >= 0 else part >> -shift)",
        "field = field | (part << shift if shift >= 1 else part >> -shift)",
    ): same("a shift by 0 is the same in either direction"),
    (
        "mx_jax.codecs.indexing",
        "wanted = wanted[0]",
        "wanted = wanted[ -1]",
    ): same("there is one"),
    (
        "mx_jax.reference.quantize",
        "small = largest < (127 - 64) << 23",
        "small = largest < (127 + 64) << 23",
    ): same("lifting is exact, and below 2^64 it does not overflow"),
    (
        "mx_jax.reference.quantize",
        "small = largest < (127 - 64) << 23",
        "small = largest < (127 - 65) << 23",
    ): same("lifting is exact, and from 2^-65 on no scale is near the subnormals"),
    (
        "mx_jax.reference.ragged",
        "return jnp.where((self.group < self.sizes.shape[0])[:, None], x, 0)",
        "return jnp.where((self.group < self.sizes.shape[ -1])[:, None], x, 0)",
    ): same("sizes have one axis"),
}
