"""Mutation testing of the numeric core: change it in one place, and see whether a test fails.

Needs the extra `mutation`. Operators are cosmic-ray's, and tests run by tests/mutation/core.py. A
run that was interrupted goes on where it stopped. Exit status 1: the score is below the threshold.
"""

import argparse
import datetime
import fnmatch
import hashlib
import json
import platform
import random
import sys
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutation import report, server
from tests.mutation.core import CORE, ROOT, path_of
from tests.mutation.mutants import Mutant, Place, draw
from tests.mutation.operators import check, mutate, places
from tests.mutation.session import Session

HERE = Path(__file__).parent
console = Console()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--modules", nargs="+", default=["*"], metavar="GLOB", help="e.g. '*codecs*'"
    )
    parser.add_argument("--sample", type=float, default=1.0, metavar="SHARE", help="of each module")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", action="store_true", help="try survivors again, after new tests")
    parser.add_argument("--minutes", type=float, default=None, help="stop trying after so many")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--record", action="store_true", help="write results.json and results.md")
    parser.add_argument("--threshold", type=float, default=report.THRESHOLD)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "mutation",
        help="for the session and XLA's programs; default: build/mutation",
    )
    return parser.parse_args()


def main() -> int:
    args = parse()
    modules = [m for m in CORE if any(fnmatch.fnmatch(m, glob) for glob in args.modules)]
    if not modules:
        console.print(f"no module of the core matches {args.modules}; known: {', '.join(CORE)}")
        return 2
    check()
    found = {module: places(module) for module in modules}
    drawn = [place for of in found.values() for place in draw(of, args.sample, args.seed)]
    if args.list:
        for mutant in filter(None, (mutate(place) for place in drawn)):
            where = f"{mutant.place.module}:{mutant.place.line}"
            print(f"{where} {mutant.place.operator}\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    session = Session(args.folder / "session.jsonl")
    results, tried_all = run(drawn, session, args)
    counts = {module: len(of) for module, of in found.items()}
    show(counts, results)
    if not tried_all:
        console.print("stopped before the end: the same command goes on from here")
        return 3
    if args.record:
        write(report.record(counts, results, made(args)))
    return int(report.score(sum(counts.values()), results).value < args.threshold)


def run(
    drawn: list[Place], session: Session, args: argparse.Namespace
) -> tuple[list[report.Result], bool]:
    """Try what is not known yet, in random order; what is known by then, and whether it is all."""
    random.Random(args.seed).shuffle(drawn)
    started, results = datetime.datetime.now(), []
    server.prepare(args.folder)
    columns = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=len(drawn))
        for place in drawn:
            progress.update(task, description=place.module, advance=1)
            mutant = mutate(place)
            if mutant is None:
                continue
            known = session.get(mutant.id)
            if known is None or (args.again and not known.killed):
                spent = (datetime.datetime.now() - started).total_seconds()
                if args.minutes is not None and spent > 60 * args.minutes:
                    return results, False
                known = session.add(mutant.id, try_out(mutant, session))
                if not known.killed:
                    progress.print(
                        f"survives: {place.module}:{place.line}\n  - {mutant.before}"
                        f"\n  + {mutant.after}",
                        markup=False,
                    )
            results.append(report.Result(mutant, known, session.at_once(mutant.id)))
    order = list(CORE)
    results.sort(key=lambda r: (order.index(r.mutant.place.module), r.mutant.place.line))
    return results, True


def try_out(mutant: Mutant, session: Session) -> server.Outcome:
    """Run the module's tests, which pass without the mutant, and show how long they take."""
    module = mutant.place.module
    tests, unchanged = CORE[module], f"{module}:unchanged:{digest(module)}"
    known = session.get(unchanged)
    if known is None:
        whole = server.run(module, None, tests, 600)
        if not whole.passed:
            raise SystemExit(f"{module}: tests fail without a mutant\n{whole.output}")
        known = session.add(unchanged, whole)
    return server.run(module, mutant.source, tests, 3 * known.seconds + 20)


def digest(module: str) -> str:
    """Of a module and the tests that run for it."""
    files = [path_of(module)]
    for path in sorted({ROOT / test.partition("::")[0] for test in CORE[module] if test[0] != "-"}):
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def show(counts: dict[str, int], results: list[report.Result]) -> None:
    """The scores as a table, and survivors that nobody has explained."""
    table = Table("module", "mutants", "tried", "killed", "equivalent", "survivors", "score")
    for name, of in report.rows(counts, results):
        cells = [of.places, of.tried, of.killed, of.equivalent, of.survivors]
        table.add_row(name, *map(str, cells), f"{of.value:.3f}")
    console.print(table)
    low, high = report.score(sum(counts.values()), results).interval
    console.print(f"95 % interval of the score: {low:.3f} to {high:.3f}")
    for result in results:
        if not result.known.killed and result.explanation is None:
            place = result.mutant.place
            console.print(f"not explained: {place.module}:{place.line} {place.operator}")
            print(f"  - {result.mutant.before}\n  + {result.mutant.after}")


def made(args: argparse.Namespace) -> dict[str, object]:
    """What a reader needs to run the same."""
    return {
        "date": datetime.date.today().isoformat(),
        "tool": f"cosmic-ray {metadata.version('cosmic-ray')}",
        "jax": metadata.version("jax"),
        "python": platform.python_version(),
        "seed": args.seed,
        "share": args.sample,
    }


def write(record: dict) -> None:
    """Both files of results."""
    (HERE / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (HERE / "results.md").write_text(report.page(record))


if __name__ == "__main__":
    sys.exit(main())
