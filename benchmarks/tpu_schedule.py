"""How often a TPU executes each bundle of a program, from the bundles that libtpu dumps.

A TPU's core issues one bundle of instructions a cycle, in the order that the compiler chose. Scalar
instructions decide its loops, predicates and branches, nearly always from the program's constants:
executing those alone, in Python, says how often every bundle runs, how many bytes every DMA moves
and how many slots of every unit are filled. What memory or an input decides is unknown; it is
counted (`Execution.undecided`), and never guessed where it decides how often a loop runs
(`Execution.endless`).

Waits, for a DMA or another unit, are no bundles.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# Of branches whose delay slots are as many as the compiler filled: at most.
_MOST_SLOTS = 6
# The unit of a DMA's size.
GRANULE = 32
# Bundles with scalar instructions; millions are a loop that does not end, for all that is known.
_MOST_STEPS = 5_000_000
_WORD = 0xFFFFFFFF

_BUNDLE = re.compile(r"^[ \t]*(?:0x[0-9a-f]+|0)[ \t]+(?:[A-Z]{2})?[ \t]*:[ \t>]*\{", re.MULTILINE)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_CALL = re.compile(r"\binlined_call\b[^/;]*/\*\s*%?([^\s=*]+)")
_INSTRUCTION = re.compile(
    r"(?:%[a-z]*\d+(?:_([a-z]+\d+))?\s*=\s*)?([A-Za-z_][\w.\-]*)\s*(.*)", re.DOTALL
)
_ADDRESS = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\s*(.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((!?%[^,)]*)(?:,\s*([^)]*))?\)\s*,?\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"(!?)%[a-z]*\d+_([sp]\d+)")
# The memory space of names, each of which is set once.
_SPACE = re.compile(r"%(\w+) = [a-z_]+\.(hbm|vmem|smem)\b")

Value = int | None
Registers = dict[str, Value]


class Operand(NamedTuple):
    """A register, negated if it is a predicate that is so, or a constant, or unknown."""

    register: str = ""
    value: Value = None
    negated: bool = False

    def read(self, registers: Registers) -> Value:
        if not self.register:
            return self.value
        value = registers.get(self.register)
        return 1 - value if self.negated and value is not None else value


class Instruction(NamedTuple):
    """A scalar instruction.

    Attributes:
      opcode: its name; of those that this file tells apart by more, `"branch"`, `"dma"`, `"call"`.
      result: the register that it sets, or where it spills to.
      operands: of a DMA its size, in granules.
      predicate: whether it executes, if not always.
      otherwise: the result where the predicate is false; None: it stays as it was.
      label: the region that a branch leads to, the opcode of a DMA, or the kernel that is called.
    """

    opcode: str
    result: str = ""
    operands: tuple[Operand, ...] = ()
    predicate: Operand = Operand(value=1)
    otherwise: Operand | None = None
    label: str = ""

    def reads(self) -> Iterable[str]:
        """Registers; "" for none."""
        operands = (*self.operands, self.predicate, self.otherwise)
        return (operand.register for operand in operands if operand is not None)


class Execution(NamedTuple):
    """The counts of a run.

    Attributes:
      counts: how often each bundle executed.
      moved: bytes by a DMA's opcode.
      calls: how often each kernel was called.
      undecided: branches and DMAs as executed that something unknown decides.
      endless: whether a loop's number of turns is unknown: counts are no more than a lower bound.
    """

    counts: list[int]
    moved: Counter[str]
    calls: Counter[str]
    undecided: int
    endless: bool


def _signed(value: int) -> int:
    return ((value & _WORD) ^ 0x80000000) - 0x80000000


def _unsigned(value: int) -> int:
    return value & _WORD


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": lambda a, b: a + b,
    "ssub": lambda a, b: a - b,
    "smul": lambda a, b: a * b,
    "smulhi": lambda a, b: (a * b) >> 32,
    "sshll": lambda a, b: a << (b & 31),
    "sshrl": lambda a, b: _unsigned(a) >> (b & 31),
    "sshra": lambda a, b: _signed(a) >> (b & 31),
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "pxor": lambda a, b: a ^ b,
    "smin": min,
    "smax": max,
}
# Addresses are counted from the beginning of their buffer: they decide nothing but differences.
_COPIES = ("smov", "pmov", "int_to_ptr")
_BUFFERS = ("inlined_call_operand", "scalar_parameter_address")


def _and(values: Sequence[Value]) -> Value:
    if 0 in values:
        return 0
    return None if None in values else 1


def _not(value: Value) -> Value:
    return None if value is None else 1 - value


def computed(opcode: str, values: Sequence[Value], upper: bool = False) -> Value:
    """The result of a scalar instruction; None where it is unknown.

    Args:
      opcode: as dumped, such as `"scmp.lt.s32.totalorder"`.
      values: of its operands.
      upper: whether a selection that is unknown takes the larger of both.
    """
    name, *kind = opcode.split(".")
    if name in _BUFFERS:
        return 0
    if name == "scalar_select":
        condition, *choices = values
        if condition is not None:
            return choices[0 if condition else 1]
        known = [choice for choice in choices if choice is not None]
        return max(known) if upper and len(known) == 2 else None
    if name == "pand":
        return _and(values)
    if name == "pnand":
        return _not(_and(values))
    if name == "por":
        return _not(_and([_not(value) for value in values]))
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    if name == "pneg":
        return 1 - known[0]
    if name in _COPIES:
        return known[0]
    if name == "scalar_lea":
        return _unsigned(sum(known))
    if len(known) != 2 or name not in (*_ARITHMETIC, "scmp"):
        return None
    typed = _signed if "s32" in kind else _unsigned
    a, b = map(typed, known)
    return int(_COMPARE[kind[0]](a, b)) if name == "scmp" else _unsigned(_ARITHMETIC[name](a, b))


class Schedule:
    """The bundles of a kernel; keeps the instructions that decide how often each executes."""

    def __init__(self, text: str):
        """
        Args:
          text: of a file `...-final_bundles.txt`.
        """
        spaces = dict(_SPACE.findall(text))
        starts = list(_BUNDLE.finditer(text))
        ends = [start.start() for start in starts[1:]] + [len(text)]
        self.regions: dict[str, int] = {}
        self.bundles: list[list[Instruction]] = []
        # Where a region begins, and what is in no loop and not empty.
        self.begins: list[bool] = []
        self.outside: list[bool] = []
        for start, end in zip(starts, ends, strict=True):
            chunk = text[start.end() : end]
            self.regions |= dict.fromkeys(_REGION.findall(chunk), len(self.bundles))
            self.bundles.append(_instructions(chunk, spaces))
            self.begins.append("Start region" in chunk)
            self.outside.append(">" not in start[0] and bool(chunk.partition("}")[0].strip()))
        self._slice()

    def __len__(self) -> int:
        return len(self.bundles)

    def _slice(self) -> None:
        """Drop every instruction whose result decides nothing."""
        actions = "branch", "dma", "call"
        every = [instruction for bundle in self.bundles for instruction in bundle]
        needed = {
            name
            for instruction in every
            if instruction.opcode in actions
            for name in instruction.reads()
        }
        before = -1
        while len(needed) > before:
            before = len(needed)
            needed |= {
                name
                for instruction in every
                if instruction.result in needed
                for name in instruction.reads()
            } - {""}
        self.bundles = [
            [
                instruction
                for instruction in bundle
                if instruction.opcode in actions or instruction.result in needed
            ]
            for bundle in self.bundles
        ]

    def behind(self, index: int, target: int, delay_slots: int | None) -> int:
        """The first bundle that a branch that is taken skips."""
        if delay_slots is not None:
            return min(index + 1 + delay_slots, len(self))
        end = min(index + 1 + _MOST_SLOTS, len(self))
        for at in range(index + 1, end):
            if self.begins[at] or (target <= index and self.outside[at]):
                return at
        return end

    def run(self, delay_slots: int | None, upper: bool = False) -> Execution:
        """Execute it once.

        Args:
          delay_slots: how many bundles behind a branch execute before it is taken; None: up to
            where, by libtpu's notes, something else begins.
          upper: whether bundles and DMAs behind an undecided predicate count.
            False is for kernels, where data decide of rare cases; True for the top level, where
            XLA asks whether an operand was already fetched, or the random numbers' state was set.
        """
        return _Machine(self, delay_slots, upper).run()


class _Machine:
    """The state of a run."""

    def __init__(self, schedule: Schedule, delay_slots: int | None, upper: bool):
        self._schedule, self._delay_slots, self._upper = schedule, delay_slots, upper
        self._registers: Registers = {}
        self._moved: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._undecided, self._endless = 0, False

    def run(self) -> Execution:
        bundles, size = self._schedule.bundles, len(self._schedule)
        # The next bundle that has instructions, from each on: between them nothing is decided.
        following = [size] * (size + 1)
        for index in reversed(range(size)):
            following[index] = index if bundles[index] else following[index + 1]
        # +1 where a straight stretch begins, -1 behind its end.
        changes = [0] * (size + 1)
        index = begin = steps = 0
        target, leave = None, size
        while steps < _MOST_STEPS:
            steps += 1
            index = following[index]
            if index >= leave:
                changes[begin] += 1
                changes[leave] -= 1
                if target is None:
                    break
                index = begin = target
                target, leave = None, size
                continue
            branch = self._execute(index)
            if branch is not None and target is None:
                target, leave = branch, self._schedule.behind(index, branch, self._delay_slots)
            index += 1
        else:
            self._endless = True
        counts, total = [], 0
        for change in changes[:-1]:
            total += change
            counts.append(total)
        return Execution(counts, self._moved, self._calls, self._undecided, self._endless)

    def _execute(self, index: int) -> int | None:
        """A bundle, whose instructions read before any writes; where it branches to, if so."""
        registers, target = self._registers, None
        written: Registers = {}
        for instruction in self._schedule.bundles[index]:
            predicate = instruction.predicate.read(registers)
            if instruction.opcode == "branch":
                to = self._schedule.regions[instruction.label]
                if self._is_taken(predicate, is_back=to <= index):
                    target = to
            elif instruction.opcode == "call":
                self._calls[instruction.label] += 1
            elif instruction.opcode == "dma":
                self._move(instruction, predicate)
            elif predicate is None:
                written[instruction.result] = None
            elif predicate:
                values = [operand.read(registers) for operand in instruction.operands]
                written[instruction.result] = computed(instruction.opcode, values, self._upper)
            elif instruction.otherwise is not None:
                written[instruction.result] = instruction.otherwise.read(registers)
        registers.update(written)
        return target

    def _is_taken(self, predicate: Value, is_back: bool) -> bool:
        if predicate is not None:
            return bool(predicate)
        self._undecided += 1
        self._endless |= is_back
        return not is_back and not self._upper

    def _move(self, copy: Instruction, predicate: Value) -> None:
        size = copy.operands[0].read(self._registers)
        if predicate is None or (predicate and size is None):
            self._undecided += 1
        if size is not None and (predicate or (predicate is None and self._upper)):
            self._moved[copy.label] += size * GRANULE


def _instructions(chunk: str, spaces: dict[str, str]) -> list[Instruction]:
    """The scalar instructions of a bundle."""
    calls = iter(_CALL.findall(chunk))
    text = _COMMENT.sub(lambda note: "size=" if "_in_granules=" in note[1] else "", chunk)
    instructions = []
    for piece in text[: text.rfind("}")].split(";;"):
        match = _INSTRUCTION.match(piece.strip())
        if match is None:
            continue
        result, opcode, rest = match.groups()
        if opcode == "inlined_call":
            instructions.append(Instruction("call", label=next(calls)))
        elif opcode.startswith(("sbr", "dma.")) or opcode == "sst":
            instructions += _action(opcode, rest, spaces)
        elif result and result[0] in "sp" and opcode != "sphi":
            # An sphi's operands and result are one register.
            instructions.append(_scalar(result, opcode, rest))
    return instructions


def _action(opcode: str, rest: str, spaces: dict[str, str]) -> Iterable[Instruction]:
    """A branch, a DMA or a spilled register."""
    address, rest = _address(rest)
    predicate, _, rest = _predicated(rest)
    if opcode.startswith("sbr"):
        label = rest.partition("$region")[2].split()[0]
        yield Instruction("branch", predicate=predicate, label=label)
    elif opcode == "sst":
        if "_spill" in address:
            yield Instruction("smov", address, (_operand(rest),), predicate)
    elif not opcode.startswith("dma.done"):
        source, _, behind = rest.partition("size=")
        size, target, *_ = [*behind.split(","), ""]
        if opcode == "dma.general":
            ends = [spaces.get(name.strip(" ,%"), "") for name in (source, target)]
            source = ends[0] or _OTHER[ends[1]]
            opcode = f"dma.{source}_to_{ends[1] or _OTHER[source]}"
        yield Instruction("dma", "", (_operand(size),), predicate, label=opcode)


# Where a DMA's other end is, if nothing tells.
_OTHER = {"hbm": "vmem", "vmem": "hbm", "smem": "hbm", "": "hbm"}


def _scalar(result: str, opcode: str, rest: str) -> Instruction:
    """An instruction that sets a scalar register."""
    if opcode == "sld":
        address, rest = _address(rest)
        predicate, otherwise, _ = _predicated(rest)
        source = Operand(address) if "_spill" in address else Operand()
        return Instruction("smov", result, (source,), predicate, otherwise)
    predicate, otherwise, rest = _predicated(rest)
    operands = tuple(
        _operand(operand) for operand in re.sub(r"\[[^\]]*:[^\]]*\]", "", rest).split(",")
    )
    if opcode.startswith("int_to_ptr"):
        # A name, not an instruction: in the bundle that sets the same register.
        predicate = Operand(value=0) if operands[0].register == result else predicate
    return Instruction(opcode, result, operands, predicate, otherwise)


def _address(rest: str) -> tuple[str, str]:
    match = _ADDRESS.match(rest)
    return (match[1], match[2]) if match else ("", rest)


def _predicated(rest: str) -> tuple[Operand, Operand | None, str]:
    """`(!%p) a, b` or `(%p, old), new`: predicate, the result if it is false, and the rest."""
    match = _PREDICATE.match(rest)
    if match is None:
        return Operand(value=1), None, rest
    return _operand(match[1]), _operand(match[2]) if match[2] else None, match[3]


def _operand(text: str) -> Operand:
    text = text.strip()
    if match := _REGISTER.fullmatch(text):
        return Operand(match[2], negated=bool(match[1]))
    if text.startswith("["):
        return Operand(value=0)
    number = re.match(r"-?\d+", text)
    return Operand(value=int(number[0])) if number else Operand()
