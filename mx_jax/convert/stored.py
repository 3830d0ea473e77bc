"""Kernels that are stored quantized: what the rules say of a parameter, and what it becomes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.calibrate.ways import Way
from mx_jax.convert.rules import Decision, Layer, Rule, decide
from mx_jax.mxarray import MXArray
from mx_jax.ops.storing import store_weights, why_not_stored
from mx_jax.packed import Quantized, gives_rows, unpacked

_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A parameter that a rule may quantize.

    Attributes:
      decision: what the rules say of it.
      num_stacked: how many of its leading axes count layers.
      looked_up: whether rows are looked up in it: packed only where the layout gives them one by
        one.
    """

    decision: Decision
    num_stacked: int
    looked_up: bool = False

    @classmethod
    def judge(cls, rules: tuple[Rule, ...], layer: Layer, value: Any) -> "Kernel":
        """Ask the rules about a parameter.

        Args:
          rules: in order.
          layer: that has it.
          value: of the parameter; its shape and dtype count.
        """
        stacked = value.ndim - (value.ndim if layer.kernel is None else len(layer.kernel))
        obstacle = layer.obstacle or _obstacle(layer, value)
        whole = dataclasses.replace(layer, kernel=tuple(value.shape), obstacle=obstacle)
        decision = decide(rules, whole)
        reason = decision.recipe and why_not_stored(decision.recipe)
        if reason:
            decision = dataclasses.replace(decision, recipe=None, reason=reason)
        looked_up = issubclass(layer.type, (flax.linen.Embed, flax.nnx.Embed))
        return cls(decision=decision, num_stacked=stacked, looked_up=looked_up)

    def store(self, value: Any, pack: bool, by: Way | None) -> Any:
        """The parameter as it is to be stored; without a recipe, as it is."""
        layer, recipe = self.decision.layer, self.decision.recipe
        if recipe is None or layer.axes is None:
            return value
        stored = store_weights(
            jnp.asarray(value),
            recipe,
            layer.axes,
            num_stacked=self.num_stacked,
            packed=pack,
            by=None if by is None else self._by(by),
        )
        return stored if not self.looked_up or gives_rows(stored) else unpacked(stored)

    def _by(self, by: Way) -> Callable[[jax.Array], MXArray]:
        layer, spec = self.decision.layer, self.decision.recipe and self.decision.recipe.fwd.rhs
        assert layer.axes is not None and spec is not None
        contracting, ((axis, _), *others) = layer.axes.contracting, layer.axes.blocks(spec.format)
        if others:
            raise ValueError(
                f"convert.weights: by={by!r} needs blocks along one axis, but the recipe of "
                f"{layer.path!r} has format={spec.format.name}"
            )
        return functools.partial(
            by,
            (layer.path, *layer.aliases),
            format=spec.format,
            axis=axis if len(contracting) == 1 else contracting,
            looked_up=self.looked_up,
        )


def _obstacle(layer: Layer, value: Any) -> str | None:
    if isinstance(value, Quantized):
        return f"is {value.format.name} already"
    if value.dtype not in _DTYPES:
        return f"is {value.dtype}; float32, bfloat16 and float16 can be quantized"
    if layer.axes is None:
        return "which of its axes a product contracts is not known"
    return None
