"""Damaged and hostile checkpoints by the thousand: each is read, or refused with its name.

Files of every kind are changed at random: cut short, flipped, overwritten with hostile numbers, and
their JSON edited. What else happens to a reader is a finding: another exception, a refusal that
does not say which file, more than a few seconds, or much memory. An input is made by its number and
the seed alone, so `--only NUMBER` makes it again. A crash ends the run, and the last number said
is at most a hundred before it.
"""

import argparse
import collections
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
from pathlib import Path
from typing import Any

from tests.checkpoint.samples import Files, Reader, samples

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
        content = draw.choice(_CHANGES)(content, draw)
    return files | {name: content}


def _cut(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] if draw.random() < 0.7 else content + bytes(draw.randrange(1, 40))


def _flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if changed:
            # The header is where it hurts.
            reach = len(changed) if draw.random() < 0.3 else min(len(changed), 600)
            changed[draw.randrange(reach)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _number(content: bytes, draw: random.Random) -> bytes:
    """A hostile number, of four or eight bytes, over what is there."""
    form = draw.choice(("<I", "<Q"))
    number = draw.choice(HOSTILE_NUMBERS) & (2 ** (8 * struct.calcsize(form)) - 1)
    at = draw.randrange(min(len(content), 600) + 1)
    put = struct.pack(form, number)
    return content[:at] + put + content[at + len(put) :]


def _moved(content: bytes, draw: random.Random) -> bytes:
    """A piece left out, doubled, or put elsewhere."""
    first, last = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + draw.choice((1, 4, 8, 64)))
    at, piece = draw.randrange(len(content) + 1), content[first:last]
    rest = content if draw.random() < 0.5 else content[:first] + content[last:]
    return rest[:at] + piece + rest[at:] if draw.random() < 0.7 else rest


def _json(content: bytes, draw: random.Random) -> bytes:
    """A header's or a file's JSON with one value in it changed, where there is JSON."""
    header = content[8:9] == b"{"
    try:
        length = int.from_bytes(content[:8], "little") if header else len(content)
        start = 8 if header else 0
        tree = json.loads(content[start : start + length])
        edited = json.dumps(_edited(tree, draw)).encode()
    except (ValueError, RecursionError):
        return _flip(content, draw)
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


class _TooLong(BaseException):
    """Raised by the alarm; no reader may catch it."""


def outcome(read: Reader, folder: Path) -> str:
    """ "read", "refused", or what should not have happened."""

    def ring(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        read(folder)
    except _TooLong:
        return f"took more than {SECONDS} s"
    except (ValueError, FileNotFoundError) as error:
        return "refused" if str(folder) in str(error) else f"does not say which file: {error!r}"
    except Exception as error:
        return f"another exception: {error!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "read"


def put(folder: Path, files: Files) -> None:
    """Write an input's files to a folder that is not there yet."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def run(seed: int, numbers: range) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """How often each kind was read and refused, and what should not have happened."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    findings, kinds = [], samples()
    with tempfile.TemporaryDirectory() as base:
        for number in numbers:
            sample = kinds[number % len(kinds)]
            # A folder of its own: what was read may still be a view of its file.
            folder = Path(base) / str(number)
            put(folder, mutated(sample.files, random.Random(f"{seed} {number}")))
            result = outcome(sample.read, folder)
            if result not in ("read", "refused"):
                findings.append(f"{number} {sample.name}: {result}")
                result = "found"
            counts[sample.name, result] += 1
            shutil.rmtree(folder)
            if number % 100 == 99:
                print(f"\r{number}", end="", file=sys.stderr, flush=True)
    return counts, findings


def limit_memory(more: int) -> None:
    """Refuse this process more memory than it has and `more`, so that a bomb is an exception."""
    (size,) = re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
    most = int(size) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one input, by its number; its error is shown")
    parser.add_argument("--record", action="store_true", help=f"add to {RESULTS.name}")
    args = parser.parse_args()
    faulthandler.enable()
    # Once, so that everything has been imported and allocated.
    run(args.seed, range(len(samples()) * 5))
    limit_memory(MEMORY)
    numbers = range(args.count) if args.only is None else range(args.only, args.only + 1)
    counts, findings = run(args.seed, numbers)
    table = {
        kind: {result: counts[kind, result] for result in ("read", "refused", "found")}
        for kind in sorted({kind for kind, _ in counts})
    }
    print(f"\n{json.dumps(table, indent=2)}", *findings, sep="\n")
    if args.record:
        facts = {"seed": args.seed, "inputs": len(numbers), "findings": len(findings)}
        limits = {"seconds": SECONDS, "memory_mib": MEMORY >> 20}
        runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
        runs.append(facts | limits | {"kinds": table})
        RESULTS.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    print(f"{len(numbers)} inputs, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
