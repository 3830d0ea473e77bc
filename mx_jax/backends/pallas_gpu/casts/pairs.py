"""Two 16-bit numbers as one word, and back, where array operations know only numbers.

Device code. GPUs work on the halves of a 32-bit register at once; in terms of arrays `[..., n]` of
16 bits and `[..., n / 2]` of 32 bits, lane by lane, nothing moves. Each has a stand-in of the same
meaning for the interpreter, which has no such thing.

Imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Low bytes of the four halves of two words, in order.
_LOW_BYTES = 0x6420


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Views of a tile.

    Attributes:
      shape: of the tile, in numbers.
      numbers: layout of the numbers.
      words: layout of the words, with vectors of half as many.
      interpreted: whether stand-ins are used.
    """

    shape: tuple[int, ...]
    numbers: Any
    words: Any
    interpreted: bool = False

    @property
    def words_shape(self) -> tuple[int, ...]:
        """Shape of the tile, in words."""
        return (*self.shape[:-1], self.shape[-1] // 2)

    def to_words(self, x: Any) -> Any:
        """int32 words of 16-bit numbers, the first in the low half."""
        if self.interpreted:
            return lax.bitcast_convert_type(x.reshape(*self.words_shape, 2), jnp.int32)
        return self._mosaic(_cast_words, x, self.numbers, self.words, jnp.int32)

    def to_numbers(self, words: Any, dtype: Any) -> Any:
        """16-bit numbers of int32 words."""
        if self.interpreted:
            return lax.bitcast_convert_type(words, dtype).reshape(self.shape)
        return self._mosaic(_cast_numbers, words, self.words, self.numbers, dtype)

    def to_bytes(self, words: Any) -> Any:
        """The low byte of each half of int32 words, as uint8."""
        if self.interpreted:
            return lax.bitcast_convert_type(words, jnp.uint8)[..., ::2].reshape(self.shape)
        return self._mosaic(_low_bytes, words, self.words, self.numbers, jnp.uint8)

    def _mosaic(self, change: Callable, x: Any, source: Any, target: Any, dtype: Any) -> Any:
        """Each register changed on its own."""
        shape = self.words_shape if target is self.words else self.shape
        out = plgpu.ShapeDtypeStruct(shape, dtype, layout=target)
        return plgpu.inline_mgpu(arg_types=(source,), return_type=out)(
            lambda _, array: _each_register(change, array, shape, target.to_mgpu(), dtype)
        )(x)


def _each_register(change: Callable, array: Any, shape: Any, layout: Any, dtype: Any) -> Any:
    from jax.experimental.mosaic import gpu

    mgpu: Any = gpu
    registers = np.empty(array.registers.size, dtype=object)
    for i, register in enumerate(array.registers.flat):
        registers[i] = change(register, mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
    signed = (
        jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    )
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=signed,
    )


def _cast_words(register: Any, element: Any) -> Any:
    return _recast(register, element, 1, 2)


def _cast_numbers(register: Any, element: Any) -> Any:
    return _recast(register, element, 2, 1)


def _recast(register: Any, element: Any, more: int, fewer: int) -> Any:
    """The same bits as a vector of another type."""
    from jax.experimental.mosaic import gpu
    from jaxlib.mlir import ir

    mgpu: Any = gpu
    (length,) = register.type.shape
    return mgpu.utils.bitcast(register, ir.VectorType.get((length * more // fewer,), element))


def _low_bytes(register: Any, element: Any) -> Any:
    """Two words at a time by one permutation of their bytes."""
    from jax.experimental.mosaic import gpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    mgpu: Any = gpu
    (length,), word = register.type.shape, ir.IntegerType.get_signless(32)
    halves = [
        mgpu.utils.bitcast(mgpu.utils.vector_slice(register, slice(i, i + 1)), word)
        for i in range(length)
    ]
    joined = [
        mgpu.utils.bitcast(
            llvm.inline_asm(word, [low, high], f"prmt.b32 $0, $1, $2, {_LOW_BYTES};", "=r,r,r"),
            ir.VectorType.get((4,), element),
        )
        for low, high in zip(halves[::2], halves[1::2], strict=True)
    ]
    return joined[0] if len(joined) == 1 else mgpu.utils.vector_concat(joined)
