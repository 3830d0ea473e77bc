"""What formats of weights, activations and caches cost a language model: loss, KL to float32.

Text: the pages of docs/, cut into sequences. Loss is in nats a token; KL is the mean over tokens of
the divergence of a format's distribution from that of float32 weights and cache. Activations are
compared with float32's beside the same weights, sequence by sequence. Tensor scales of
the cache that are fixed come from other pages. Speed is that of single sequences, in tokens a
second of CPU time, of the fastest dispatch: other programs on the machine slow down all the others.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, report
from benchmarks.language_model import intervals
from benchmarks.llama import (
    DEFAULT,
    Generator,
    Llama,
    LlamaConfig,
    find_model,
    formats_of,
    open_model,
    params_of,
    quantized,
    recipe_for,
)
from mx_jax.calibrate import SearchedScales
from mx_jax.formats import block_format
from mx_jax.nn import KVCache
from mx_jax.packed import Quantized
from mx_jax.recipes import high_precision

COMMAND = "language_model_formats"
# As `generate --format` takes them, and whether their scales are searched.
SEARCHED = " searched"
WEIGHTS = (
    *("mxint8", "mxfp8", "mxfp6_e2m3", "mxfp6_e2m3,head=mxint8"),
    *("mxfp6_e2m3,gate_up=nvfp4,head=mxint8", DEFAULT, f"{DEFAULT},qkv=nvfp4"),
    *("nvfp4,head=mxint8", f"nvfp4,head=mxint8{SEARCHED}", "nvfp4", f"nvfp4{SEARCHED}"),
    *("mxfp4,head=mxint8", "mxfp4"),
)
# A cache's format, and how it gets its tensor scales, if not one for each token and head.
FIXED = " fixed"
CACHES = ("bfloat16", "mxfp8", "mxint8", "mxfp6_e2m3", "nvfp4", f"nvfp4{FIXED}", "mxfp4")
PAGES = ("index", "training", "numerics", "convert", "sharding", "checkpoint")
# NVFP4's largest element times its largest block scale.
NVFP4_MAX = 6.0 * 448.0
CALIBRATION = ("quantize", "recipes", "choosing", "migrate")


def text_of(pages: Sequence[str]) -> str:
    folder = report.RESULTS.parents[1] / "docs"
    return "\n\n".join((folder / f"{page}.md").read_text() for page in pages)


@functools.partial(jax.jit, static_argnums=0)
def log_probabilities(model: Llama, params: Any, tokens: jax.Array, caches: Any) -> jax.Array:
    """Of every token of the vocabulary after each, `[1, tokens, vocabulary]`."""
    applied: Any = model.apply({"params": params}, tokens, caches)
    return jax.nn.log_softmax(applied[0])


@functools.partial(jax.jit, static_argnums=0)
def filled(model: Llama, params: Any, tokens: jax.Array, caches: Any) -> Any:
    """The caches after a text."""
    applied: Any = model.apply({"params": params}, tokens, caches)
    return applied[1]


def empty_caches(config: LlamaConfig, length: int, scales: Any = None, **options: Any) -> Any:
    """Caches of a model, one a layer; their tensor scales fixed, or one a token and head."""
    shape = (1, length, config.kv_heads, config.head_width)
    each = scales or [None] * config.layers
    return tuple(
        KVCache.zeros(*shape, tensor_scales=tensor_scales, **options) for tensor_scales in each
    )


def calibrated_scales(caches: Any) -> tuple[tuple[float, ...], ...]:
    """NVFP4's tensor scales of keys and values: the largest that was seen is the largest that fits.

    Args:
      caches: without a format, filled with texts of the same kind; rows that were not written are
        zero.
    """
    return tuple(
        tuple(float(jnp.abs(rows).max()) / NVFP4_MAX for rows in (cache.keys, cache.values))
        for cache in caches
    )


def measure(log: Any, exact: Any, tokens: np.ndarray) -> dict[str, float]:
    """Sums over one sequence."""
    nll = -jnp.take_along_axis(log[:, :-1], tokens[:, 1:, None], -1).sum()
    kl = (jnp.exp(exact) * (exact - log)).sum()
    same = (log.argmax(-1) == exact.argmax(-1)).sum()
    return {"nll": float(nll), "kl": float(kl), "same": int(same)}


def cut(tokens: Sequence[int], count: int, length: int) -> np.ndarray:
    """The first `count` sequences of a text, `[count, 1, length]`."""
    if len(tokens) < count * length:
        raise SystemExit(f"{COMMAND}: the text has {len(tokens)} tokens, needs {count * length}")
    return np.array(tokens[: count * length], np.int32).reshape(count, 1, length)


def judge(
    model: Llama, params: Any, sequences: np.ndarray, exact: Sequence[Any], caches: Any = None
) -> dict[str, Any]:
    """Loss, KL and the share of equal first choices, a token, over all sequences; each's loss."""
    sums = [
        measure(log_probabilities(model, params, tokens, caches), right, tokens)
        for tokens, right in zip(sequences, exact, strict=True)
    ]
    length = sequences.shape[-1] - 1
    total = {key: sum(each[key] for each in sums) for key in sums[0]}
    return {
        "loss": total["nll"] / sequences[:, :, 1:].size,
        "kl": total["kl"] / sequences.size,
        "same": total["same"] / sequences.size,
        "losses": [one["nll"] / length for one in sums],
    }


def bits_of(params: Any) -> float:
    """Bits a weight of the matrices that are quantized."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    each = [(x.format.bits_per_element, x.size) for x in leaves if isinstance(x, Quantized)]
    return sum(bits * size for bits, size in each) / sum(size for _, size in each)


def speed(model: Llama, params: Any, dispatches: int = 12) -> float:
    """Tokens a second of CPU time, in the fastest of some dispatches."""
    generator, spent = Generator(model=model, params=params), []
    caches, key = generator.caches(dispatches * generator.stride), jax.random.key(0)
    tokens: Any = np.ones((1, 1), np.int32)
    for dispatch in range(dispatches):
        started = time.process_time()
        sampled, caches = generator.steps(tokens, caches, dispatch * generator.stride, key)
        tokens = np.asarray(sampled[:, -1:])
        spent.append(time.process_time() - started)
    return generator.stride / min(spent)


def rows(options: Any, step: Any) -> list[dict[str, Any]]:
    """One row a format of weights, and one a format of the cache."""
    source = open_model(find_model(options.model))
    config = source.config
    params = params_of(source.weights, config, source.names)
    model = Llama(config, high_precision())
    tokenizer, length = source.tokenizer(), options.length
    sequences = cut(tokenizer.encode(text_of(PAGES)), options.sequences, length)
    step("float32")
    exact = [log_probabilities(model, params, tokens, None) for tokens in sequences]

    def row(
        kind: str, name: str, bits: float, weights: Any, caches: Any, model: Llama = model
    ) -> dict[str, Any]:
        judged = judge(model, weights, sequences, exact, caches)
        return {"of": kind, "format": name, "bits": bits, **judged}

    measured = [row("weights and cache", "float32", 32, params, None)]
    measured[0]["speed"] = speed(model, params)
    for name in options.weights:
        step(f"weights {name}")
        by = SearchedScales() if name.endswith(SEARCHED) else None
        store = quantized(formats_of(name.removesuffix(SEARCHED)), model.recipe, by)
        packed = params_of(source.weights, config, source.names, store)
        # The values that packed weights stand for: one program serves all formats.
        values = jax.tree.map(
            lambda leaf: leaf.dequantize() if isinstance(leaf, Quantized) else leaf,
            packed,
            is_leaf=lambda leaf: isinstance(leaf, Quantized),
        )
        one = row("weights", name, round(bits_of(packed), 2), values, None)
        measured.append(one | {"speed": speed(model, packed)})
        if options.activations:
            step(f"weights {name}, activations {options.activations}")
            formats = tuple(formats_of(name.removesuffix(SEARCHED)).values())
            low = Llama(config, recipe_for(options.activations, formats))
            kind = f"activations {options.activations}"
            two = row(kind, name, one["bits"], packed, None, low)
            over = np.subtract(two["losses"], one["losses"])
            measured.append(two | {"over": intervals.text(over.tolist(), "+.4f")})
    for name in options.caches:
        step(f"cache {name}")
        plain = name == "bfloat16"
        form = None if plain else block_format(name.removesuffix(FIXED))
        dtype = jnp.bfloat16 if plain else jnp.float32
        scales = None
        if name.endswith(FIXED):
            (other,) = cut(tokenizer.encode(text_of(CALIBRATION)), 1, length)
            empty = empty_caches(config, length)
            scales = calibrated_scales(filled(model, params, other, empty))
        caches = empty_caches(config, length, scales, format=form, dtype=dtype)
        bits = (
            8
            * sum(one.nbytes for one in caches)
            / sum(2 * one.keys.shape[-1] * one.length * config.kv_heads for one in caches)
        )
        kind = f"{form.name}, tensor scales fixed" if form and scales else form and form.name
        measured.append(row("cache", kind or name, round(bits, 2), params, caches))
    return measured


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """One table."""
    columns = ["format", "of", "bits a value", "loss", "over float32", "KL", "same first choice"]
    columns = [*columns, "tokens a CPU second", "over float32 activations"]
    sheet = report.Sheet("Loss in nats a token, KL to float32", columns)
    base = result["rows"][0]["loss"]
    for row in result["rows"]:
        numbers = [f"{row['loss']:.4f}", f"{row['loss'] / base - 1:+.2%}", f"{row['kl']:.5f}"]
        cells = [row["format"], row["of"], f"{row['bits']:g}", *numbers, f"{row['same']:.1%}"]
        cells.append(f"{row['speed']:.0f}" if "speed" in row else "")
        cells.append(row.get("over", ""))
        sheet.rows.append(cells)
    sheet.notes = [
        f"{result['sequences']} sequences of {result['length']} tokens of docs/. The other side of "
        "each row is float32; NVFP4's cache has a tensor scale for each token and head, or where "
        f"it says so one for a layer's keys and one for its values, by {result['length']} tokens "
        "of other pages: the largest magnitude over 2688. Intervals are of 95 %, over sequences."
    ]
    return [sheet]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser(COMMAND, __doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--weights", nargs="*", default=WEIGHTS, help="formats of weights")
    parser.add_argument("--activations", help="a format that goes with all those of weights")
    parser.add_argument("--caches", nargs="*", default=CACHES, help="formats of caches")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    options = parser.parse_args(arguments)
    described = environment.describe()
    count = 1 + len(options.weights) * (1 + bool(options.activations)) + len(options.caches)
    with report.progress(count) as step:
        measured = rows(options, step)
    sizes = {"sequences": options.sequences, "length": options.length}
    result = {"environment": described, **sizes, "rows": measured}
    report.publish(COMMAND, options, result, sheets(result))


if __name__ == "__main__":
    main()
