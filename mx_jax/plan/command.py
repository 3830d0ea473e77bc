"""`python -m mx_jax plan`: its options, tables and JSON."""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from mx_jax.inspect.facts import size
from mx_jax.inspect.tables import rich_table
from mx_jax.plan.step import (
    AXES,
    REMATS,
    SCHEDULES,
    Memory,
    Model,
    Setup,
    Traffic,
    memory,
    parse_mesh,
    traffic,
    transformer,
)
from mx_jax.recipes import from_name, high_precision


class Interconnect(NamedTuple):
    """Bytes a second that one device receives at most, and where the figure is from."""

    rate: float
    source: str


# By the names of the command line: published figures, one direction, one device.
INTERCONNECTS = {
    "nvlink3": Interconnect(300e9, "A100 data sheet, 600 GB/s both ways"),
    "nvlink4": Interconnect(450e9, "H100 data sheet, 900 GB/s both ways"),
    "nvlink5": Interconnect(900e9, "B200 data sheet, 1.8 TB/s both ways"),
    "pcie4": Interconnect(32e9, "PCI Express 4.0, 16 lanes"),
    "pcie5": Interconnect(64e9, "PCI Express 5.0, 16 lanes"),
    "hdr": Interconnect(25e9, "InfiniBand HDR, 200 Gb/s, a port a GPU"),
    "ndr": Interconnect(50e9, "InfiniBand NDR, 400 Gb/s, a port a GPU"),
    "xdr": Interconnect(100e9, "InfiniBand XDR, 800 Gb/s, a port a GPU"),
    "ethernet100": Interconnect(12.5e9, "100 Gb/s Ethernet, a port a GPU"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One recipe's numbers, of one device and one step."""

    name: str  # of the recipe, or of the dtype that it is compared with
    memory: Memory  # bytes on the device
    traffic: tuple[Traffic, ...]  # bytes that it receives
    seconds: float | None  # on the interconnects that were named; None: none was

    @property
    def received(self) -> float:
        return sum(row.bytes for row in self.traffic)


_size = functools.partial(size, digits=3)


def _tables(plans: Sequence[Plan]) -> list[Table]:
    """What a device keeps, and what it receives."""
    names, first = [plan.name for plan in plans], plans[0]
    kept = [
        (field.name, *(_size(getattr(plan.memory, field.name)) for plan in plans))
        for field in dataclasses.fields(Memory)
    ]
    memory = rich_table("Memory of a device", ("what", *names), kept)
    memory.add_section()
    memory.add_row("total", *(_size(plan.memory.total) for plan in plans))
    moved = []
    for rows in zip(*(plan.traffic for plan in plans), strict=True):
        own = rows[0].movement
        cells = (_size(row.bytes) + "*" * bool(row.as_codes) for row in rows)
        moved.append((own.axis, own.collective, own.tensor, own.during, *cells))
    heads = ("axis", "collective", "of each", "pass", *names)
    traffic = rich_table("Bytes that a device receives in a step", heads, moved, left=4)
    traffic.add_section()
    traffic.add_row("all", "", "", "", *(_size(plan.received) for plan in plans))
    if first.received:
        ratios = (f"{plan.received / first.received:.3f}" for plan in plans)
        traffic.add_row(f"of {first.name}'s", "", "", "", *ratios)
    if first.seconds is not None:
        times = (f"{1000 * (plan.seconds or 0):,.1f} ms" for plan in plans)
        traffic.add_row("time", "", "", "", *times)
    return [memory, traffic]


def as_values(plans: Sequence[Plan], setup: Setup) -> list[str]:
    """What does not move as codes although its axis was named, a line each."""
    lines = []
    for plan in plans[1:]:
        for row in plan.traffic:
            own = row.movement
            if own.operands and own.axis in setup.codes and row.as_values:
                moved = "gathered" if own.collective == "all-gather" else "sent"
                lines.append(
                    f"{plan.name}: {own.tensor}s of {', '.join(row.as_values)} are {moved} along "
                    f"{own.axis} as values in the {own.during} pass: the recipe keeps them in high "
                    "precision, or a shard of experts would end within a block."
                )
    return lines


def assumptions(
    model: Model, setup: Setup, links: dict[str, Interconnect], efficiency: float
) -> list[str]:
    """What the numbers rest on, a line each."""
    linears = ", ".join(
        f"{own.name} {own.k:,} x {own.n:,}"
        + f" ({own.experts} experts, {own.experts_per_token} a token)" * own.is_routed
        for own in model.linears
    )
    sizes = {name: getattr(setup, name) for name in AXES}
    # A model without experts has nothing to say of their axis.
    used = {name: n for name, n in sizes.items() if name not in ("expert", "pipe") or n > 1}
    codes = ", ".join(name for name in sorted(setup.codes) if sizes[name] > 1) or "no axis"
    sizes = ", ".join(f"{name}={n}" for name, n in used.items())
    how = "gathered or sent" if "expert" in used else "gathered"
    lines = [
        f"{model.params:,} parameters: {model.layers} blocks of {linears}; {model.other_params:,} "
        "others, which no recipe quantizes.",
        *(f"Assumed: {what}." for what in model.assumed),
        f"{setup.devices} devices ({sizes}); {setup.tokens:,} tokens a step, "
        f"{setup.local_tokens:,} a group of {setup.model}; {setup.dtype} activations, gathered "
        f"values and sums, {setup.param_dtype} parameters, {setup.moments} float32 moments.",
        f"* moves as codes at their real width, with scales: operands {how} along {codes}.",
        "Weights are gathered for each pass. A device of n receives (n - 1) / n of what is "
        "gathered or scattered, twice that of what is all-reduced (a ring).",
        "Residuals: what linear layers keep"
        + (", a byte a code" if setup.remat == "none" else f" under {setup.remat}")
        + "; not attention, norms and activation functions.",
    ]
    if setup.expert > 1:
        lines.append(
            "Each device has as many rows of tokens for every expert, and room for as many as "
            "arrive. Codes arrive once, and stay codes until the backward pass."
        )
    if setup.pipe > 1:
        steps = setup.microbatches + setup.pipe - 1
        kept = setup.in_flight.tokens * setup.microbatches // setup.tokens
        lines += [
            f"{setup.pipe} stages, {setup.microbatches} microbatches of "
            f"{setup.local_tokens // setup.microbatches:,} tokens: idle in {setup.pipe - 1} of "
            f"{steps} steps; residuals of {kept} microbatches ({setup.schedule}). Bytes are of a "
            "stage amid others, without what empty steps move.",
            "Weights are gathered, and their gradients scattered, for each microbatch; what is "
            "summed along other axes is summed once a step. Embedding and head are sharded along "
            "pipe too.",
        ]
        if "pipe" in setup.codes:
            lines.append("Block inputs are quantized to be sent, which no recipe does by itself.")
    for axis, link in links.items():
        lines.append(f"{axis}: {link.rate / 1e9:g} GB/s ({link.source}).")
    if links:
        left = [axis for axis in AXES if getattr(setup, axis) > 1 and axis not in links]
        lines.append(
            f"Time: {efficiency:.0%} of these rates, one collective after another, none hidden "
            "behind arithmetic, no latency" + (f"; not along {', '.join(left)}." if left else ".")
        )
    return lines


def as_json(plans: Sequence[Plan], lines: Sequence[str]) -> dict[str, Any]:
    """The same for programs: bytes and seconds, not rounded."""
    found = []
    for plan in plans:
        own: dict[str, Any] = dataclasses.asdict(plan) | {"received": plan.received}
        own["memory"]["total"] = plan.memory.total
        for row in own["traffic"]:
            moved = row.pop("movement")
            row |= {name: moved[name] for name in ("axis", "collective", "tensor")}
            row["pass"] = moved["during"]
        found.append(own)
    return {"assumptions": list(lines), "recipes": found}


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


_N = {"type": int, "metavar": "N"}
# By group: an option, what it is, and what else argparse needs to know of it.
_OPTIONS: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "model": (
        ("params", "as 70e9", {"type": float, "required": True, "metavar": "N"}),
        ("layers", "blocks", _N | {"required": True}),
        ("width", "of the residual stream (default: a usual one)", _N),
        ("hidden", "of the gated MLP (default: what params leave)", _N),
        ("kv-width", "key heads times their width (default: width)", _N),
        ("vocabulary", "rows of embedding and head", _N | {"default": 0}),
        ("experts", "gated MLPs of a block (default: 1)", _N | {"default": 1}),
        ("experts-per-token", "that it goes through", _N | {"default": 1}),
    ),
    "mesh and step": (
        ("mesh", f"sizes of {', '.join(AXES)}", {"required": True, "metavar": "AXIS=N,..."}),
        ("tokens", "of a step (default: 4194304)", _N | {"type": float, "default": 2.0**22}),
        (
            "gather",
            "axes along which operands move as codes: gathered, as products on a mesh do, or sent "
            "by sharding.dispatch; none: as values (default: fsdp,expert,model)",
            {"default": "fsdp,expert,model", "metavar": "AXES"},
        ),
        (
            "microbatches",
            "that a step goes through the stages of a pipeline in (default: 1)",
            _N | {"default": 1},
        ),
        (
            "schedule",
            "of a pipeline: gpipe keeps residuals of all microbatches, as jax.grad of a loop over "
            "them does; 1f1b of as many as there are stages (default: gpipe)",
            {"choices": list(SCHEDULES), "default": "gpipe"},
        ),
        (
            "sequence-parallel",
            "shard the tokens between linear layers along model",
            {"action": "store_true"},
        ),
        ("remat", "policy of each block", {"choices": list(REMATS), "default": "none"}),
        ("dtype", "what is computed in", {"choices": _DTYPES, "default": "bfloat16"}),
        ("param-dtype", "what is stored", {"choices": _DTYPES, "default": "float32"}),
        ("optimizer", "whose moments are kept", {"choices": list(_MOMENTS), "default": "adam"}),
    ),
    "": (
        (
            "recipe",
            "recipes to compare, by name (default: mxfp8,nvfp4,mxfp4)",
            {"default": "mxfp8,nvfp4,mxfp4", "metavar": "NAMES"},
        ),
        (
            "interconnect",
            f"print a time too; LINK is bytes a second, or one of {', '.join(INTERCONNECTS)}",
            {"action": "append", "default": [], "metavar": "AXIS=LINK"},
        ),
        (
            "efficiency",
            "of an interconnect's rate that a collective reaches (default: 0.8)",
            {"type": float, "default": 0.8, "metavar": "PART"},
        ),
        ("json", "print it as JSON", {"action": "store_true"}),
    ),
}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "plan",
        help="count the bytes of a training step on a mesh, for several recipes",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, rows in _OPTIONS.items():
        group = parser.add_argument_group(title) if title else parser
        for name, text, facts in rows:
            group.add_argument(f"--{name}", help=text, **facts)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    sizes = ("width", "hidden", "kv_width", "experts", "experts_per_token")
    for name in ("params", "layers", *sizes, "tokens", "microbatches"):
        value = getattr(options, name)
        if value is not None and not 1 <= value < math.inf:
            raise ValueError(
                f"plan: --{name.replace('_', '-')} must be finite and at least 1, got {value}"
            )
    if options.vocabulary < 0:
        raise ValueError(f"plan: --vocabulary must be at least 0, got {options.vocabulary}")
    given = {name: getattr(options, name) for name in (*sizes, "vocabulary")}
    model = transformer(options.params, options.layers, **given)
    codes = {*_words(options.gather)} - {"none"}
    _check_axes(codes, "gather")
    setup = Setup(
        **parse_mesh(options.mesh),
        tokens=int(options.tokens),
        dtype=np.dtype(options.dtype),
        param_dtype=np.dtype(options.param_dtype),
        moments=_MOMENTS[options.optimizer],
        codes=frozenset(codes),
        sequence=options.sequence_parallel,
        microbatches=options.microbatches,
        schedule=options.schedule,
        remat=options.remat,
    )
    links: dict[str, Interconnect] = {}
    for text in options.interconnect:
        axis, _, link = text.partition("=")
        _check_axes([axis], "interconnect")
        if link in INTERCONNECTS:
            links[axis] = INTERCONNECTS[link]
            continue
        with contextlib.suppress(ValueError):
            if 0 < float(link) < math.inf:
                links[axis] = Interconnect(float(link), "as given")
                continue
        raise ValueError(
            f"plan: unknown interconnect={link!r}; known: {', '.join(INTERCONNECTS)}, or bytes a "
            "second, as 2e11"
        )
    if not 0 < options.efficiency <= 1:
        raise ValueError(f"plan: efficiency must be in (0, 1], got {options.efficiency}")
    wanted = {options.dtype: high_precision()}
    wanted |= {name: from_name(name) for name in _words(options.recipe)}
    setup.check(model)
    plans = []
    for name, recipe in wanted.items():
        rows = traffic(model, setup, recipe)
        rates = {axis: link.rate * options.efficiency for axis, link in links.items()}
        moved = [(row.bytes, row.movement.axis) for row in rows]
        time = sum(size / rates[axis] for size, axis in moved if axis in rates) if links else None
        kept = memory(model, setup, recipe)
        plans.append(Plan(name=name, memory=kept, traffic=rows, seconds=time))
    lines = [*as_values(plans, setup), *assumptions(model, setup, links, options.efficiency)]
    if options.json:
        print(json.dumps(as_json(plans, lines), indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(*_tables(plans))
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _check_axes(names: Iterable[str], option: str) -> None:
    if unknown := sorted(set(names) - set(AXES)):
        raise ValueError(
            f"plan: {option} must name axes of {', '.join(AXES)}, got {option}={unknown[0]!r}"
        )
