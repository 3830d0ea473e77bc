"""How each tensor comes into another layout: as it is, under other scales, or not without loss."""

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.deferred import deferred
from mx_jax.checkpoint.layout import Layout
from mx_jax.checkpoint.progress import progress_bar
from mx_jax.checkpoint.scales import finite_scales
from mx_jax.checkpoint.transcoding import fit
from mx_jax.checkpoint.weights import Weights
from mx_jax.commands.fused import unlike
from mx_jax.commands.judging import Judged, judge, quantized_like
from mx_jax.commands.output import say, watched
from mx_jax.commands.rules_file import format_rule
from mx_jax.commands.stream import as_it_is, stored_bytes
from mx_jax.mxarray import MXArray


class How(enum.Enum):
    """What becomes of a tensor; the last two change values."""

    COPIED = "copied"
    TRANSCODED = "transcoded exactly"
    ROUNDED = "tensor scale rounded"
    REQUANTIZED = "requantized"

    @property
    def exact(self) -> bool:
        """Whether every value stays."""
        return self in (How.COPIED, How.TRANSCODED)


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
      like: what is written, with shapes and dtypes for arrays.
    """

    name: str
    source: str
    target: str
    how: How
    blocks: int = 0
    unfit: int = 0
    reason: str | None = None
    tensor_scale: float | None = None
    like: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def why(self) -> str:
        """Why it cannot stay what it is, in words."""
        return self.reason or f"{self.unfit} of {self.blocks} blocks do not fit"


def plan(weights: Weights, row: Layout | None) -> list[Conversion]:
    """What becomes of each tensor in a layout; None: in a file of our own, which holds all."""
    found = []
    with progress_bar("look", stored_bytes(weights), watched()) as step:
        for name in weights:
            found.append(_planned(weights, name, row))
            step(name, weights.stored[name].nbytes)
    return found if row is None else _scaled_alike(weights, found, row)


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
    x = _read(weights, one.name)
    try:
        found = fit(x, row.name, tensor_scale=common)
    except ValueError:  # Codes that are copied may be under scales of any size.
        return None
    if found.unfit:
        return None
    how = How.TRANSCODED
    like = _like(x, row, one.name, how)
    return dataclasses.replace(
        one, how=how, blocks=found.blocks, reason=None, tensor_scale=common, like=like
    )


def _read(weights: Weights, name: str) -> MXArray:
    x = weights[name]
    assert isinstance(x, MXArray)
    return x


def converted(weights: Weights, row: Layout | None, planned: Conversion) -> Any:
    """The tensor as it is to be written; nothing is read before."""
    if planned.how in (How.COPIED, How.ROUNDED) or row is None:
        return as_it_is(weights, planned.name)
    make = _transcoded if planned.how is How.TRANSCODED else _requantized
    fetch = weights.stored[planned.name].fetch
    return deferred(functools.partial(make, fetch, row, planned), planned.like)


def counts(planned: list[Conversion]) -> Mapping[How, int]:
    """How many tensors come in each way."""
    ways = [each.how for each in planned]
    return {how: ways.count(how) for how in How if how in ways}


def _planned(weights: Weights, name: str, row: Layout | None) -> Conversion:
    one = weights.stored[name]
    if one.dtype is not None or row is None:
        kind = one.dtype or one.layout
        return Conversion(name=name, source=str(kind), target=str(kind), how=How.COPIED)
    x = weights[name]
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
    return Conversion(**facts, like=_like(x, row, name, facts["how"]))


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


def _like(x: MXArray, row: Layout, name: str, how: How) -> Any:
    if how is How.REQUANTIZED:
        return quantized_like(_judged(row, name, x.shape), _values_of(x))
    # Codes stay, scales are those of the layout's blocks.
    struct: Any = jax.ShapeDtypeStruct
    scales = struct(row.scales_shape(x.shape), row.format.scale.storage_dtype)
    whole = struct((1,) * x.ndim, jnp.float32) if row.format.tensor_scale else None
    return MXArray(
        codes=struct(x.codes.shape, x.codes.dtype),
        scales=scales,
        tensor_scale=whole,
        format=row.format,
        blocks=row.blocks,
        dtype=x.dtype,
    )


def _values_of(x: MXArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def _judged(row: Layout, name: str, shape: tuple[int, ...]) -> Judged:
    """How a tensor is quantized anew: along its last axis, by the rule that loses least."""
    rule = format_rule(".*", row.format, axis=-1)
    judged = judge((rule,), name, jax.ShapeDtypeStruct(shape, jnp.float32))
    if not judged.quantizes:
        reason = judged.decision.reason if judged.decision else "it has one axis"
        raise ValueError(f"convert: {name} cannot be quantized to {row.format.name}: {reason}")
    return judged


def _transcoded(fetch: Any, row: Layout, planned: Conversion) -> MXArray:
    made, _ = checkpoint.transcode(fetch(), row.name, tensor_scale=planned.tensor_scale)
    return made


def _requantized(fetch: Any, row: Layout, planned: Conversion) -> MXArray:
    x = fetch()
    return _judged(row, planned.name, x.shape).quantize(x.dequantize(jnp.float32))
