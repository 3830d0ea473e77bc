"""The CPU library: casts and products, beside plain JAX, other libraries and the machine's limits.

    python -m benchmarks.cpu                everything
    python -m benchmarks.cpu casts          casts only; `products`: products only

One thread of a process that is pinned to one core; process CPU time, in alternating rounds.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import cores, cpu_matmul, cpu_quantize, environment, peers, report
from benchmarks.data import KINDS
from benchmarks.timing import add_pace
from mx_jax.backends.cpu_ffi import library

# glibc keeps what arrays gave back: a result on fresh pages would measure page faults.
KEEP_PAGES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456"
)


def casts(options: argparse.Namespace) -> dict[str, Any]:
    """Rows of casts, in this process, and what ran them."""
    loaded = library.load()
    if isinstance(loaded, str):
        raise SystemExit(f"the CPU library is missing: {loaded}")
    return {"isa": loaded.isa, "rows": cpu_quantize.rows(options)}


def products(options: argparse.Namespace) -> dict[str, Any]:
    """Rows of products, in this process."""
    return {"rows": cpu_matmul.rows(options)}


@contextlib.contextmanager
def kept_pages() -> Iterator[None]:
    """An environment in which new processes keep freed pages."""
    name, huge = cores.HUGE_PAGES
    cores.HUGE_PAGES = (name, KEEP_PAGES)
    try:
        yield
    finally:
        cores.HUGE_PAGES = (name, huge)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = report.parser("cpu", __doc__)
    parser.add_argument("what", nargs="?", choices=("all", "casts", "products"), default="all")
    parser.add_argument("--shape", type=report.shape, default=(4096, 4096), help="of casts")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1024, 2048], help="of products")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32], help="of thin products")
    parser.add_argument("--data", nargs="*", choices=KINDS, default=KINDS, help="of weights")
    add_pace(parser, seconds=2.0, min_rounds=7)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    result: dict[str, Any] = {"environment": environment.describe(peers.DISTRIBUTIONS)}
    sheets: list[report.Sheet] = []
    with kept_pages():
        if options.what != "products":
            result["casts"] = cores.on_one_core(casts, options)
            sheets += cpu_quantize.sheets(result["casts"]["rows"])
        if options.what != "casts":
            result["products"] = cores.on_one_core(products, options)
            sheets += cpu_matmul.sheets(result["products"])
    result["load_average_at_the_end"] = round(os.getloadavg()[0], 2)
    if not hasattr(options, "out"):
        options.out = report.RESULTS / "cpu" / f"{options.what}.json"
    report.publish("cpu", options, result, sheets)


if __name__ == "__main__":
    main(sys.argv[1:])
