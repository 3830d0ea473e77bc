"""`python -m mx_jax convert`: each tensor as it is, under other scales, or not without loss."""

import argparse
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from mx_jax import checkpoint
from mx_jax.checkpoint.folder import config_of, progress_bar
from mx_jax.checkpoint.layouts import LAYOUTS, Layout, named
from mx_jax.checkpoint.safetensors_file import deferred
from mx_jax.checkpoint.scales import finite_scales
from mx_jax.checkpoint.torchao import TORCHAO
from mx_jax.checkpoint.transcoding import fit
from mx_jax.checkpoint.weights import Stored, Weights
from mx_jax.commands.output import console, say, watched
from mx_jax.commands.rules import Judged, format_rule, judge, quantized_like, unlike
from mx_jax.commands.stream import (
    OWN,
    add_command,
    as_it_is,
    check_output,
    layout_for,
    programs,
    read,
    stored_bytes,
    tell_of_values,
    write_out,
)
from mx_jax.mxarray import MXArray

_DESCRIPTION = """
Store quantized weights as another program does, without changing a value: the same codes and scales
under other names, or the same codes under scales of another kind, proved by decoding both. What is
not quantized stays as it is. What the layout cannot hold is refused, with the number of blocks.
"""
_EXAMPLES = """
examples:

    python -m mx_jax convert model.gguf model.safetensors --to mx_jax
    python -m mx_jax convert small/ out/ --to compressed-tensors

  MXFP4 as NVFP4, whose scales can be those of most models:
    python -m mx_jax convert mxfp4/ nvfp4/ --to modelopt-nvfp4 --dry-run
    python -m mx_jax convert mxfp4/ nvfp4/ --to modelopt-nvfp4

LAYOUT is mx_jax, a layout's name, or that of a program, of whose layouts the one is taken that
holds the format that is there.
"""
_COLUMNS = ("tensor", "from", "to", "how", "blocks", "do not fit")


class How(enum.Enum):
    """What becomes of a tensor; the last two change values."""

    COPIED = "copied"
    TRANSCODED = "transcoded exactly"
    ROUNDED = "tensor scale rounded"
    REQUANTIZED = "requantized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What becomes of one tensor.

    Attributes:
      name: of the tensor.
      source: its block format, or its dtype.
      target: likewise, of what is written.
      how: it comes there.
      blocks: of a tensor that is not merely copied, how many the layout has for it.
      unfit: how many of them cannot hold its values.
      reason: why the codes cannot stay, where no count tells.
      tensor_scale: of a tensor whose codes stay, where the layout has one for all of it.
    """

    name: str
    source: str
    target: str
    how: How
    blocks: int = 0
    unfit: int = 0
    reason: str | None = None
    tensor_scale: float | None = None


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    written = [OWN, *(row.name for row in LAYOUTS if row.rotation is None), TORCHAO]
    parser = add_command(
        commands,
        run,
        "in",
        writes=True,
        name="convert",
        help="store quantized weights as another program does",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\nlayouts: {', '.join(written)}\nprograms: {', '.join(programs())}",
    )
    parser.add_argument("--to", metavar="LAYOUT", required=True, help="how to store it")
    parser.add_argument(
        "--inexact",
        action="store_true",
        help="where it does not fit: round the tensor scale, or quantize the values anew",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would become of each")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: a layout that does not hold what is there, or files that are damaged.
    """
    if not options.dry_run:
        check_output(options)
    weights = read(options)
    held = {name: as_it_is(weights, name) for name in weights}
    layout = layout_for(options.to, held, weights.path)
    row = None if layout in (OWN, TORCHAO) else named(layout)
    if row is not None:
        apart, before = _experts_apart(weights, row), len(weights)
        if len(apart) > before:
            say(f"the experts of gpt-oss, one by one: {before} tensors become {len(apart)}")
        weights = apart
    planned = _plan(weights, row)
    changed = [each for each in planned if each.how is not How.COPIED]
    inexact = [each for each in changed if each.how is not How.TRANSCODED]
    if options.dry_run:
        _print(changed or planned)
        return 0
    if inexact and not options.inexact:
        first = inexact[0]
        why = first.reason or f"{first.unfit} of {first.blocks} blocks do not fit"
        raise ValueError(
            f"convert: {weights.path}: {len(inexact)} of {len(planned)} tensors cannot be stored "
            f"as {layout} without loss, such as {first.name} in {first.source}: {why}; "
            "--dry-run lists them, --inexact changes their values"
        )
    tell_of_values(weights, weights)
    tensors = {each.name: _converted(weights, row, each) for each in planned}
    sizes = write_out(options, weights, tensors, layout, options.to)
    _print(changed)
    say(f"{options.out}: {layout}, {len(weights)} tensors, {sizes}")
    ways = [each.how for each in planned]
    say(", ".join(f"{ways.count(how)} {how.value}" for how in How if how in ways))
    return 0


def _print(planned: list[Conversion]) -> None:
    """A row a tensor."""
    if not planned:
        return
    table = Table(*_COLUMNS, box=None)
    for each in planned:
        numbers = [str(each.blocks or ""), str(each.unfit or "")]
        table.add_row(each.name, each.source, each.target, each.how.value, *numbers)
    console().print(table)


def _plan(weights: Weights, row: Layout | None) -> list[Conversion]:
    """What becomes of each tensor in a layout; None: in a file of our own, which holds all."""
    found = []
    with progress_bar("look", stored_bytes(weights), watched()) as step:
        for name, one in weights.stored.items():
            found.append(_planned(name, one, row))
            step(name, one.nbytes)
    return found if row is None else _scaled_alike(weights, found, row)


def _planned(name: str, one: Stored, row: Layout | None) -> Conversion:
    if one.dtype is not None or row is None:
        kind = str(one.dtype or one.layout)
        return Conversion(name=name, source=kind, target=kind, how=How.COPIED)
    x = one.fetch()
    if not isinstance(x, MXArray):
        kind = str(x.dtype)
        return Conversion(name=name, source=str(one.layout), target=kind, how=How.COPIED)
    finite_scales(x, name)  # no layout holds others, and a dry run says so too
    facts: dict[str, Any] = {"name": name, "source": x.format.name, "target": row.format.name}
    if dataclasses.replace(x.format, name=row.format.name) == row.format and x.blocks == row.blocks:
        return Conversion(**facts, **_of_the_same_format(x, row))
    try:
        found = fit(x, row.name)
    except ValueError as error:
        facts |= {"reason": str(error), "how": How.REQUANTIZED}
    else:
        facts |= {"unfit": found.unfit, "blocks": found.blocks}
        facts["how"] = How.REQUANTIZED if found.unfit else How.TRANSCODED
        # That of what is quantized anew is not known yet, and no other's has to be it.
        facts["tensor_scale"] = None if found.unfit else found.tensor_scale
    if facts["how"] is How.REQUANTIZED:
        # What cannot be quantized is refused before anything is written.
        _judged(name, x.shape, row)
    return Conversion(**facts)


def _of_the_same_format(x: MXArray, row: Layout) -> dict[str, Any]:
    """Of codes and scales that stay: whether the tensor scale does, where it is stored inverted."""
    if x.tensor_scale is None:
        return {"how": How.COPIED}
    factor = np.asarray(x.tensor_scale)
    one = {"tensor_scale": float(factor.item()) if factor.size == 1 else None}
    if not row.divides or (1 / (1 / factor) == factor).all():
        return {"how": How.COPIED, **one}
    reason = f"the reciprocal of its tensor scale, {float(factor.flat[0])}, is no float32 number"
    return {"how": How.ROUNDED, "reason": reason, **one}


def _scaled_alike(weights: Weights, planned: list[Conversion], row: Layout) -> list[Conversion]:
    """One tensor scale for what programs make one tensor, where every value fits under it."""
    by_name = {each.name: each for each in planned}
    scales = {each.name: each.tensor_scale for each in planned if each.tensor_scale is not None}
    apart = []
    for group in unlike(scales):
        common = max(scales[name] for name in group)
        lower = [by_name[name] for name in group if scales[name] < common]
        changed = [_under(weights, each, row, common) for each in lower]
        if None in changed:
            apart.append(group)
            continue
        by_name |= {each.name: each for each in changed if each is not None}
    if apart:
        say(
            f"{len(apart)} groups of tensors, such as {', '.join(apart[0])}, fit under no one "
            "tensor scale and keep their own; programs that merge them are off by the ratio; "
            f"`quantize --to {row.name}` of the unquantized model gives them one"
        )
    return list(by_name.values())


def _under(weights: Weights, one: Conversion, row: Layout, common: float) -> Conversion | None:
    """The same values under a tensor scale of others; None: they do not fit."""
    x: Any = weights[one.name]
    try:
        found = fit(x, row.name, tensor_scale=common)
    except ValueError:  # Codes that are copied may be under scales of any size.
        return None
    if found.unfit:
        return None
    changed: Any = {"how": How.TRANSCODED, "blocks": found.blocks, "tensor_scale": common}
    return dataclasses.replace(one, reason=None, **changed)


def _converted(weights: Weights, row: Layout | None, planned: Conversion) -> Any:
    """The tensor as it is to be written; nothing is read before."""
    name, one = planned.name, weights.stored[planned.name]
    if planned.how in (How.COPIED, How.ROUNDED) or row is None:
        return as_it_is(weights, name)

    def transcoded() -> MXArray:
        x: Any = one.fetch()
        return checkpoint.transcode(x, row.name, tensor_scale=planned.tensor_scale)[0]

    def requantized() -> MXArray:
        x: Any = one.fetch()
        return _judged(name, x.shape, row).quantize(x.dequantize(jnp.float32))

    struct: Any = jax.ShapeDtypeStruct
    if planned.how is How.REQUANTIZED:
        judged = _judged(name, one.shape, row)
        return deferred(requantized, quantized_like(judged, struct(one.shape, jnp.float32)))
    # Codes stay, scales are those of the layout's blocks.
    whole = struct((1,) * len(one.shape), jnp.float32) if row.format.tensor_scale else None
    like = MXArray(
        codes=struct(one.shape, jnp.uint8),
        scales=struct(row.scales_shape(one.shape), row.format.scale.storage_dtype),
        tensor_scale=whole,
        format=row.format,
        blocks=row.blocks,
        dtype=jnp.dtype("float32"),
    )
    return deferred(transcoded, like)


def _judged(name: str, shape: tuple[int, ...], row: Layout) -> Judged:
    """How a tensor is quantized anew: along its last axis, by the rule that loses least."""
    rule = format_rule(".*", row.format, axis=-1)
    judged = judge((rule,), name, jax.ShapeDtypeStruct(shape, jnp.float32))
    if not judged.quantizes:
        reason = judged.decision.reason if judged.decision else "it has one axis"
        raise ValueError(f"convert: {name} cannot be quantized to {row.format.name}: {reason}")
    return judged


# gpt-oss keeps all experts of a layer in one tensor, where rows of gate and up take turns; other
# layouts hold a matrix each. The names are llm-compressor's: `experts.7.up_proj.weight`, `.bias`.
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
# Of a fused tensor's rows, those of each matrix.
_ROWS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


def _experts_apart(weights: Weights, row: Layout) -> Weights:
    """Weights with the experts of gpt-oss one by one, where a layout has a matrix for each module.

    The same codes, scales and biases, in other tensors. Nothing is read; when one is, the tensor
    that it is a part of is held until another's part is read.

    Raises:
      ValueError: gpt-oss as it was released, whose tensors have names of its own.
    """
    if row.weight != ".weight":
        return weights
    released = [name for name, layout in weights.quantized.items() if layout == "gpt-oss-original"]
    if released:
        raise ValueError(
            f"convert: {weights.path}: {row.name} holds a matrix for each Linear, and "
            f"{released[0]} is gpt-oss as it was released, which fuses attention as well, under "
            "names that no such program knows; convert the model of the hub"
        )
    fused = [name for name in weights if _is_fused(weights, name)]
    if not fused:
        return weights

    @functools.lru_cache(maxsize=1)
    def whole(name: str) -> Any:
        return weights.stored[name].look()

    stored: dict[str, Stored] = {}
    for name, one in weights.stored.items():
        if name in fused:
            stored |= _parts(name, one, functools.partial(whole, name))
        else:
            stored[name] = one
    return dataclasses.replace(weights, stored=stored)


def _is_fused(weights: Weights, name: str) -> bool:
    """Whether it is such a tensor of gpt-oss: other models' gate and up do not take turns."""
    found = _FUSED.fullmatch(name)
    if found is None:
        return False
    matrix = weights.stored.get(f"{found[1]}.{found[2]}")
    axes = 2 if found[3] else 3
    if matrix is None or len(weights.stored[name].shape) != axes:
        return False
    return matrix.layout == "gpt-oss" or config_of(weights.path).get("model_type") == "gpt_oss"


def _parts(name: str, one: Stored, whole: Callable[[], Any]) -> Iterator[tuple[str, Stored]]:
    """The tensors that a fused one becomes, expert by expert."""
    found = _FUSED.fullmatch(name)
    assert found is not None
    base, fused, bias = found.groups()
    experts, rows, *rest = one.shape
    for index in range(experts):
        for part, own in _ROWS[fused].items():
            count = len(range(rows)[own])

            def read(index: int = index, own: slice = own) -> Any:
                return whole()[index, own]

            def fetch(read: Callable[[], Any] = read) -> Any:
                return jax.tree.map(jnp.asarray, read())

            changed = {"fetch": fetch, "host": None if one.host is None else read}
            nbytes = one.nbytes * count // (experts * rows)
            part_of = dataclasses.replace(one, shape=(count, *rest), nbytes=nbytes, **changed)
            yield f"{base}.{index}.{part}.{'bias' if bias else 'weight'}", part_of
