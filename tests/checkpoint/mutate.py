"""Damaged and hostile checkpoints by the thousand: each is read, or refused with its name.

Files of every kind are changed at random: cut short, flipped, overwritten with hostile numbers, and
their JSON edited. What else happens to a reader is a finding: another exception, a refusal that
does not say which file, more than a few seconds, or much memory. An input is made by its number and
the seed alone, so `--only NUMBER` makes it again. A crash ends the run, and the last number said
is at most a hundred before it.
"""

import argparse
import collections
import dataclasses
import faulthandler
import json
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.checkpoint.samples import Files, Reader, Sample, samples

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mutated_checkpoints.json"
SECONDS, MEMORY = 10.0, 256 << 20

HOSTILE_NUMBERS = (0, 1, 2**7, 2**8 - 1, 2**31 - 1, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, "", "..", "../../etc/passwd", "/dev/zero", "a\0b", "\ud800", [], {}, [[]]),
    *(-1, 0, 1.5, 2**31, 2**60, 2**63, 2**64, 10**400, float("nan"), float("inf"), -(2**63)),
    *([0, 2**60], [2**40, 2**40], [-1, 2], ["a"], "F32", "U8", "BOOL", "F4", "modelopt", "fp8"),
)


def mutated(files: Files, draw: random.Random) -> Files:
    """The files with one of them changed, in one to three ways."""
    name = draw.choice(sorted(files))
    content = files[name]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        content = draw.choice(_CHANGES)(name, content, draw)
    return files | {name: content}


def _cut(name: str, content: bytes, draw: random.Random) -> bytes:
    del name
    at = draw.randrange(len(content) + 1)
    return content[:at] if draw.random() < 0.7 else content + bytes(draw.randrange(1, 40))


def _flip(name: str, content: bytes, draw: random.Random) -> bytes:
    del name
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if changed:
            # The header is where it hurts.
            reach = len(changed) if draw.random() < 0.3 else min(len(changed), 600)
            changed[draw.randrange(reach)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _number(name: str, content: bytes, draw: random.Random) -> bytes:
    """A hostile number, of four or eight bytes, over what is there."""
    del name
    form = draw.choice(("<I", "<Q"))
    number = draw.choice(HOSTILE_NUMBERS) & (2 ** (8 * struct.calcsize(form)) - 1)
    at = draw.randrange(min(len(content), 600) + 1)
    put = struct.pack(form, number)
    return content[:at] + put + content[at + len(put) :]


def _moved(name: str, content: bytes, draw: random.Random) -> bytes:
    """A piece left out, doubled, or put elsewhere."""
    del name
    first, last = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + draw.choice((1, 4, 8, 64)))
    at, piece = draw.randrange(len(content) + 1), content[first:last]
    rest = content if draw.random() < 0.5 else content[:first] + content[last:]
    return rest[:at] + piece + rest[at:] if draw.random() < 0.7 else rest


def _json(name: str, content: bytes, draw: random.Random) -> bytes:
    """A header's or a file's JSON with one value in it changed, where there is JSON."""
    header = name.endswith(".safetensors")
    try:
        length = int.from_bytes(content[:8], "little") if header else len(content)
        start = 8 if header else 0
        tree = json.loads(content[start : start + length])
        edited = json.dumps(_edited(tree, draw)).encode()
    except (ValueError, RecursionError):
        return _flip(name, content, draw)
    if not header:
        return edited
    edited += b" " * (-len(edited) % 8)
    return len(edited).to_bytes(8, "little") + edited + content[8 + length :]


def _edited(tree: Any, draw: random.Random, depth: int = 0) -> Any:
    """The tree with one value replaced, left out or renamed; JSON in strings is edited too."""
    if isinstance(tree, str) and tree[:1] in "[{" and draw.random() < 0.9:
        try:
            return json.dumps(_edited(json.loads(tree), draw, depth + 1))
        except ValueError:
            return draw.choice(HOSTILE_VALUES)
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.1:
        return draw.choice(HOSTILE_VALUES)
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key, copy = draw.choice(keys), tree.copy()
    how = draw.random()
    if how < 0.75:
        copy[key] = _edited(copy[key], draw, depth + 1)
    elif how < 0.85:
        del copy[key]
    elif isinstance(copy, dict):
        copy[draw.choice([str(other) for other in keys] + ["", "new", "__metadata__"])] = copy[key]
    else:
        copy.append(copy[key])
    return copy


_CHANGES = (_cut, _flip, _number, _moved, _json, _json, _json)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What should not have happened to input `number` of `kind`."""

    number: int
    kind: str
    what: str


class _TooLong(BaseException):
    """Raised by the alarm; no reader may catch it."""


def outcome(read: Reader, folder: Path, seconds: float = SECONDS) -> str:
    """ "read", "refused", or what should not have happened."""

    def ring(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        read(folder)
    except _TooLong:
        return f"took more than {seconds} s"
    except (ValueError, FileNotFoundError) as error:
        return "refused" if str(folder) in str(error) else f"does not say which file: {error!r}"
    except Exception as error:
        return f"another exception: {error!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "read"


def inputs(
    seed: int, numbers: Iterator[int] | range, names: Sequence[str] | None = None
) -> Iterator[tuple[int, Sample, Files]]:
    """Each number's input: of which sample, of those with the names, and its files."""
    kinds = [sample for sample in samples() if names is None or sample.name in names]
    for number in numbers:
        draw = random.Random(f"{seed} {number}")
        sample = kinds[number % len(kinds)]
        yield number, sample, mutated(sample.files, draw)


def put(folder: Path, files: Files) -> None:
    """Write an input's files to a folder that is not there yet."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def run(
    seed: int,
    numbers: range,
    say: Callable[[int], None] = lambda number: None,
    names: Sequence[str] | None = None,
) -> tuple[collections.Counter[tuple[str, str]], list[Finding]]:
    """How often each kind was read and refused, and findings."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    findings = []
    with tempfile.TemporaryDirectory() as base:
        for number, sample, files in inputs(seed, numbers, names):
            say(number)
            # A folder of its own: what was read may still be a view of its file.
            folder = Path(base) / str(number)
            put(folder, files)
            what = outcome(sample.read, folder)
            if what not in ("read", "refused"):
                findings.append(Finding(number, sample.name, what))
                what = "found"
            counts[sample.name, what] += 1
            shutil.rmtree(folder)
    return counts, findings


def limit_memory(more: int) -> None:
    """Refuse this process more memory than it has and `more`, so that a bomb is an exception."""
    status = Path("/proc/self/status").read_text()
    result = re.search(r"VmData:\s+(\d+)", status)
    if result is None:
        raise RuntimeError("/proc/self/status has no VmData; run this on Linux")
    most = int(result[1]) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one input, by its number; its error is shown")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="only these samples")
    parser.add_argument("--record", action="store_true", help=f"add to {RESULTS.name}")
    args = parser.parse_args()
    faulthandler.enable()
    numbers = range(args.count) if args.only is None else range(args.only, args.only + 1)
    run(
        args.seed, range(len(samples()) * 5), names=args.kinds
    )  # everything has been imported and allocated once
    limit_memory(MEMORY)
    started = time.monotonic()

    def say(number: int) -> None:
        if number % 100 == 0:
            print(f"\r{number}", end="", file=sys.stderr, flush=True)

    counts, findings = run(args.seed, numbers, say, args.kinds)
    kinds = sorted({kind for kind, _ in counts})
    table = {
        kind: {what: counts[kind, what] for what in ("read", "refused", "found")} for kind in kinds
    }
    print(f"\n{json.dumps(table, indent=2)}")
    for finding in findings:
        print(finding)
    if args.record:
        said = {"seed": args.seed, "inputs": len(numbers), "findings": len(findings)}
        limits = {"seconds": SECONDS, "memory_mib": MEMORY >> 20}
        runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
        runs.append(said | limits | {"kinds": table})
        RESULTS.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    print(f"{len(numbers)} inputs, {len(findings)} findings, {time.monotonic() - started:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
