"""The tables of pages of docs/ from committed results. A new table is a row of `TABLES`."""

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.language_model import intervals
from benchmarks.report import RESULTS, number

Table = tuple[Sequence[str], Iterable[Sequence[str]]]
_SQNR = ("mxint8", "mxfp8", "mxfp8_hybrid", "mxfp6", "nvfp4", "mxfp4")
_PEERS = ("jax.nn", "Qwix", "torchao eager", "torchao compiled")
# Operation, format and dtype of a cast, and its name on the page.
_CASTS = {
    ("quantize", "mxfp8_e4m3", "float32"): "float32 to mxfp8_e4m3",
    ("quantize", "mxfp6_e2m3", "float32"): "float32 to mxfp6_e2m3",
    ("quantize", "mxfp4", "float32"): "float32 to mxfp4",
    ("quantize", "nvfp4", "float32"): "float32 to nvfp4 (reads the array twice)",
    ("quantize", "mxfp8_e4m3", "bfloat16"): "bfloat16 to mxfp8_e4m3",
    ("quantize", "mxfp4", "bfloat16"): "bfloat16 to mxfp4",
    ("quantize", "nvfp4", "bfloat16"): "bfloat16 to nvfp4",
    ("both", "mxfp8_e4m3", "float32"): "float32 to mxfp8_e4m3 along both axes at once",
    ("dequantize", "mxfp8_e4m3", "bfloat16"): "mxfp8_e4m3 to bfloat16",
}
# Shape and operands of products in C++, rows of the page by kind.
_SQUARE, _ROWS = 2048, 4096
PRODUCTS: tuple[tuple[tuple[int, int, int], str], ...] = (
    *(
        ((_SQUARE, _SQUARE, _SQUARE), f"{format} x {format}")
        for format in ("mxfp4", "mxfp6_e2m3", "mxint8", "nvfp4", "mxfp6_e3m2", "mxfp8_e4m3")
    ),
    ((1, _ROWS, _ROWS), "float32 x mxfp4, packed"),
    ((1, _ROWS, _ROWS), "float32 x mxfp8_e4m3, packed"),
    *(((rows, _ROWS, _ROWS), "mxfp4 x mxfp4, packed") for rows in (1, 8, 32)),
)

# Rows of gradient biases on the page, in its order, and the step of their checkpoints; the results
# have more of both.
_BIASES = (
    *("mxfp8", "mxfp4_floor", "mxfp4", "mxfp4, forward alone", "mxfp4, backward alone"),
    *("mxfp4, ends", "mxfp4, head too", "mxfp4_backward"),
    *("nvfp4", "nvfp4_pretraining", "quartet_ii", "deepseek_v3"),
)
_BIAS_STEP = 300


def result(name: str) -> dict[str, Any]:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def gaps_over_float32() -> dict[str, list[float]]:
    """Percent that validation losses of recipes are over float32's of the same seed, by recipe."""
    runs = _runs()
    exact = runs.pop("float32")
    return {
        recipe: _over(by_seed, exact, "final_validation_loss") for recipe, by_seed in runs.items()
    }


def _runs() -> dict[str, dict[int, Any]]:
    """Runs of the example by recipe and seed."""
    runs: dict[str, dict[int, Any]] = {}
    for run in result("train_lm/results")["runs"]:
        runs.setdefault(run["recipe"], {})[run["seed"]] = run
    return runs


def _over(by_seed: dict[int, Any], exact: dict[int, Any], name: str) -> list[float]:
    return [100 * (by_seed[seed][name] / exact[seed][name] - 1) for seed in sorted(by_seed)]


def training() -> Table:
    runs = _runs()
    rows = [_trained(recipe, by_seed, runs["float32"]) for recipe, by_seed in runs.items()]
    # By gap: recipes of other seeds have another mean loss for that alone.
    rows.sort(key=lambda row: float(row[3].split()[0]) if row[3] else -100)
    return ("recipe", "seeds", "loss", "gap to float32 (%)", "training gap (%)"), rows


def _trained(recipe: str, by_seed: dict[int, Any], exact: dict[int, Any]) -> tuple[str, ...]:
    loss = statistics.mean(run["final_validation_loss"] for run in by_seed.values())
    gaps, late = (_over(by_seed, exact, n) for n in ("final_validation_loss", "late_train_loss"))
    cells = ("", "")
    if by_seed is not exact:
        cells = intervals.text(gaps, "+.2f"), intervals.text(late, "+.2f")
    return recipe, str(len(by_seed)), f"{loss:.4f}", *cells


def optimizer_states() -> Table:
    measured = result("optimizer_states")
    exact = {run["seed"]: run for run in measured["losses"][0]["runs"]}
    rows = []
    for row in measured["losses"]:
        by_seed = {run["seed"]: run for run in row["runs"]}
        gaps = (
            intervals.text(
                [100 * (by_seed[s][what] / exact[s][what] - 1) for s in sorted(by_seed)], "+.2f"
            )
            for what in ("loss", "late_train_loss")
        )
        loss = statistics.mean(run["loss"] for run in by_seed.values())
        cells = ("", "") if by_seed == exact else tuple(gaps)
        rows.append((row["states"], str(len(by_seed)), f"{loss:.4f}", *cells))
    return ("states", "seeds", "loss", "gap to float32 (%)", "training gap (%)"), rows


def sqnr() -> Table:
    rows = {row["recipe"]: row for row in result("sqnr")["layer"]}
    heads = ("recipe", "output (dB)", "input gradient (dB)", "weight gradient (dB)")
    products = ("output", "grad_input", "grad_weight")
    return heads, [(n, *(number(rows[n][product], 1) for product in products)) for n in _SQNR]


def casts() -> Table:
    by_cast = {
        (row["operation"], row["format"], row["dtype"]): row
        for row in result("cpu/casts")["casts"]["rows"]
        if row["axis"] == -1
    }
    others = ("plain JAX", *_PEERS)
    rows = []
    for key, text in _CASTS.items():
        row = by_cast[key]
        time = number(row["timings"]["cpu_ffi"]["cpu_ms"]["median"], 1)
        share = number(100 * row["share_of_copy"]["median"], 0)
        rows.append((text, time, share, *_peers(row["times_faster_than"], others)))
    heads = ("cast", "time (ms)", "bandwidth, % of a copy")
    return (*heads, *(f"over {peer}" for peer in others)), rows


def products() -> Table:
    runs = [result(name)["rows"] for name in ("cpu/matmul", "cpu/matmul_second")]
    by_case = [{(tuple(row["shape"]), row["case"]): row for row in rows} for rows in runs]
    rows = []
    for shape, case in PRODUCTS:
        measured = [by[shape, f"cpu_ffi {case}"] for by in by_case]
        over = (
            _range(row[name]["median"] for row in measured)
            for name in ("over_float32", "over_best")
        )
        rows.append((" x ".join(map(str, shape)), case, *over))
    heads = ("m x n x k", "operands", "over float32 `jnp.dot`", "over the fastest `jnp.dot`")
    return heads, rows


def exchanged() -> Table:
    """MXFP8's and MXFP4's bytes over plain JAX's."""
    names = ("layout", "dtype", "way", "recipe")
    rows = (row for row in result("collectives")["rows"] if row["device"] == "cpu")
    totals = {tuple(row[n] for n in names): row["total"] for row in rows}
    ways = [(d, w) for d in ("float32", "bfloat16") for w in ("set_mesh", "shard_map")]
    rows = []
    for layout in dict.fromkeys(key[0] for key in totals):
        cells = (
            ", ".join(
                f"{totals[layout, *way, recipe] / totals[layout, *way, 'jax']:.2f}"
                for recipe in ("mxfp8", "mxfp4")
                if (layout, *way, recipe) in totals
            )
            for way in ways
        )
        rows.append((layout, *cells))
    return ("layout", *(f"{d}, {w.replace('set_mesh', 'jit')}" for d, w in ways)), rows


def ragged() -> Table:
    measured = result("cpu/ragged")["rows"]
    formats = list(dict.fromkeys(row["format"] for row in measured))
    by = {(r["work"], r["shape"][0], r["case"], r["format"]): r["of_float32"] for r in measured}
    keys = [key for key in dict.fromkeys(key[:3] for key in by) if key[2].startswith("mx_jax")]
    rows = [
        (
            {"forward": "forward", "step": "training step"}[work],
            str(tokens),
            case.removeprefix("mx_jax, "),
            *(_times(by[work, tokens, case, name], 2) for name in formats),
        )
        for work, tokens, case in keys
    ]
    return ("work", "tokens", "how", *formats), rows


def compile_time() -> Table:
    by_case = {(r["case"], r["backends"]): r for r in result("cpu/compile_time")["rows"]}
    rows = []
    for case in ("mxfp8", "mxfp4", "nvfp4", "float8_tensorwise"):
        ways = (
            by_case[case, way]["compile_of_float32"]["median"] for way in ("default", "reference")
        )
        rows.append((case, *(number(value, 1 if value < 10 else 0) for value in ways)))
    return ("recipe", "C++", "reference"), rows


def calibration() -> Table:
    """SmolLM2's weights by how they are quantized, from the fewest bytes."""
    rows = result("cpu/calibration")["rows"]
    exact = rows.pop("float32")["losses"]
    cells = [
        (
            name.replace("_e2m3", ""),
            f"{row['bits'] / row['size']:.2f}",
            f"{row['bits'] / 8e6:.1f}",
            intervals.text([a - b for a, b in zip(row["losses"], exact, strict=True)], "+.3f"),
        )
        for name, row in sorted(rows.items(), key=lambda item: item[1]["bits"])
    ]
    return ("weights", "bits", "MB", "loss over float32"), cells


def gradient_bias() -> Table:
    """Means over seeds, with their intervals; n where a checkpoint has fewer seeds than the row."""
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for row in result("gradient_bias")["rows"]:
        by_variant.setdefault(row["name"], []).append(row)
    rows = []
    for name in _BIASES:
        over = functools.partial(over_seeds, by_variant[name], _BIAS_STEP)
        bias, slope = (
            over(lambda row: 100 * row["bias"], ".1f"),
            over(lambda row: row["slope"], ".3f"),
        )
        rows.append((name, bias, slope, over(loss_increase, "+.2f")))
    return ("variant", "bias (%)", "slope", "loss (%)"), rows


def loss_increase(row: dict[str, Any]) -> float:
    """Of the loss before any training with the recipe, in percent."""
    return 100 * row["loss_increase"] / row["loss"]


def over_seeds(
    rows: list[dict[str, Any]], step: int, value: Callable[[dict[str, Any]], float], pattern: str
) -> str:
    """Mean and interval of a checkpoint's rows; n where it has fewer seeds than all rows."""
    values = [value(row) for row in rows if row["step"] == step]
    fewer = f" (n = {len(values)})" if 0 < len(values) < len({row["seed"] for row in rows}) else ""
    return intervals.text(values, pattern) + fewer


TABLES: dict[str, Callable[[], Table]] = {
    function.__name__: function
    for function in (
        training,
        optimizer_states,
        sqnr,
        casts,
        products,
        exchanged,
        ragged,
        compile_time,
        calibration,
        gradient_bias,
    )
}


def _times(quartiles: dict[str, float], digits: int = 1) -> str:
    return number(quartiles["median"], digits)


def _peers(times: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """A dash where a peer was left out."""
    return (_times(times[name]) if name in times else "-" for name in names)


def _range(values: Iterable[float]) -> str:
    """The range of two runs."""
    low, high = (number(value, 1) for value in sorted(values))
    return low if low == high else f"{low} to {high}"
