"""`python -m mx_jax dequantize`."""

import argparse
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.deferred import Deferred
from mx_jax.checkpoint.weights import Weights
from mx_jax.commands.output import say
from mx_jax.commands.stream import (
    add_input,
    add_output,
    add_shards,
    as_it_is,
    check_output,
    like,
    stored_bytes,
    write_out,
    written,
)
from mx_jax.inspect.tensor_facts import size

_DESCRIPTION = """
Write the values that quantized weights stand for, one tensor at a time, as a safetensors file that
any program reads. Names stay.
"""
_EXAMPLES = """
examples:

    python -m mx_jax dequantize small.safetensors big.safetensors
    python -m mx_jax dequantize model.gguf model.safetensors --dtype bfloat16
"""
_DTYPES = ("float32", "bfloat16", "float16")


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "dequantize",
        help="write the values that quantized weights stand for",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input(parser, "in")
    add_output(parser)
    add_shards(parser)
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of the values (default: what was quantized)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: files that are damaged.
    """
    check_output(options)
    weights = checkpoint.read(vars(options)["in"], layout=options.layout)
    tensors = {name: _tensor(weights, name, options.dtype) for name in weights}
    write_out(options, weights, tensors)
    before, after = stored_bytes(weights), written(options.out)
    count = len(weights.quantized)
    say(f"{options.out}: {count} tensors dequantized, {size(before)} -> {size(after)}")
    return 0


def _tensor(weights: Weights, name: str, dtype: str | None) -> Any:
    one = weights.stored[name]
    if one.layout is None:
        return as_it_is(weights, name)
    wanted = np.dtype(jnp.dtype(like(weights, name).dtype if dtype is None else dtype))
    return Deferred(one.shape, wanted, functools.partial(_values, one.fetch, wanted))


def _values(fetch: Any, dtype: np.dtype) -> Any:
    value = fetch()
    # What no MXArray holds comes dequantized.
    return value.dequantize(dtype) if hasattr(value, "dequantize") else value.astype(dtype)
