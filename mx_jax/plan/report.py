"""A plan as tables and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mx_jax.plan.interconnects import Interconnect, seconds
from mx_jax.plan.memory import Memory, memory
from mx_jax.plan.mesh import AXES, Setup
from mx_jax.plan.model import Linear, Model
from mx_jax.plan.traffic import Traffic, traffic
from mx_jax.specs import MatmulRecipe

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One recipe's numbers, of one device and one step.

    Attributes:
      name: of the recipe, or of the dtype that it is compared with.
      memory: what is kept.
      traffic: what is received.
      seconds: on the interconnects that were named; None: none was.
    """

    name: str
    memory: Memory
    traffic: tuple[Traffic, ...]
    seconds: float | None

    @property
    def received(self) -> float:
        """Bytes of all movements."""
        return sum(row.bytes for row in self.traffic)


def make_plan(
    name: str,
    recipe: MatmulRecipe,
    model: Model,
    setup: Setup,
    links: dict[str, Interconnect],
    efficiency: float,
) -> Plan:
    """The numbers of one recipe.

    Raises:
      ValueError: layers of experts that do not lie so on the mesh.
    """
    setup.check(model)
    rows = traffic(model, setup, recipe)
    return Plan(
        name=name,
        memory=memory(model, setup, recipe),
        traffic=rows,
        seconds=seconds(rows, links, efficiency) if links else None,
    )


def readable(size: float) -> str:
    """Bytes in decimal units.

    Examples:
      >>> from mx_jax.plan.report import readable
      >>> readable(270_336)
      '270 kB'
    """
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def tables(plans: Sequence[Plan]) -> list[Table]:
    """Memory, and traffic beside that of the first plan."""
    return [_memory_table(plans), _traffic_table(plans)]


def _table(title: str, plans: Sequence[Plan], *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for plan in plans:
        table.add_column(plan.name, justify="right")
    return table


def _memory_table(plans: Sequence[Plan]) -> Table:
    table = _table("Memory of a device", plans, "what")
    for field in dataclasses.fields(Memory):
        table.add_row(field.name, *(readable(getattr(plan.memory, field.name)) for plan in plans))
    table.add_section()
    table.add_row("total", *(readable(plan.memory.total) for plan in plans))
    return table


def _traffic_table(plans: Sequence[Plan]) -> Table:
    columns = ("axis", "collective", "of each", "pass")
    table = _table("Bytes that a device receives in a step", plans, *columns)
    first = plans[0]
    for rows in zip(*(plan.traffic for plan in plans), strict=True):
        own = rows[0].movement
        cells = (readable(row.bytes) + "*" * bool(row.as_codes) for row in rows)
        table.add_row(own.axis, own.collective, own.tensor, own.during, *cells)
    table.add_section()
    table.add_row("all", "", "", "", *(readable(plan.received) for plan in plans))
    if first.received:
        ratios = (f"{plan.received / first.received:.3f}" for plan in plans)
        table.add_row(f"of {first.name}'s", "", "", "", *ratios)
    if first.seconds is not None:
        times = (f"{1000 * (plan.seconds or 0):,.1f} ms" for plan in plans)
        table.add_row("time", "", "", "", *times)
    return table


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
                    f"{own.axis} as values in the {own.during} pass: a shard would end within a "
                    "block, codes of two orientations are more bytes, or the recipe keeps them in "
                    "high precision."
                )
    return lines


def assumptions(
    model: Model, setup: Setup, links: dict[str, Interconnect], efficiency: float
) -> list[str]:
    """What the numbers rest on, a line each."""
    linears = ", ".join(_in_words(own) for own in model.linears)
    sizes = {name: getattr(setup, name) for name in AXES}
    # A model without experts has nothing to say of their axis.
    used = {name: n for name, n in sizes.items() if name not in ("expert", "pipe") or n > 1}
    codes = ", ".join(name for name in sorted(setup.codes) if name in used) or "no axis"
    sizes = ", ".join(f"{name}={n}" for name, n in used.items())
    how = "gathered or sent" if "expert" in used else "gathered"
    lines = [
        f"{model.params:,} parameters: {model.layers} blocks of {linears}; {model.other_params:,} "
        "others, which no recipe quantizes.",
        *(f"Assumed: {what}." for what in model.assumed),
        f"{setup.devices} devices ({sizes}); {setup.tokens:,} tokens a step, "
        f"{setup.local_tokens:,} a group of {setup.model}; {setup.dtype} activations, gathered "
        f"values and sums, {setup.param_dtype} parameters, {setup.moments} float32 moments.",
        f"* moves as codes at their real width, with scales: operands {how} along {codes}, "
        "where blocks end with shards.",
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
    lines += _of_the_pipeline(setup)
    for axis, link in links.items():
        lines.append(f"{axis}: {link.rate / 1e9:g} GB/s ({link.source}).")
    if links:
        left = [axis for axis in AXES if getattr(setup, axis) > 1 and axis not in links]
        lines.append(
            f"Time: {efficiency:.0%} of these rates, one collective after another, none hidden "
            "behind arithmetic, no latency" + (f"; not along {', '.join(left)}." if left else ".")
        )
    return lines


def _of_the_pipeline(setup: Setup) -> list[str]:
    """What a pipeline assumes, if there is one."""
    if setup.pipe == 1:
        return []
    steps = setup.microbatches + setup.pipe - 1
    kept = setup.in_flight.tokens * setup.microbatches // setup.tokens
    lines = [
        f"{setup.pipe} stages, {setup.microbatches} microbatches of "
        f"{setup.local_tokens // setup.microbatches:,} tokens: idle in {setup.pipe - 1} of {steps} "
        f"steps; residuals of {kept} microbatches ({setup.schedule}). Bytes are of a stage amid "
        "others, without what empty steps move.",
        "Weights are gathered, and their gradients scattered, for each microbatch; what is summed "
        "along other axes is summed once a step. Embedding and head are sharded along pipe too.",
    ]
    if "pipe" in setup.codes:
        lines.append("Block inputs are quantized to be sent, which no recipe does by itself.")
    return lines


def _in_words(linear: Linear) -> str:
    routed = f" ({linear.experts} experts, {linear.experts_per_token} a token)"
    return f"{linear.name} {linear.k:,} x {linear.n:,}{routed * linear.is_routed}"


def as_json(plans: Sequence[Plan], lines: Sequence[str]) -> dict[str, Any]:
    """The same for programs: bytes and seconds, not rounded."""
    return {
        "assumptions": list(lines),
        "recipes": [
            {
                "name": plan.name,
                "memory": dataclasses.asdict(plan.memory) | {"total": plan.memory.total},
                "traffic": [
                    {
                        "axis": row.movement.axis,
                        "collective": row.movement.collective,
                        "tensor": row.movement.tensor,
                        "pass": row.movement.during,
                        "bytes": row.bytes,
                        "as_codes": row.as_codes,
                        "as_values": row.as_values,
                    }
                    for row in plan.traffic
                ],
                "received": plan.received,
                "seconds": plan.seconds,
            }
            for plan in plans
        ],
    }
