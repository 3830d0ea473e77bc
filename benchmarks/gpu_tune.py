"""Finds tiles for the kernels on this machine's GPU, and writes the file that the library reads.

For each width of codes and each number of rows, every candidate of `tuning.candidates` is timed on
chains of square products in one process, in alternating order, as `benchmarks.timing` says; the one
with the least median wins. Numbers are checked first: `python -m benchmarks.gpu` does. Then the
crossover: the least number of rows from which decoding the weights once, for XLA's product, is
faster. To use the file, set MX_JAX_GPU_TILES to its path.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import mx_jax
from benchmarks import report
from benchmarks.gpu_products import chained, kernel_product
from benchmarks.timing import Case, measure
from mx_jax.backends.pallas_gpu import tuning
from mx_jax.backends.pallas_gpu.rejections import ARCHITECTURES, BLOCK_SCALED
from mx_jax.backends.pallas_gpu.tuning import Tiles
from mx_jax.backends.select import current_target
from mx_jax.formats import MXFP4, MXFP8_E4M3, BlockFormat

# What stands for each width of codes.
FORMATS = {4: MXFP4, 8: MXFP8_E4M3}


def medians(
    ways: Sequence[Tiles | None],
    format: BlockFormat,
    architecture: str,
    rows: int,
    options: argparse.Namespace,
) -> dict[Tiles | None, float]:
    """Seconds of one product by each way: some tiles, or None for XLA's product.

    Args:
      ways: tiles; None stands for decoding the weights once.
      format: of the weights.
      architecture: e.g. `"sm90"`.
      rows: of activations.
      options: of the command.
    """
    lay_out, _ = kernel_product(format, architecture)
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
        _, product = kernel_product(format, architecture, way, dequantize=way is None)
        cases.append(Case(str(way), chained(product, weights, options.calls, x)))
    samples = measure(cases, seconds=options.seconds, max_rounds=101)
    count = options.copies * options.calls
    found = (samples[case.name].summary()["wall_ms"]["median"] for case in cases)
    return {way: ms / 1e3 / count for way, ms in zip(ways, found, strict=True)}


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


def tune(architecture: str, options: argparse.Namespace) -> tuning.Table:
    """The table for one architecture."""
    tiles: dict[tuple[str, int], tuple[tuple[float, Tiles], ...]] = {}
    limits: dict[tuple[str, int], float] = {}
    with report.progress(len(options.bits) * len(options.rows)) as step:
        for bits in options.bits:
            buckets: list[tuple[float, Tiles]] = []
            compared: list[tuple[int, float, float]] = []
            for rows in options.rows:
                step(f"{bits} bits, {rows} rows")
                ways: list[Tiles | None] = list(tuning.candidates(architecture, bits, rows))
                ways = [t for t in ways if t and options.size % (t.k * t.splits) == 0]
                if architecture not in BLOCK_SCALED:
                    ways.append(None)
                times = medians(ways, FORMATS[bits], architecture, rows, options)
                best = fastest(times)
                buckets.append((rows, best))
                compared.append((rows, times[best], times.get(None, math.inf)))
            buckets[-1] = (math.inf, buckets[-1][1])
            tiles[architecture, bits] = tuple(buckets)
            limits[architecture, bits] = crossover(compared)
    return tuning.Table(tiles=tiles, crossover=limits)


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
    architecture = ARCHITECTURES.get(target.compute_capability or (0, 0))
    if target.platform != "cuda" or architecture is None:
        known = ", ".join(".".join(map(str, capability)) for capability in ARCHITECTURES)
        raise SystemExit(
            f"benchmarks.gpu_tune: needs a CUDA GPU of compute capability {known}, got "
            f"platform={target.platform}, compute_capability={target.compute_capability}"
        )
    table = tune(architecture, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(tuning.as_json(table))
    tuning.read(options.out)
    for key, buckets in table.tiles.items():
        print(*key, "crossover", table.crossover[key])
        for rows, tiles in buckets:
            print(" ", rows, dataclasses.asdict(tiles))
    print(f"written to {options.out}; to use it: export {tuning.TILES_VARIABLE}={options.out}")


if __name__ == "__main__":
    main()
