"""Finds tiles for the kernels on this machine's GPU, and writes the file that the library reads.

For each width of codes and each number of rows, every candidate of `tuning.space` is timed on
chains of square products in one process, in alternating order, as `benchmarks.timing` says; the one
with the least median wins. Numbers are checked first: `python -m benchmarks.gpu` does. Then the
crossover: the least number of rows from which decoding the weights once, for XLA's product, is
faster. To use the file, set MX_JAX_GPU_TILES to its path.

The file is written after each number of rows, and a second run adds to it, with other --bits or
--rows: tuning everything takes longer than a machine may be lent for. Tiles that do not compile or
start are left out, and named.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import mx_jax
from benchmarks import report
from benchmarks.gpu_products import Pair, chained, kernel_product
from benchmarks.timing import Case, measure
from mx_jax.backends.pallas_gpu.architecture import Architecture, architecture_of, capabilities
from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.tuning import table
from mx_jax.backends.pallas_gpu.tuning.space import candidates, keeps_busy
from mx_jax.backends.pallas_gpu.tuning.table import Entry
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles, Tuning
from mx_jax.backends.select import current_target
from mx_jax.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, BlockFormat

# What stands for each width of codes.
FORMATS = {4: MXFP4, 6: MXFP6_E2M3, 8: MXFP8_E4M3}

# An entry of the table of tiles, rows of activations.
Key = tuple[Entry, int]


def medians(
    ways: Sequence[Tiles | None],
    format: BlockFormat,
    architecture: Architecture,
    kernel: Kernel,
    rows: int,
    options: argparse.Namespace,
) -> dict[Tiles | None, float]:
    """Seconds of one product by each way: some tiles, or None for XLA's product.

    Args:
      ways: tiles; None stands for decoding the weights once.
      format: of the weights; of the activations too where the kernel takes both as they are.
      architecture: the GPU.
      kernel: one of its own.
      rows: of activations.
      options: of the command.
    """
    pair = Pair(lhs=None if kernel == architecture.decoding else format, rhs=format)
    lay_out, _ = kernel_product(pair, architecture, kernel)
    make = jax.jit(
        lambda key: lay_out(
            mx_jax.quantize(
                jax.random.normal(key, (options.size, options.size), jnp.bfloat16)
                / options.size**0.5,
                format,
            )
        )
    )
    weights = [make(key) for key in jax.random.split(jax.random.key(0), options.copies)]
    x = jax.random.normal(jax.random.key(1), (rows, options.size), jnp.bfloat16)
    cases = []
    for way in ways:
        _, product = kernel_product(pair, architecture, kernel, way, dequantize=way is None)
        case = Case(str(way), chained(product, weights, options.calls, x))
        try:
            jax.block_until_ready(case.run())
            cases.append(case)
        except Exception as error:
            print(f"left out: {way}: {report.first_line(error)}", file=sys.stderr)
    samples = measure(cases, seconds=options.seconds, max_rounds=101)
    count = options.copies * options.calls
    return {
        way: samples[str(way)].summary()["wall_ms"]["median"] / 1e3 / count
        for way in ways
        if str(way) in samples
    }


def fastest(times: dict[Tiles | None, float]) -> Tiles:
    """The tiles with the least time."""
    return min((t for t in times if t is not None), key=lambda tiles: times[tiles])


def crossover(times: Sequence[tuple[int, float, float]]) -> float:
    """Rows from which XLA's product is faster for good; infinity if it never is.

    Args:
      times: (rows, the kernel's seconds, XLA's), ascending.
    """
    rows = math.inf
    for count, kernel, dot in reversed(times):
        if kernel <= dot:
            break
        rows = count
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What was measured for a number of rows.

    Attributes:
      tiles: the fastest.
      kernel: their seconds.
      dot: seconds of XLA's product of decoded weights; infinity where there is none.
    """

    tiles: Tiles
    kernel: float
    dot: float


def tune(architecture: Architecture, options: argparse.Namespace) -> Iterator[tuple[Key, Found]]:
    """The fastest tiles of each of an architecture's kernels, one after the other."""
    keys: list[tuple[Kernel, int, int]] = [
        (kernel, bits, rows)
        for kernel in reversed(architecture.kernels)
        for bits in options.bits
        if bits in dict(kernel.tuning)
        for rows in options.rows
    ]
    with report.progress(len(keys)) as step:
        for kernel, bits, rows in keys:
            entry = Entry(architecture.name, kernel.name, bits)
            step(f"{entry}, {rows} rows")
            ways: list[Tiles | None] = [
                tiles
                for tiles in candidates(architecture, kernel, bits, rows)
                if options.size % (tiles.k * tiles.splits) == 0
                and keeps_busy(architecture, kernel, tiles, m=rows, n=options.size)
            ]
            if kernel == architecture.decoding:
                ways.append(None)
            times = medians(ways, FORMATS[bits], architecture, kernel, rows, options)
            if any(tiles is not None for tiles in times):
                best = fastest(times)
                dot = times.get(None, math.inf)
                yield (entry, rows), Found(tiles=best, kernel=times[best], dot=dot)


def as_table(found: dict[Key, Found]) -> dict[Entry, Tuning]:
    """What `table.read` reads."""
    entries: dict[Entry, Tuning] = {}
    for entry, group in itertools.groupby(sorted(found), key=lambda key: key[0]):
        of = {rows: found[entry, rows] for _, rows in group}
        buckets: list[tuple[float, Tiles]] = [(rows, one.tiles) for rows, one in of.items()]
        buckets[-1] = (math.inf, buckets[-1][1])
        limit = crossover([(m, o.kernel, o.dot) for m, o in of.items()])
        entries[entry] = Tuning(tiles=tuple(buckets), crossover=limit)
    return entries


def measured(path: Path) -> dict[Key, Found]:
    """What an earlier run wrote beside the table."""
    if not path.exists():
        return {}
    return {
        (Entry(*row["entry"]), row["rows"]): Found(
            tiles=Tiles(**row["tiles"]), kernel=row["kernel"], dot=row["dot"] or math.inf
        )
        for row in json.loads(path.read_text())
    }


def write(path: Path, found: dict[Key, Found]) -> None:
    """The table, and beside it the times that it follows from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.as_json(as_table(found)))
    rows = [
        {"entry": entry, "rows": rows}
        | dataclasses.asdict(one)
        | {"dot": None if math.isinf(one.dot) else one.dot}
        for (entry, rows), one in sorted(found.items(), key=lambda item: item[0])
    ]
    path.with_suffix(".times.json").write_text(json.dumps(rows, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_tune",
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    out = report.RESULTS / "gpu" / "tiles.json"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE.json", help="where to write")
    parser.add_argument("--bits", nargs="+", type=int, choices=list(FORMATS), default=[4, 8])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64, 128, 512, 2048])
    parser.add_argument("--size", type=int, default=8192, help="n and k")
    parser.add_argument("--copies", type=int, default=8, help="weights that a chain rotates over")
    parser.add_argument("--calls", type=int, default=4, help="of the chain, in one sample")
    parser.add_argument("--seconds", type=float, default=30.0, help="budget of a number of rows")
    options = parser.parse_args(arguments)
    options.rows.sort()
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    target = current_target()
    architecture = architecture_of(target.compute_capability)
    if target.platform != "cuda" or architecture is None:
        known = ", ".join(".".join(map(str, capability)) for capability in capabilities())
        raise SystemExit(
            f"benchmarks.gpu_tune: needs a CUDA GPU of compute capability {known}, got "
            f"platform={target.platform}, compute_capability={target.compute_capability}"
        )
    found = measured(options.out.with_suffix(".times.json"))
    for key, one in tune(architecture, options):
        found[key] = one
        write(options.out, found)
        over = "" if math.isinf(one.dot) else f", {one.dot / one.kernel:.2f} of XLA's speed"
        entry, rows = key
        print(f"{entry}, {rows} rows: {one.tiles}, {1e6 * one.kernel:.1f} us{over}")
    table.read(options.out)
    print(f"written to {options.out}; to use it: export {table.TILES_VARIABLE}={options.out}")


if __name__ == "__main__":
    main()
