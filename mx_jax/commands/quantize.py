"""Quantize the weights of a checkpoint, one tensor at a time.

Blocks run along the axis that a product contracts: the last of a matrix called .weight, the first
of one called kernel. What already is quantized stays as it is, and so do tensors of fewer than two
axes.

examples:

  everything but embeddings and head, to a file of mx_jax:
    python -m mx_jax quantize model.safetensors small.safetensors --format mxfp4

  what would happen, and why some tensors stay:
    python -m mx_jax quantize model/ small.safetensors --format nvfp4 --dry-run

  for vLLM and others, as compressed-tensors stores it:
    python -m mx_jax quantize model/ out.safetensors --format nvfp4 --to compressed-tensors

  with scales that are searched, block by block:
    python -m mx_jax quantize model/ small.safetensors --format nvfp4 --scales mse

  by what each matrix is multiplied with, embedding and head too (docs/calibrate.md):
    python -m mx_jax quantize model/ small/ --format mxfp4 --keep '' --moments moments.safetensors

  layer by layer:
    python -m mx_jax quantize model/ small.safetensors --rules rules.toml

  in files of 5 GB:
    python -m mx_jax quantize model/ out/ --format mxfp4 --to compressed-tensors \\
        --max-shard-size 5GB

  rules.toml, of which the first that matches decides:
    [[rule]]
    pattern = ".*(embed_tokens|lm_head)"      # of the whole name, without .weight
    skip = true
    [[rule]]
    pattern = ".*mlp.experts.*"
    format = "mxfp4"
    axis = -1                                 # [experts, out, in]
    [[rule]]
    pattern = ".*"
    format = "mxfp8_e4m3"
    scale_rule = "rceil"                      # default: what loses least
"""

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.calibrate.scales import GPTQ
from mx_jax.checkpoint.files import Entry, deferred
from mx_jax.checkpoint.foreign import read
from mx_jax.checkpoint.scales import decoded, effective_scales
from mx_jax.checkpoint.weights import Stored
from mx_jax.commands import stream
from mx_jax.commands.output import Commands, say
from mx_jax.commands.rules import (
    SCALES,
    FileRule,
    Judged,
    format_rule,
    judge,
    quantized_like,
    read_rules,
    shared_scales,
)
from mx_jax.convert.rules import Report, Rule
from mx_jax.mxarray import MXArray

_DEQUANTIZE = """
Write the values that quantized weights stand for, one tensor at a time, as a safetensors file that
any program reads. Names stay.

examples:

    python -m mx_jax dequantize small.safetensors big.safetensors
    python -m mx_jax dequantize model.gguf model.safetensors --dtype bfloat16
"""
# Where few bits cost most, and what most checkpoints leave alone: embeddings and the head.
KEPT = r"(.*[./])?(\w*embed\w*|token_embd|wte|wpe|lm_head|output|head|tokens)"


def add_to(commands: Commands) -> None:
    """Add both commands to a parser's subparsers."""
    help = "quantize a checkpoint's weights, by a format or by rules"
    parser = stream.add_command(
        commands, run, "quantize", "in", help=help, text=__doc__, writes=True
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="for all that no rule decides: mxfp4, nvfp4, mxfp8 or another that `formats` prints",
    )
    parser.add_argument("--rules", metavar="FILE", type=Path, help="ordered rules, as below")
    parser.add_argument(
        "--scale-rule", metavar="RULE", help="with --format; default: what loses least for it"
    )
    parser.add_argument(
        "--scales",
        choices=SCALES,
        help="with --format: mse searches each block's scale by squared error; gptq rounds weights "
        "so that their errors on typical inputs cancel, the default with --moments",
    )
    parser.add_argument(
        "--moments",
        metavar="FILE",
        type=Path,
        help="for gptq: a safetensors file of second moments x.T @ x of the inputs of each matrix, "
        "by its name; examples/llama_moments.py writes one of a Llama",
    )
    parser.add_argument(
        "--keep",
        metavar="PATTERN",
        help="with --format and no rules: layers that stay; '' for none (default: embeddings and "
        "head)",
    )
    parser.add_argument(
        "--to",
        metavar="LAYOUT",
        default=stream.MX_JAX,
        help=f"how to store it (default: {stream.MX_JAX}, our own)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would become of each")
    parser.add_argument(
        "--strict", action="store_true", help="a rule that matches nothing is an error"
    )
    help = "write the values that quantized weights stand for"
    how = {"help": help, "text": _DEQUANTIZE, "writes": True}
    parser = stream.add_command(commands, run_dequantize, "dequantize", "in", **how)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the values (default: what was quantized)",
    )
    parser.add_argument(
        "--inexact", action="store_true", help="write values beyond the dtype's range as inf"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    rules = _rules(options)
    stream.check_output(options)
    weights = stream.read(options)
    tensors = {name: stream.as_it_is(one) for name, one in weights.stored.items()}
    judged = {name: judge(rules, name, tensor) for name, tensor in tensors.items()}
    decisions = (each.decision for each in judged.values() if each.decision is not None)
    report = Report(rules=tuple(each.rule for each in rules), decisions=tuple(decisions))
    for index in report.unused:
        text = f"quantize: rule {index} ({rules[index].rule}) decides about no tensor"
        # The default rule for embeddings and heads may match nothing.
        if options.strict and options.rules is not None:
            raise ValueError(f"{text}; --dry-run shows the names")
        if options.rules is not None or report.num_converted == 0:
            say(text)
    spoilt: dict[str, int] = {}
    scales: dict[str, float] = {}
    moments = _moments(options, judged, tensors)

    def quantized(name: str) -> MXArray:
        """Called when the tensor is written, when `scales` has its entries."""
        one, each = weights.stored[name], judged[name]
        value: Any = one.look()
        made = each.quantize(value, moments.get(name), scales.get(name))
        if bad := int((~np.isfinite(effective_scales(made))).sum()):
            if options.to != stream.MX_JAX:
                raise ValueError(
                    f"quantize: {weights.path}: {name} holds NaN or infinite values, which makes "
                    f"{bad} blocks NaN, and {options.to} is read by programs that expect none; "
                    "repair it, or leave it out by a rule with skip = true"
                )
            spoilt[name] = bad
        return made

    for name, each in judged.items():
        if each.quantizes:
            like = quantized_like(each, tensors[name])
            tensors[name] = deferred(functools.partial(quantized, name), like)
    if options.dry_run:
        print(report)
    layout = stream.layout_for(options.to, tensors, weights.path)
    try:
        stream.check_layout(tensors, layout)
    except ValueError as error:
        raise ValueError(
            f"{error}; or leave it as it is, by --keep or a rule with skip = true"
        ) from error
    if layout != stream.MX_JAX:
        # Nothing is quantized before it is written.
        scales |= shared_scales(weights, judged)
    if options.dry_run:
        # mx_jax's file holds any values; GPTQ takes long.
        stream.check_layout(tensors, layout, values=layout != stream.MX_JAX and not moments)
        return 0
    stream.report_dequantized(weights, (name for name in weights if not judged[name].quantizes))
    sizes = stream.write_out(options, weights, tensors, layout, options.to)
    if spoilt:
        first = next(iter(spoilt))
        say(
            f"{weights.path}: {len(spoilt)} tensors hold NaN or infinite values, which makes whole "
            f"blocks NaN: {spoilt[first]} of {first}"
        )
    say(f"{options.out}: {report.num_converted} of {len(weights)} tensors quantized, {sizes}")
    return 0


def _rules(options: argparse.Namespace) -> tuple[FileRule, ...]:
    format, scales, has_file = options.format, options.scales, options.rules is not None
    if format is not None and options.moments is not None and options.scale_rule is None:
        scales = scales or GPTQ
    wrong = {
        "needs --format, e.g. --format mxfp4, or --rules": format is None and not has_file,
        "--scale-rule goes with --format; a rule has its own": options.scale_rule and not format,
        f"--scales {scales} chooses the scales; leave out --scale-rule": (
            scales and options.scale_rule
        ),
        "--scales goes with --format; a rule has its own": scales and not format,
        "--keep goes without --rules; write a rule with skip = true": (
            has_file and options.keep is not None
        ),
    }
    for text, holds in wrong.items():
        if holds:
            raise ValueError(f"quantize: {text}")
    if has_file:
        rules = read_rules(options.rules)
    else:
        kept = KEPT if options.keep is None else options.keep
        rules = (FileRule(Rule(kept, None)),) if kept else ()
    if format is not None:
        rules += (format_rule(".*", format, options.scale_rule, scales=scales),)
    return rules


def _moments(
    options: argparse.Namespace, judged: Mapping[str, Judged], tensors: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Second moments of what GPTQ's weights are multiplied with; prints how many have none."""
    wanted = [name for name, each in judged.items() if each.quantizes and each.scales == GPTQ]
    if bool(wanted) != (options.moments is not None):
        lacks = (
            "gptq needs --moments FILE, what each matrix is multiplied with: see docs/calibrate.md"
        )
        extra = "--moments is for gptq, and nothing is quantized by it"
        raise ValueError(f"quantize: {lacks if wanted else extra}")
    if not wanted:
        return {}
    moments = read(options.moments)
    unknown = [name for name in wanted if name not in moments]
    for name in wanted:
        axes = judged[name].axes
        assert axes is not None
        k = tensors[name].shape[judged[name].num_stacked :][axes.contracting[0]]
        if name in moments and moments.stored[name].shape != (k, k):
            raise ValueError(
                f"quantize: {options.moments}: needs shape={(k, k)} of {name}, which has {k} "
                f"inputs, got shape={moments.stored[name].shape}"
            )
    say(f"{len(wanted) - len(unknown)} of {len(judged)} tensors by GPTQ, by {options.moments}")
    if unknown:
        say(f"{len(unknown)} have no moment there, such as {unknown[0]}: scales by mse")
    return moments


def run_dequantize(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    stream.check_output(options)
    weights = stream.read(options)
    infinite: dict[str, int] = {}

    def values(name: str, one: Stored) -> Any:
        tensor = stream.as_it_is(one)
        if one.layout is None:
            return tensor
        wanted = np.dtype(jnp.dtype(options.dtype or tensor.dtype))

        def fetch() -> Any:
            value = one.fetch()
            # What no MXArray holds comes dequantized.
            is_quantized = isinstance(value, MXArray)
            made = value.dequantize(wanted) if is_quantized else value.astype(wanted)
            if lost := _became_infinite(value, np.asarray(made)):
                infinite[name] = lost
                if not options.inexact:
                    raise ValueError(
                        f"dequantize: {weights.path}: {name} holds {lost} of {made.size} values "
                        f"beyond {float(jnp.finfo(wanted).max):g}, the largest of {wanted.name}; "
                        "choose another --dtype, or write them as inf by --inexact"
                    )
            return made

        return Entry(one.shape, wanted, fetch)

    tensors = {name: values(name, one) for name, one in weights.stored.items()}
    sizes = stream.write_out(options, weights, tensors)
    if infinite:
        many = f"{sum(infinite.values())} values of {len(infinite)} tensors"
        say(f"{weights.path}: {many}, such as {next(iter(infinite))}, became inf")
    say(f"{options.out}: {len(weights.quantized)} tensors dequantized, {sizes}")
    return 0


def _became_infinite(exact: MXArray | jax.Array, made: np.ndarray) -> int:
    """How many values are infinite that were not before they were rounded."""
    if not np.isinf(made).any():
        return 0
    parts = decoded(exact) if isinstance(exact, MXArray) else [np.asarray(exact)]
    flat, count, at = made.reshape(-1), 0, 0
    for part in parts:
        count += int((np.isinf(flat[at : at + part.size]) & np.isfinite(part.reshape(-1))).sum())
        at += part.size
    return count
