"""Matrices that programs which serve a model make one, and tensor scales that this needs equal.

Queries, keys and values of a layer read the same input, and so do gate and up. vLLM and others lay
such matrices side by side under one tensor scale: the largest, or the first. What had another is
then off by their ratio.
"""

import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.weights import Weights, on_device
from mx_jax.commands.judging import Judged

# Names of modules that are multiplied by the same input, in the families of models that there are.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_PLACE = {part: together for together in _TOGETHER for part in together}
_NAME = re.compile(r"(.*[./])?(\w+)([./]\w+)")


def fused(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names of tensors that become one, those of a layer together; none that stand alone."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found = _NAME.fullmatch(name)
        if found is not None and found[2] in _PLACE:
            key = (found[1] or "", *_PLACE[found[2]], found[3])
            groups.setdefault(key, []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def unlike(scales: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Groups of `fused` whose tensor scales, by name, differ."""
    return [group for group in fused(scales) if len({scales[name] for name in group}) > 1]


def shared_scales(weights: Weights, judged: Mapping[str, Judged]) -> dict[str, float]:
    """Tensor scales of matrices that are quantized alike and become one: that of the largest.

    Args:
      weights: what is quantized; the matrices of a group are read one after the other.
      judged: what becomes of each.
    """
    found: dict[str, float] = {}
    for group in fused(name for name, each in judged.items() if _has_one(each)):
        first = judged[group[0]]
        if any((judged[n].spec, judged[n].scales) != (first.spec, first.scales) for n in group):
            continue
        amax = max(_amax(weights, name) for name in group)
        # Rules differ in what they make of the largest value; a row of it has what a matrix has.
        row = first.quantize(jnp.full((1, first.spec.format.block[1]), amax, jnp.float32))
        assert row.tensor_scale is not None
        found |= dict.fromkeys(group, float(row.tensor_scale.item()))
    return found


def _has_one(judged: Judged) -> bool:
    """Whether it is quantized under one tensor scale for all of it."""
    return judged.quantizes and judged.num_stacked == 0 and judged.spec.format.tensor_scale


def _amax(weights: Weights, name: str) -> float:
    """The largest finite magnitude of an array."""
    x = weights.stored[name].look()
    assert isinstance(x, np.ndarray | jax.Array)
    return float(_largest(on_device(x)))


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0).astype(jnp.float32), initial=0)
