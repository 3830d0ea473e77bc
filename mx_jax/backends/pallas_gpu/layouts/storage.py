"""Where each bit of a code lies in packed weights: data per width, from which all else follows."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.formats import ElementFormat


class Field(NamedTuple):
    """Bits of a code in a 16-bit half of a word.

    Attributes:
      plane: which of the words that a thread loads for the code's place.
      lowest: of the code's bits.
      width: how many bits.
      at: where the lowest lies in the half.
    """

    plane: int
    lowest: int
    width: int
    at: int


# Where each code of a half lies.
Slot = tuple[Field, ...]


def _whole(bits: int, magnitude: int, sign: int) -> Slot:
    """A code in one plane: where its magnitude's lowest bit lies, and its sign."""
    return Field(0, 0, bits - 1, magnitude), Field(0, bits - 1, 1, sign)


def _split(*tops: tuple[int, int]) -> tuple[Slot, ...]:
    """Six bits in three planes: where in the third each code has its highest magnitude bit, and its
    sign; the first two hold four codes each, four bits of all."""
    return tuple(
        (Field(i // 4, 0, 4, 4 * (i % 4)), Field(2, 4, 1, top), Field(2, 5, 1, sign))
        for i, (top, sign) in enumerate(tops)
    )


# By stored bits and mantissa bits of an element, None for any. Four bits: the first two codes are
# moved to where bfloat16 has them by one shift for magnitude and sign, or none. Found by trying
# all: no other order takes fewer instructions. Six bits: the two bits that lie apart from the other
# four are as far from each other as in bfloat16, for as many codes as fit: one shift for both.
SLOTS: dict[tuple[int, int | None], tuple[Slot, ...]] = {
    (4, None): tuple(_whole(4, *at) for at in ((6, 15), (3, 12), (0, 13), (9, 14))),
    (6, 3): _split((8, 15), (7, 14), (6, 13), (5, 12), (4, 11), (3, 10), (2, 9), (0, 1)),
    (6, 2): _split((9, 15), (8, 14), (7, 13), (6, 12), (5, 11), (4, 10), (2, 3), (0, 1)),
    (8, None): tuple(_whole(8, *at) for at in ((8, 15), (0, 7))),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How codes of an element lie in packed weights.

    Attributes:
      bits: that a code takes.
      slots: where each code of a half lies.
    """

    bits: int
    slots: tuple[Slot, ...]

    @functools.cached_property
    def planes(self) -> int:
        """Words that hold the codes of one place."""
        return 1 + max(field.plane for slot in self.slots for field in slot)

    @functools.cached_property
    def words(self) -> int:
        """32-bit words of one row that lie together: as many for each of four threads."""
        return 16 if self.planes == 1 else 8

    @functools.cached_property
    def group(self) -> int:
        """Codes of one row that lie together."""
        return self.words * 2 * len(self.slots)


@functools.cache
def storage(element: ElementFormat) -> Storage:
    """Of the narrowest kind that holds an element's codes."""
    for bits, mantissa in SLOTS:
        if bits == 8 or (bits == element.bits and mantissa in (None, element.mantissa_bits)):
            slots = SLOTS[bits, mantissa]
            if bits != element.bits:
                slots = tuple(_whole(element.bits, low.at, sign.at) for low, sign in slots)
            return Storage(bits=bits, slots=slots)
    raise AssertionError(element)


def words_of(codes: Sequence[jax.Array], element: ElementFormat) -> list[jax.Array]:
    """A word of each plane, int32, of the codes of each slot, uint16 `[..., lane]`."""
    stored = storage(element)
    halves = [jnp.zeros_like(codes[0]) for _ in range(stored.planes)]
    for of_slot, slot in zip(codes, stored.slots, strict=True):
        for field in slot:
            bits = of_slot >> field.lowest & (1 << field.width) - 1
            halves[field.plane] |= bits << field.at
    return [lax.bitcast_convert_type(half, jnp.int32) for half in halves]


def codes_of(words: Sequence[jax.Array], element: ElementFormat) -> list[jax.Array]:
    """The inverse of `words_of`, as uint8."""
    halves, codes = [lax.bitcast_convert_type(word, jnp.uint16) for word in words], []
    for slot in storage(element).slots:
        bits = (
            (halves[field.plane] >> field.at & (1 << field.width) - 1) << field.lowest
            for field in slot
        )
        codes.append(functools.reduce(lax.bitwise_or, bits).astype(jnp.uint8))
    return codes
