"""What rules say of the tensors of a file, of which only names, shapes and dtypes are known."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.axes import Axes
from mx_jax.calibrate import gptq, search_scales
from mx_jax.checkpoint.weights import on_device
from mx_jax.commands.rules_file import FileRule
from mx_jax.convert.report import Report
from mx_jax.convert.rules import Decision, Layer, Unknown, decide
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize
from mx_jax.ops.storing import store_weights, why_not_stored
from mx_jax.packed import Quantized
from mx_jax.specs import OperandSpec

# What a tensor is called below its layer, and the axis of its matrix that a product contracts.
CONTRACTED = {"weight": -1, "kernel": 0, "embedding": -1}
_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """What becomes of a tensor.

    Attributes:
      decision: of the rules; None of what has fewer than two axes.
      axes: of one matrix in its product.
      num_stacked: leading axes that count matrices.
      scales: how scales and codes are chosen besides the recipe's rule: `"mse"` or `"gptq"`.
    """

    decision: Decision | None = None
    axes: Axes | None = None
    num_stacked: int = 0
    scales: str | None = None

    @property
    def quantizes(self) -> bool:
        """Whether the tensor is quantized."""
        return self.decision is not None and self.decision.recipe is not None

    @property
    def spec(self) -> OperandSpec:
        """Of what is quantized: format and rule."""
        assert self.decision is not None and self.decision.recipe is not None
        spec = self.decision.recipe.fwd.rhs
        assert spec is not None
        return spec

    def quantize(self, value: Any, moment: Any = None, tensor_scale: Any = None) -> MXArray:
        """The tensor's codes and scales.

        Args:
          value: of the tensor.
          moment: of what it is multiplied with, for GPTQ; without one, scales are searched.
          tensor_scale: of a matrix that has to have another's; None: its own.
        """
        assert self.decision is not None and self.decision.recipe is not None and self.axes
        recipe, stacked, spec = self.decision.recipe, self.num_stacked, self.spec
        (axis,) = self.axes.contracting
        how: Any = search_scales if moment is None else functools.partial(gptq, moment=moment)
        if not self.scales:
            how = functools.partial(quantize, scale_rule=spec.scale_rule)
        by = functools.partial(how, format=spec.format, axis=axis, tensor_scale=tensor_scale)
        found = store_weights(
            on_device(value),
            recipe,
            self.axes,
            num_stacked=stacked,
            packed=False,
            by=by if self.scales or tensor_scale is not None else None,
        )
        assert isinstance(found, MXArray)
        return found


def judge(rules: tuple[FileRule, ...], name: str, tensor: Any) -> Judged:
    """Ask the rules about a tensor.

    Args:
      rules: in order.
      name: of the tensor. Patterns match it whole, or without its last part (`.weight`), with `.`
        or with `/` between the parts.
      tensor: anything with a shape and a dtype, or an MXArray of such.
    """
    shape = tuple(tensor.shape)
    if len(shape) < 2:
        return Judged()
    layer, last = _split(name)
    path, *aliases = dict.fromkeys((layer, name, layer.replace(".", "/"), name.replace(".", "/")))
    judging = Layer(
        path=path, aliases=tuple(aliases), type=Unknown, kernel=shape, obstacle=_obstacle(tensor)
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
    axes, stacked = _axes(axis % len(shape), len(shape))
    scales = rules[decision.rule].scales
    return Judged(decision=decision, axes=axes, num_stacked=stacked, scales=scales)


def report(rules: tuple[FileRule, ...], judged: dict[str, Judged]) -> Report:
    """What becomes of all of them, as conversion reports it."""
    decisions = (each.decision for each in judged.values() if each.decision is not None)
    return Report(rules=tuple(each.rule for each in rules), decisions=tuple(decisions))


def quantized_like(judged: Judged, tensor: Any) -> Any:
    """What `quantize` gives, with shapes and dtypes for arrays."""
    struct = jax.ShapeDtypeStruct(tuple(tensor.shape), tensor.dtype)
    return jax.eval_shape(judged.quantize, struct)


def _split(name: str) -> tuple[str, str]:
    """The layer that a tensor belongs to, and what it is called there."""
    for mark in "/.":
        layer, _, last = name.rpartition(mark)
        if layer and last in CONTRACTED:
            return layer, last
    return name, name


def _obstacle(tensor: Any) -> str | None:
    if isinstance(tensor, Quantized):
        return f"is {tensor.format.name} already"
    if np.dtype(tensor.dtype) not in _DTYPES:
        return f"is {tensor.dtype}; float32, bfloat16 and float16 can be quantized"
    return None


def _axes(axis: int, ndim: int) -> tuple[Axes, int]:
    """Axes of a matrix, and how many axes in front count matrices: experts, say."""
    stacked = ndim - 2 if axis >= ndim - 2 else 0
    kept = tuple(i - stacked for i in range(stacked, ndim) if i != axis)
    return Axes((), kept, (axis - stacked,)), stacked
