"""What a compiled kernel's main loop costs, by its disassembly."""

import re
from collections.abc import Sequence


def instructions(disassembly: str) -> list[str]:
    """Every instruction of a kernel, in order, but those that only fill up."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", disassembly, re.MULTILINE)
    return [instruction for instruction in found if not instruction.startswith("NOP")]


def main_loop(disassembly: str, marker: str) -> Sequence[str]:
    """Instructions of the shortest loop that holds an instruction named `marker`.

    Args:
      disassembly: what nvdisasm prints.
      marker: the beginning of a name, e.g. `"HGMMA"`.

    Raises:
      ValueError: if no loop holds one.
    """
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[Sequence[str]] = []
    for line in disassembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels:
                loops.append(instructions[labels[back[1]] :])
    found = [loop for loop in loops if any(marker in instruction for instruction in loop)]
    if not found:
        raise ValueError(f"main_loop: no loop holds an instruction marker={marker!r}")
    return min(found, key=len)
