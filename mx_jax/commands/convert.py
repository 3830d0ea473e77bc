"""Store quantized weights as another program does, without changing a value.

The same codes and scales under other names, or the same codes under scales of another kind, proved
by decoding both. What is not quantized stays as it is. What the layout cannot hold is refused, with
the number of blocks.

examples:

    python -m mx_jax convert model.gguf model.safetensors --to mx_jax
    python -m mx_jax convert small/ out/ --to compressed-tensors

  MXFP4 as NVFP4, whose scales can be those of most models:
    python -m mx_jax convert mxfp4/ nvfp4/ --to modelopt-nvfp4 --dry-run
    python -m mx_jax convert mxfp4/ nvfp4/ --to modelopt-nvfp4

LAYOUT is mx_jax, a layout's name, or a program's, which means its layout for the tensors' format.
"""

import argparse
import dataclasses
import enum
from typing import Any

from mx_jax import checkpoint
from mx_jax.checkpoint.files import deferred, progress_bar
from mx_jax.checkpoint.layouts import LAYOUTS, Layout, named
from mx_jax.checkpoint.scales import finite_scales, small_tensor_scale
from mx_jax.checkpoint.torchao import TORCHAO
from mx_jax.checkpoint.transcoding import single_tensor_scale, under_scales_of
from mx_jax.checkpoint.weights import Stored, Weights
from mx_jax.commands import stream
from mx_jax.commands.output import Commands, print_table, say, watched
from mx_jax.commands.rules import fused
from mx_jax.mxarray import MXArray


class How(enum.Enum):
    """What becomes of a tensor; one that does not fit is not written."""

    COPIED = "copied"
    TRANSCODED = "transcoded exactly"
    ROUNDED = "tensor scale rounded"
    REFUSED = "does not fit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What becomes of one tensor."""

    name: str
    source: str  # its block format, or its dtype
    target: str  # likewise, of what is written
    tensor: Any  # what is written; nothing is read before
    how: How
    blocks: int = 0  # of a tensor that is not merely copied, how many the layout has for it
    unfit: int = 0  # how many of them cannot hold its values
    reason: str | None = None  # why the codes cannot stay, where no count says
    # Of a tensor whose codes stay, where the layout has one for all of it.
    tensor_scale: float | None = None


def add_to(commands: Commands) -> None:
    """Add the command to a parser's subparsers."""
    written = [stream.MX_JAX, *(row.name for row in LAYOUTS), TORCHAO]
    help = "store quantized weights as another program does"
    text = (
        f"{__doc__ or ''}\nlayouts: {', '.join(written)}\nprograms: {', '.join(stream.programs())}"
    )
    parser = stream.add_command(commands, run, "convert", "in", help=help, text=text, writes=True)
    parser.add_argument("--to", metavar="LAYOUT", required=True, help="how to store it")
    parser.add_argument(
        "--inexact",
        action="store_true",
        help="round tensor scales that the layout stores inverted, where they would change",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would become of each")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    stream.check_output(options)
    weights = stream.read(options)
    # A program's layout depends on the formats that are there, which are read for it alone.
    read_all = weights.stored.items() if options.to in stream.programs() else ()
    layout = stream.layout_for(
        options.to, {name: stream.as_it_is(one) for name, one in read_all}, weights.path
    )
    row = None if layout in (stream.MX_JAX, TORCHAO) else named(layout)
    planned = []
    with progress_bar("look", stream.stored_bytes(weights), watched()) as step:
        for name, one in weights.stored.items():
            planned.append(_planned(name, one, row))
            step(name, one.nbytes)
    planned = planned if row is None else _scaled_alike(weights, planned, row)
    changed = [each for each in planned if each.how is not How.COPIED]
    allowed = {How.TRANSCODED, How.ROUNDED} if options.inexact else {How.TRANSCODED}
    refused = [each for each in changed if each.how not in allowed]
    tensors = {each.name: each.tensor for each in planned}
    if options.dry_run:
        _print(changed or planned)
    if refused:
        first = refused[0]
        why = first.reason or f"{first.unfit} of {first.blocks} blocks do not fit"
        raise ValueError(
            f"convert: {weights.path}: {len(refused)} of {len(planned)} tensors cannot be stored "
            f"as {layout} without loss, such as {first.name} in {first.source}: {why}; "
            "--dry-run lists them, --inexact allows rounded tensor scales; for other codes "
            "dequantize the checkpoint, and quantize the result"
        )
    if options.dry_run:
        stream.check_layout(tensors, layout, values=True)
        return 0
    stream.report_dequantized(weights, weights)
    sizes = stream.write_out(options, weights, tensors, layout, options.to)
    _print(changed)
    say(f"{options.out}: {layout}, {len(weights)} tensors, {sizes}")
    ways = [each.how for each in planned]
    say(", ".join(f"{ways.count(how)} {how.value}" for how in How if how in ways))
    return 0


def _print(planned: list[Conversion]) -> None:
    columns = ("tensor", "from", "to", "how", "blocks", "do not fit")
    facts = ((x.name, x.source, x.target, x.how.value, x.blocks, x.unfit) for x in planned)
    if planned:
        print_table(columns, [[str(x or "") for x in row] for row in facts], columns, box=None)


def _planned(name: str, one: Stored, row: Layout | None) -> Conversion:
    if one.dtype is not None or row is None:
        kind = str(one.dtype or one.layout)
        tensor = stream.as_it_is(one)
        return Conversion(name=name, source=kind, target=kind, tensor=tensor, how=How.COPIED)
    x = one.fetch()
    same: Any = {"name": name, "tensor": stream.as_it_is(one, x), "how": How.COPIED}
    if not isinstance(x, MXArray):
        return Conversion(source=str(one.layout), target=str(x.dtype), **same)
    finite_scales(x, name)  # as when it is written: a dry run reports it too
    same |= {"source": x.format.name, "target": row.format.name}
    factor = None if x.tensor_scale is None else small_tensor_scale(x, name, row.divides)
    alike = dataclasses.replace(x.format, name=row.format.name) == row.format
    if alike and x.blocks == row.blocks_of(name, x.ndim):
        # Codes and scales stay. Does the tensor scale, where it is stored inverted?
        if factor is not None:
            same["tensor_scale"] = float(factor.item()) if factor.size == 1 else None
        if factor is not None and row.divides and (1 / (1 / factor) != factor).any():
            reason = (
                f"the reciprocal of its tensor scale, {float(factor.flat[0])}, is no float32 number"
            )
            same |= {"how": How.ROUNDED, "reason": reason}
        return Conversion(**same)
    try:
        changed = _transcoded(one, x, row)
    except ValueError as error:
        changed = {"reason": str(error)}
    if changed.get("unfit", 1):
        changed |= {"how": How.REFUSED, "tensor_scale": None}
    return Conversion(**same | changed)


def _transcoded(
    one: Stored, x: MXArray, row: Layout, tensor_scale: float | None = None
) -> dict[str, Any]:
    """The same codes under the layout's scales; ValueError where they cannot stay."""
    like, unfit = under_scales_of(x, row.name, tensor_scale)
    scale = single_tensor_scale(like)

    def make() -> MXArray:
        stored: Any = one.fetch()
        return checkpoint.transcode(stored, row.name, tensor_scale=scale)

    facts = {"how": How.TRANSCODED, "blocks": unfit.size, "unfit": int(unfit.sum())}
    return facts | {"tensor_scale": scale, "tensor": deferred(make, like)}


def _scaled_alike(weights: Weights, planned: list[Conversion], row: Layout) -> list[Conversion]:
    """One tensor scale for what programs make one tensor, where every value fits under it."""
    by_name = {each.name: each for each in planned}
    scales = {each.name: each.tensor_scale for each in planned if each.tensor_scale is not None}
    apart = []
    for group in fused(scales):
        common = max(scales[name] for name in group)
        changed = {}  # nothing, where all are the same
        for name in (name for name in group if scales[name] < common):
            x: Any = weights[name]
            try:
                changed[name] = _transcoded(weights.stored[name], x, row, common)
            except ValueError:  # Codes that are copied may be under scales of any size.
                changed[name] = {}
        if any(facts.get("unfit", 1) for facts in changed.values()):
            apart.append(group)
            continue
        for name, facts in changed.items():
            by_name[name] = dataclasses.replace(by_name[name], reason=None, **facts)
    if apart:
        say(
            f"{len(apart)} groups of tensors, such as {', '.join(apart[0])}, fit under no one "
            "tensor scale and keep their own; programs that merge them are off by the ratio; "
            f"`quantize --to {row.name}` of the unquantized model gives them one"
        )
    return list(by_name.values())
