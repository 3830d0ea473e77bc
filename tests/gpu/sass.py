"""What a compiled kernel's main loop costs, by its disassembly."""

import re
from collections.abc import Sequence

from mx_jax.backends.pallas_gpu.tiles import Tiles


def instructions(disassembly: str) -> list[str]:
    """Every instruction of a kernel, in order, but those that only fill up."""
    result = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", disassembly, re.MULTILINE)
    return [instruction for instruction in result if not instruction.startswith("NOP")]


def main_loop(disassembly: str, marker: str, without: str | None = None) -> Sequence[str]:
    """Instructions of the shortest loop that holds an instruction named `marker`: see `loops`."""
    return min(loops(disassembly, marker, without), key=len)


def loops(disassembly: str, marker: str, without: str | None = None) -> list[list[str]]:
    """Instructions of each loop that holds an instruction named `marker`.

    Args:
      disassembly: what nvdisasm prints.
      marker: the beginning of a name, e.g. `"HGMMA"`.
      without: a name of which the loop holds none.

    Raises:
      ValueError: if no loop holds one.
    """
    labels: dict[str, int] = {}
    instructions: list[str] = []
    every: list[list[str]] = []
    for line in disassembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels:
                every.append(instructions[labels[back[1]] :])
    result = [
        loop
        for loop in every
        if any(marker in instruction for instruction in loop)
        and not (without and any(without in instruction for instruction in loop))
    ]
    if not result:
        raise ValueError(f"loops: no loop holds an instruction marker={marker!r}")
    return result


def issued(disassembly: str, tiles: Tiles) -> tuple[float, float]:
    """Instructions that Hopper's kernel issues for a code of the weights.

    A turn of a warpgroup is `64 * tiles.k` codes: 128 threads decode and multiply them, after 32
    threads have copied a step of `tiles.n * tiles.k`.

    Returns:
      Of a multiplying thread for each of its codes; and of the copying warp, as if each of its
      threads stood for one of those that it copies for.
    """
    multiplying = main_loop(disassembly, "HGMMA")
    copying = main_loop(disassembly, "UTMALDG", without="HGMMA")
    turn, step = 64 * tiles.k / 128, tiles.n * tiles.k / 32
    return len(multiplying) / turn, len(copying) / step
