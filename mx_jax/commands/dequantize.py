"""`python -m mx_jax dequantize`."""

import argparse
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.safetensors_file import Entry
from mx_jax.checkpoint.weights import Weights
from mx_jax.commands.output import say
from mx_jax.commands.stream import add_command, as_it_is, check_output, like, read, write_out

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
    parser = add_command(
        commands,
        run,
        "in",
        writes=True,
        name="dequantize",
        help="write the values that quantized weights stand for",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of the values (default: what was quantized)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: files that are damaged.
    """
    check_output(options)
    weights = read(options)
    tensors = {name: _tensor(weights, name, options.dtype) for name in weights}
    sizes = write_out(options, weights, tensors)
    say(f"{options.out}: {len(weights.quantized)} tensors dequantized, {sizes}")
    return 0


def _tensor(weights: Weights, name: str, dtype: str | None) -> Any:
    one = weights.stored[name]
    if one.layout is None:
        return as_it_is(weights, name)
    wanted = np.dtype(jnp.dtype(like(weights, name).dtype if dtype is None else dtype))
    return Entry(one.shape, wanted, functools.partial(_values, one.fetch, wanted))


def _values(fetch: Any, dtype: np.dtype) -> Any:
    value = fetch()
    # What no MXArray holds comes dequantized.
    return value.dequantize(dtype) if hasattr(value, "dequantize") else value.astype(dtype)
