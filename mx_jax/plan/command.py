"""`python -m mx_jax plan`."""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console

from mx_jax.plan.interconnects import INTERCONNECTS, Interconnect, parse_interconnect
from mx_jax.plan.memory import REMATS
from mx_jax.plan.mesh import AXES, SCHEDULES, Setup, parse_mesh
from mx_jax.plan.model import Model, transformer
from mx_jax.plan.report import as_json, as_values, assumptions, make_plan, tables
from mx_jax.recipes import from_name, high_precision

_DESCRIPTION = """
Count the bytes of a training step on a mesh without running it: what each device keeps, and what it
receives by collective and mesh axis, for several recipes beside the same model without
quantization. Batches are sharded along data, fsdp and expert, weights along fsdp and model, experts
along expert too, blocks along pipe.
"""
_EXAMPLE = """
example, a model of 70 billion parameters on 1024 GPUs, 8 to a node:

  python -m mx_jax plan --params 70.6e9 --layers 80 --width 8192 --kv-width 1024 \\
      --vocabulary 128256 --mesh data=2,fsdp=64,model=8 --tokens 4194304 \\
      --sequence-parallel --remat save_quantized --recipe mxfp8,nvfp4,mxfp4 \\
      --interconnect fsdp=ndr --interconnect data=ndr --interconnect model=nvlink4
"""
# Numbers of float32 that an optimizer keeps a parameter.
_MOMENTS = {"adam": 2, "lion": 1, "momentum": 1, "sgd": 0}
_DTYPES = ("bfloat16", "float32")


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "plan",
        help="count the bytes of a training step on a mesh, for several recipes",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser)
    _add_mesh(parser)
    parser.add_argument(
        "--recipe",
        default="mxfp8,nvfp4,mxfp4",
        metavar="NAMES",
        help="recipes to compare, by name (default: mxfp8,nvfp4,mxfp4)",
    )
    parser.add_argument(
        "--interconnect",
        action="append",
        default=[],
        metavar="AXIS=LINK",
        help=f"print a time too; LINK is bytes a second, or one of {', '.join(INTERCONNECTS)}",
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.8,
        metavar="PART",
        help="of an interconnect's rate that a collective reaches (default: 0.8)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--params", type=float, required=True, metavar="N", help="as 70e9")
    group.add_argument("--layers", type=int, required=True, metavar="N", help="blocks")
    group.add_argument(
        "--width", type=int, metavar="N", help="of the residual stream (default: a usual one)"
    )
    group.add_argument(
        "--hidden", type=int, metavar="N", help="of the gated MLP (default: what params leave)"
    )
    group.add_argument(
        "--kv-width", type=int, metavar="N", help="key heads times their width (default: width)"
    )
    group.add_argument(
        "--vocabulary", type=int, default=0, metavar="N", help="rows of embedding and head"
    )
    group.add_argument(
        "--experts", type=int, default=1, metavar="N", help="gated MLPs of a block (default: 1)"
    )
    group.add_argument(
        "--experts-per-token", type=int, default=1, metavar="N", help="that it goes through"
    )


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mesh and step")
    group.add_argument(
        "--mesh", required=True, metavar="AXIS=N,...", help=f"sizes of {', '.join(AXES)}"
    )
    group.add_argument(
        "--tokens", type=float, default=2.0**22, metavar="N", help="of a step (default: 4194304)"
    )
    group.add_argument(
        "--gather",
        default="fsdp,expert",
        metavar="AXES",
        help="axes along which operands move as codes: gathered as a recipe's gather= says, or "
        "sent by sharding.dispatch; none: as values (default: fsdp,expert)",
    )
    group.add_argument(
        "--microbatches",
        type=int,
        default=1,
        metavar="N",
        help="that a step goes through the stages of a pipeline in (default: 1)",
    )
    group.add_argument(
        "--schedule",
        choices=list(SCHEDULES),
        default="gpipe",
        help="of a pipeline: gpipe keeps residuals of all microbatches, as jax.grad of a loop over "
        "them does; 1f1b of as many as there are stages (default: gpipe)",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="shard the tokens between linear layers along model",
    )
    group.add_argument("--remat", choices=list(REMATS), default="none", help="policy of each block")
    group.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="what is computed in")
    group.add_argument("--param-dtype", choices=_DTYPES, default="float32", help="what is stored")
    group.add_argument("--optimizer", choices=list(_MOMENTS), default="adam")


_COUNTS = (
    "params",
    "layers",
    "width",
    "hidden",
    "kv_width",
    "experts",
    "experts_per_token",
    "tokens",
    "microbatches",
)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: options that do not fit together.
    """
    for name in _COUNTS:
        value = getattr(options, name)
        if value is not None and not 1 <= value < math.inf:
            raise ValueError(
                f"plan: --{name.replace('_', '-')} must be finite and at least 1, got {value}"
            )
    if options.vocabulary < 0:
        raise ValueError(f"plan: --vocabulary must be at least 0, got {options.vocabulary}")
    model, setup, links = _model(options), _setup(options), _links(options.interconnect)
    if not 0 < options.efficiency <= 1:
        raise ValueError(f"plan: efficiency must be in (0, 1], got {options.efficiency}")
    wanted = {options.dtype: high_precision()}
    wanted |= {name: from_name(name) for name in _words(options.recipe)}
    plans = [
        make_plan(name, recipe, model, setup, links, options.efficiency)
        for name, recipe in wanted.items()
    ]
    lines = [*as_values(plans, setup), *assumptions(model, setup, links, options.efficiency)]
    if options.json:
        print(json.dumps(as_json(plans, lines), indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for table in tables(plans):
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _model(options: argparse.Namespace) -> Model:
    return transformer(
        options.params,
        options.layers,
        width=options.width,
        hidden=options.hidden,
        kv_width=options.kv_width,
        vocabulary=options.vocabulary,
        experts=options.experts,
        experts_per_token=options.experts_per_token,
    )


def _setup(options: argparse.Namespace) -> Setup:
    return Setup(
        **parse_mesh(options.mesh),
        tokens=int(options.tokens),
        dtype=np.dtype(options.dtype),
        param_dtype=np.dtype(options.param_dtype),
        moments=_MOMENTS[options.optimizer],
        codes=_known_axes(set(_words(options.gather)) - {"none"}, "gather"),
        sequence=options.sequence_parallel,
        microbatches=options.microbatches,
        schedule=options.schedule,
        remat=options.remat,
    )


def _known_axes(names: Iterable[str], option: str) -> frozenset[str]:
    if unknown := sorted(set(names) - set(AXES)):
        raise ValueError(
            f"plan: {option} must name axes of {', '.join(AXES)}, got {option}={unknown[0]!r}"
        )
    return frozenset(names)


def _links(given: Iterable[str]) -> dict[str, Interconnect]:
    links = {}
    for text in given:
        axis, _, link = text.partition("=")
        _known_axes([axis], "interconnect")
        links[axis] = parse_interconnect(link)
    return links
