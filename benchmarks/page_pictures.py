"""Drawings of pages of docs/ from committed results. A new one is a row of `PICTURES`."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.language_model import intervals
from benchmarks.page_tables import PRODUCTS, gaps_over_float32, result

FINDINGS = Path(__file__).parents[1] / "examples" / "findings"
sys.path.append(str(FINDINGS))

from findings_figure import BLUE, GRAY, bars, digest, panels, save  # noqa: E402

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "results"


def training(axes: Any) -> None:
    """Gaps of recipes to float32, the smallest first."""
    ordered = sorted(gaps_over_float32().items(), key=lambda pair: statistics.mean(pair[1]))
    gaps(axes, ordered)


def four_bits(axes: Any) -> None:
    """Gaps of the ablation's rows that have several seeds."""
    named = ablation_gaps(result("train_lm_fp4/results")["rows"])
    gaps(axes, [pair for pair in named if len(pair[1]) > 1])


def ablation_gaps(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[float]]]:
    """Rows of `gaps` from results of `benchmarks.fp4_ablation`."""
    named = [(row["name"], row["gaps_percent"]) for row in rows if row["gaps_percent"]]
    return [(name, values) for name, values in named if name != "float32"]


def gaps(axes: Any, named: Sequence[tuple[str, list[float]]]) -> None:
    """Bars of losses over float32's with intervals over seeds, each seed a point.

    What is far above the others is named instead.
    """
    rows = [(name, values, _half(values)) for name, values in named]
    far = {name: mean for name, values, _ in rows if (mean := statistics.mean(values)) > _FAR}
    bars(axes, [row for row in rows if row[0] not in far])
    if far:
        cut = ", ".join(f"{name} {mean:+.0f} %" for name, mean in far.items())
        axes.set_title(f"not shown: {cut}", fontsize=8)
    axes.set_xlabel("validation loss over float32's of the same seed (%), 95 % interval")
    axes.figure.set_size_inches(6.4, 0.8 + 0.2 * len(axes.get_yticks()))


# Percent.
_FAR = 20


def save_gaps(beside: Path, named: Sequence[tuple[str, list[float]]]) -> None:
    """`gaps` as a drawing beside a file of results."""
    described = digest(Path(__file__), numbers=named)
    save(beside.stem, lambda axes: gaps(axes, named), beside.parent, description=described)


def _half(values: list[float]) -> float | None:
    interval = intervals.interval(values)
    return None if interval is None else interval.half_width


def products(axes: Any) -> None:
    """Speedup over float32, a bar a product; the whisker goes from one run to the other."""
    runs = [result(name)["rows"] for name in ("cpu/matmul", "cpu/matmul_second")]
    by_case = [{(tuple(row["shape"]), row["case"]): row for row in rows} for rows in runs]
    rows = []
    for shape, case in PRODUCTS:
        speedups = [by[shape, f"cpu_ffi {case}"]["over_float32"]["median"] for by in by_case]
        m, n, _ = shape
        rows.append(
            (f"{'square' if m == n else f'{m} row' + 's' * (m > 1)}: {case}", speedups, None)
        )
    bars(axes, rows)
    axes.axvline(1, color=GRAY, linewidth=0.8, linestyle="--")
    axes.set_xlabel("times as fast as float32 jnp.dot (one core, Zen 4)")


def kernels(axes: Any) -> None:
    """Error against bits: MiniLM's kernels, from the smallest SQNR of one to the largest."""
    rows = result("sqnr")["kernels"]
    for row in rows:
        bits, ratios = row["bits_per_element"], row["sqnr"]
        mean = statistics.mean(ratios)
        reach = [[mean - min(ratios)], [max(ratios) - mean]]
        axes.errorbar(
            bits, mean, yerr=reach, marker="o", markersize=4, color=BLUE, linestyle="", capsize=3
        )
        left = bits > 8
        axes.annotate(
            row["format"],
            (bits, mean),
            xytext=(-7 if left else 7, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8,
        )
    axes.set(xlim=(4, 8.6), ylim=(15, 45), xlabel="bits a value", ylabel="SQNR (dB)")


def casts(axes: Any) -> None:
    """Speedup of casts over each alternative: a panel an alternative."""
    by_cast = {
        (row["format"], row["dtype"]): row["times_faster_than"]
        for row in result("cpu/casts")["casts"]["rows"]
        if (row["operation"], row["axis"]) == ("quantize", -1) and row["format"] in _CASTS
    }
    names = [(name, dtype) for dtype in ("float32", "bfloat16") for name in _CASTS]
    peers = ("plain JAX", "jax.nn", "Qwix", "torchao compiled")
    places = panels(axes, 1, len(peers), height=2.2)
    for place, peer in zip(places, peers, strict=True):
        for row, name in enumerate(names):
            if peer in by_cast[name]:
                times = by_cast[name][peer]["median"]
                place.barh(row, times, color=BLUE, alpha=0.4)
                place.text(times, row, f" {times:.0f}", va="center", fontsize=7)
            else:
                place.text(1, row, " none", va="center", fontsize=7, color=GRAY)
        place.set_title(peer, fontsize=9)
        place.set_xscale("log")
        place.xaxis.set_major_formatter("{x:g}")
        place.grid(axis="y", visible=False)
    places[0].set_yticks(range(len(names)), [f"{dtype} to {name}" for name, dtype in names])
    places[0].invert_yaxis()
    places[0].set_xlim(1, 300)
    places[0].figure.supxlabel("times as fast as each, one core (AVX-512)", fontsize=9)


_CASTS = ("mxfp8_e4m3", "mxfp4", "nvfp4")

# The page and the drawing function of each.
PICTURES = {
    "training": ("accuracy", training),
    "four_bits": ("accuracy", four_bits),
    "products": ("benchmarks", products),
    "casts": ("benchmarks", casts),
    "kernels": ("choosing", kernels),
}
_RESULTS = (
    *("train_lm/results", "train_lm_fp4/results"),
    *("cpu/matmul", "cpu/matmul_second", "cpu/casts", "sqnr"),
)


def description() -> str:
    """The digest by which a test compares drawings with the results."""
    results = [result(name) for name in _RESULTS]
    return digest(Path(__file__), numbers=results)


def draw() -> None:
    """Write all of them."""
    for name, (_, draws) in PICTURES.items():
        save(name, draws, FOLDER, description=description())
