"""What one program of a kernel computes, and how that follows from the number of rows."""

import dataclasses
import math

# The copying warpgroup only issues copies: it gives the others its registers.
COPYING_REGISTERS = 40
_PROCESSOR_REGISTERS, _MOST_REGISTERS = 65536, 256


def launch_registers(warpgroups: int) -> int:
    """Registers that a thread of so many warpgroups starts with: what ptxas gives, in eights."""
    return min(_PROCESSOR_REGISTERS // (128 * warpgroups) // 8 * 8, _MOST_REGISTERS)


def multiplying_registers(warpgroups: int) -> int:
    """What a thread of each multiplying warpgroup asks for, beside one warpgroup that copies.

    All together at most what they were launched with: `setmaxnreg` waits for registers until there
    are as many, so for more it would wait for ever.
    """
    all_registers = launch_registers(warpgroups + 1) * (warpgroups + 1)
    return min((all_registers - COPYING_REGISTERS) // warpgroups // 8 * 8, _MOST_REGISTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What one program of a kernel computes.

    Attributes:
      m: rows of activations, or of the left operand.
      n: rows of weights, or of the right operand.
      k: length of one step along k.
      stages: steps in flight.
      splits: programs that share a tile's k and add their sums.
      parts: warpgroups of a program that share its rows, take turns at its steps, and add their
        sums in shared memory. Only Hopper's kernel knows more than one.
      stripes: programs that the steps of all tiles are dealt to evenly, one tile after the other,
        whatever `splits` says. 0: `splits` for each tile. Only Hopper's kernel knows others.
      programs: that compute whole tiles, one after the other, and store the sums of one while the
        next is multiplied. 0: one program for each tile. Only Blackwell's kernel for block-scaled
        operands knows others, and two `ctas`.
      ctas: thread blocks, on two processors, that a program is made of: each holds half of a tile's
        rows of either operand.
    """

    m: int
    n: int = 128
    k: int = 128
    stages: int = 4
    splits: int = 1
    parts: int = 1
    stripes: int = 0
    programs: int = 0
    ctas: int = 1

    @property
    def whole(self) -> bool:
        """Whether no two programs share a tile."""
        return self.splits == 1 and not self.stripes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a kernel does with codes of one width.

    Attributes:
      tiles: (largest number of rows, tiles), ascending; the last are for any number.
      crossover: rows from which it is faster to dequantize the weights once and let XLA multiply in
        bfloat16. At so many rows the tensor cores are the bound for either, and a kernel decodes
        the same weights again for every tile of rows.
    """

    tiles: tuple[tuple[float, Tiles], ...]
    crossover: float = math.inf
