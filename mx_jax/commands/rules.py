"""Rules for the tensors of a file (`rules.toml`), and what they decide about each."""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.axes import Axes
from mx_jax.calibrate import gptq, search_scales
from mx_jax.calibrate.scales import GPTQ, SEARCHED, search_for
from mx_jax.checkpoint.files import Entry
from mx_jax.checkpoint.weights import Weights, on_device
from mx_jax.convert.rules import Decision, Layer, Rule, Unknown, decide
from mx_jax.convert.weights import unstorable
from mx_jax.formats import BlockFormat, block_format
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize, store_weights, why_not_stored
from mx_jax.recipes import weight_only
from mx_jax.reference.scale_rules import ScaleRule
from mx_jax.specs import OperandSpec

_KEYS = {"pattern", "format", "recipe", "scale_rule", "scales", "axis", "skip"}
# How scales are chosen besides a rule.
SCALES = (SEARCHED, GPTQ)
_DECIDING = ("format", "recipe", "skip")


@dataclasses.dataclass(frozen=True)
class FileRule:
    """A rule, and along which axis the tensors that it matches have their blocks."""

    rule: Rule  # as conversion has it; its recipe's weight says format and scale rule
    axis: int | None = None  # of the tensor; None: the one that its name implies
    # In place of the recipe's scale rule: `"mse"`, each block's scale by squared error;
    # `"gptq"`, codes by what they are multiplied with as well.
    scales: str | None = None


def read_rules(path: Path) -> tuple[FileRule, ...]:
    """The rules of a file, in order; ValueError names the number of the one that is wrong."""
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"rules: {path} is no TOML: {error}") from error
    rows = table.get("rule")
    if not isinstance(rows, list) or set(table) != {"rule"} or not rows:
        raise ValueError(
            f"rules: {path} must consist of [[rule]] tables, got {', '.join(table) or 'nothing'}"
        )
    return tuple(_rule(row, f"rules: {path}: rule {i}") for i, row in enumerate(rows))


def format_rule(
    pattern: str,
    format: BlockFormat | str,
    scale_rule: ScaleRule | str | None = None,
    axis: int | None = None,
    scales: str | None = None,
) -> FileRule:
    """A rule that stores weights in a format, by the scale rule that loses least for it."""
    if scales not in (None, *SCALES):
        raise ValueError(f"scales must be one of {', '.join(SCALES)}, got scales={scales!r}")
    if scales is not None:
        search_for(block_format(format).scale, "scales")
    return FileRule(Rule(pattern, weight_only(format, scale_rule)), axis, scales)


def _rule(row: object, where: str) -> FileRule:
    if not isinstance(row, dict) or not isinstance(row.get("pattern"), str):
        raise ValueError(f"{where}: needs a pattern, a regular expression, got {row!r}")
    unknown = sorted(set(row) - _KEYS)
    deciding = [key for key in _DECIDING if key in row]
    axis = row.get("axis")
    if unknown or len(deciding) != 1 or row.get("skip", True) is not True:
        raise ValueError(
            f"{where}: needs exactly one of format, recipe and skip = true, and may have "
            f"scale_rule and scales (with format) and axis, got {', '.join(row)}"
        )
    if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
        raise ValueError(f"{where}: axis must be an integer, got axis={axis!r}")
    try:
        if "format" in row and row.get("scale_rule") and row.get("scales"):
            raise ValueError("scales chooses the scales; leave out scale_rule")
        if "format" in row:
            named = row.get("scale_rule"), axis, row.get("scales")
            return format_rule(row["pattern"], row["format"], *named)
        if "scale_rule" in row or "scales" in row:
            raise ValueError("scale_rule and scales go with format; a recipe has its own")
        recipe = None if "skip" in row else str(row["recipe"])
        return FileRule(Rule(row["pattern"], recipe), axis)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


# What a tensor is called below its layer, and the axis of its matrix that a product contracts.
CONTRACTED = {"weight": -1, "kernel": 0, "embedding": -1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """What becomes of a tensor."""

    decision: Decision | None = None  # of the rules; None of what has fewer than two axes
    axes: Axes | None = None  # of one matrix in its product
    num_stacked: int = 0  # leading axes that count matrices
    # How scales and codes are chosen besides the recipe's rule: `"mse"` or `"gptq"`.
    scales: str | None = None

    @property
    def quantizes(self) -> bool:
        return self.decision is not None and self.decision.recipe is not None

    @property
    def spec(self) -> OperandSpec:
        assert self.decision is not None and self.decision.recipe is not None
        spec = self.decision.recipe.output.rhs
        assert spec is not None
        return spec

    def quantize(
        self,
        value: np.ndarray | jax.Array,
        moment: np.ndarray | jax.Array | None = None,
        tensor_scale: object = None,
    ) -> MXArray:
        """The tensor's codes and scales, by GPTQ if the second moment of its inputs is given."""
        assert self.decision is not None and self.decision.recipe is not None and self.axes
        recipe, stacked, spec = self.decision.recipe, self.num_stacked, self.spec
        (axis,) = self.axes.contracting
        how: Any = search_scales if moment is None else functools.partial(gptq, moment=moment)
        if not self.scales:
            how = functools.partial(quantize, scale_rule=spec.scale_rule)
        by = functools.partial(how, format=spec.format, axis=axis, tensor_scale=tensor_scale)
        stored = store_weights(
            on_device(value),
            recipe,
            self.axes,
            num_stacked=stacked,
            packed=False,
            by=by if self.scales or tensor_scale is not None else None,
        )
        assert isinstance(stored, MXArray)
        return stored


def judge(rules: tuple[FileRule, ...], name: str, tensor: Entry | jax.ShapeDtypeStruct) -> Judged:
    """What the first rule that matches makes of a tensor, of which shape and dtype are known."""
    # Patterns match its name whole or without its last part (`.weight`), with `.` or `/` inside.
    shape = tuple(tensor.shape)
    if len(shape) < 2:
        return Judged()
    # The layer that it belongs to, and what it is called there.
    layer, last = name, name
    for mark in "./":
        front, _, back = name.rpartition(mark)
        if front and back in CONTRACTED:
            layer, last = front, back
    path, *aliases = dict.fromkeys((layer, name, layer.replace(".", "/"), name.replace(".", "/")))
    judging = Layer(
        path=path, aliases=tuple(aliases), type=Unknown, kernel=shape, obstacle=unstorable(tensor)
    )
    decision = decide(tuple(each.rule for each in rules), judging)
    if decision.recipe is None or decision.rule is None:
        return Judged(decision=decision)
    axis = rules[decision.rule].axis
    if axis is None and len(shape) == 2:
        axis = CONTRACTED.get(last)
    reason = why_not_stored(decision.recipe)
    if axis is None:
        reason = "which of its axes a product contracts is not known: give its rule an axis"
    elif not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"rules: rule {decision.rule} has axis={axis}, which {name} of shape={list(shape)} has "
            "not; give an axis of all that its pattern matches, or a rule of its own before it"
        )
    if reason is not None or axis is None:
        return Judged(decision=dataclasses.replace(decision, recipe=None, reason=reason))
    axis, ndim = axis % len(shape), len(shape)
    # Axes in front count matrices: experts, say.
    stacked = ndim - 2 if axis >= ndim - 2 else 0
    kept = tuple(i - stacked for i in range(stacked, ndim) if i != axis)
    return Judged(
        decision=decision,
        axes=Axes((), kept, (axis - stacked,)),
        num_stacked=stacked,
        scales=rules[decision.rule].scales,
    )


def quantized_like(judged: Judged, tensor: Entry | jax.ShapeDtypeStruct) -> Any:
    """What `quantize` gives, with shapes and dtypes for arrays."""
    struct = jax.ShapeDtypeStruct(tuple(tensor.shape), tensor.dtype)
    return jax.eval_shape(judged.quantize, struct)


# Names of modules that are multiplied by the same input, in the families of models that there are.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_PLACE = {part: together for together in _TOGETHER for part in together}
_NAME = re.compile(r"(.*[./])?(\w+)([./]\w+)")


def fused(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names of tensors that become one, those of a layer together; none that stand alone."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None and match[2] in _PLACE:
            key = (match[1] or "", *_PLACE[match[2]], match[3])
            groups.setdefault(key, []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def shared_scales(weights: Weights, judged: Mapping[str, Judged]) -> dict[str, float]:
    """Tensor scales of matrices that are quantized alike and become one: that of the largest."""
    scales: dict[str, float] = {}
    # Those of one matrix, which are quantized under one tensor scale.
    single = {name: x for name, x in judged.items() if x.quantizes and x.num_stacked == 0}
    for group in fused(name for name, x in single.items() if x.spec.format.tensor_scale):
        first = judged[group[0]]
        if any((judged[n].spec, judged[n].scales) != (first.spec, first.scales) for n in group):
            continue
        arrays: Any = (weights.stored[name].look() for name in group)
        amax = max(float(_largest(on_device(x))) for x in arrays)
        # Rules differ in what they make of the largest value; a row of it has what a matrix has.
        row = first.quantize(jnp.full((1, first.spec.format.block[1]), amax, jnp.float32))
        assert row.tensor_scale is not None
        scales |= dict.fromkeys(group, float(row.tensor_scale.item()))
    return scales


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0).astype(jnp.float32), initial=0)
